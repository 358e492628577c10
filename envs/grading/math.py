r"""Grading mathematical answers, in processes that can be killed.

    reward = await grade(gold="\\frac{1}{2}", prediction="... so the answer is \\boxed{0.5}")

The policy, pinned by tests:

* The last `\boxed{...}` of the prediction counts. No box scores 0 (`strict=False` reads the whole text instead).
* The gold answer may be a worked solution: its last box, or what follows `####`, counts.
* A gold answer of words (`east`) or one capital letter (a choice) is compared as text. Any other that can't be read
  raises GraderError: it is a fault of the data set, not of the answer.
* Order matters to the comparison, so both arguments are keyword-only: gold `1<x<2` accepts `(1,2)`, not the other way.
* As math-verify has it: 50% equals 50 and 0.5; units are ignored; 1/3 equals 0.33333333 but not 0.333; 1,000 is 1000;
  (1,2) equals {1,2} but not [1,2]. Numbers like 1e3 are read as powers of ten.
* A comparison that takes longer than its deadline, or kills its process twice, scores 0.

What this does not promise: that two answers that differ mathematically never compare equal. It is a symbolic heuristic.
"""

import asyncio
import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pace_agent.envs.grading.answers import final_value, is_words, last_box, same_words, tidy
from pace_agent.errors import GraderError

DEADLINE = 5.0
"""Seconds for one comparison."""
START_DEADLINE = 120.0
"""Seconds for a worker to import what it needs."""
MAX_ANSWER = 2000
"""Characters; a longer answer is not compared and scores 0."""


async def grade(*, gold: str, prediction: str, strict: bool = True, deadline: float = DEADLINE) -> float:
    """1.0 if the prediction's answer equals the gold one, else 0.0.

    GraderError where the gold answer can't be read or no worker can be started.
    """
    wanted = tidy(final_value(gold))
    answer = last_box(prediction)
    if answer is None and not strict:
        answer = prediction
    if answer is not None:
        answer = tidy(answer)
    if is_words(wanted):
        return float(answer is not None and same_words(wanted, answer))
    if not wanted or len(wanted) > MAX_ANSWER:
        raise GraderError(f"the gold answer {gold[:80]!r} can't be read")
    if not answer or len(answer) > MAX_ANSWER:
        return 0.0
    verdict = await shared_grader().compare(wanted, answer, deadline)
    if verdict is None:
        return 0.0
    if not verdict["gold_read"]:
        raise GraderError(f"the gold answer {gold[:80]!r} can't be read")
    return float(verdict["equal"])


class Grader:
    """A few worker processes, each driven by one thread; they start when first needed and end with `close`.

    What always holds: a worker serves one comparison at a time; one that misses its deadline is killed and replaced.
    """

    def __init__(self, workers: int | None = None) -> None:
        count = workers or max(1, min(4, len(os.sched_getaffinity(0))))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="pace-agent grader")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False

    async def compare(self, gold: str, answer: str, deadline: float) -> dict[str, Any] | None:
        """The worker's verdict; None where the deadline passed or the worker died of it."""
        return await asyncio.wrap_future(self._threads.submit(self._compare, gold, answer, deadline))

    def _compare(self, gold: str, answer: str, deadline: float) -> dict[str, Any] | None:
        for _ in range(2):
            worker = self._worker()
            try:
                verdict = worker.ask({"gold": gold, "answer": answer, "seconds": deadline}, deadline)
            except (EOFError, OSError):
                self._drop(worker)
                continue
            if verdict is None:
                self._drop(worker)
            return verdict
        return None

    def _worker(self) -> "_Worker":
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            with self._lock:
                if self._closed:
                    raise GraderError("the grader is closed")
                worker = self._own.worker = _Worker()
                self._workers.add(worker)
            try:
                ready = worker.receive(START_DEADLINE)
            except EOFError:
                ready = None
            if ready is None:
                self._drop(worker)
                raise GraderError("the grading process did not start; is math-verify installed?")
        return worker

    def _drop(self, worker: "_Worker") -> None:
        self._own.worker = None
        with self._lock:
            self._workers.discard(worker)
        worker.kill()

    def pids(self) -> list[int]:
        """Process ids of the workers that are alive."""
        with self._lock:
            return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers. Closing twice is fine."""
        with self._lock:
            self._closed = True
            workers, self._workers = list(self._workers), set()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """One process and its two pipes."""

    def __init__(self) -> None:
        # The child finds what this process finds, an uninstalled checkout included, and never imports the main module.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from pace_agent.envs.grading.worker import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._rest = b""

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.receive(seconds)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """One line; None at the deadline, EOFError when the process has ended."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        poll = select.poll()  # unlike select.select, at home with descriptors above 1023
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


_shared: Grader | None = None
_shared_pid = 0
_shared_lock = threading.Lock()


def shared_grader() -> Grader:
    """The one grader of this process."""
    global _shared, _shared_pid
    with _shared_lock:
        if _shared is None or _shared_pid != os.getpid():
            _shared, _shared_pid = Grader(), os.getpid()
        return _shared


@atexit.register
def _close_shared() -> None:
    if _shared is not None and _shared_pid == os.getpid():
        _shared.close()
