"""The runtime in a process of its own beside the trainer: engine, environments and pool never wait for its interpreter.

What always holds:

* The child lives no longer than its parent: when the pipe closes it cancels every rollout, closes environments and
  engine, and exits. What holds it longer than `CLOSE_SECONDS` is cut off.
* Ctrl-C and SIGTERM are for the parent, which decides: from its first moment the child takes no notice of them.
* `stop` is a signal, so that it can be given while an answer is awaited. It is never lost, however early it comes.
* One question at a time, each with one answer. An exception there is raised here. After a start that failed there are
  no questions: each raises what went wrong then.
* What is logged there is logged here, while an answer is awaited.
"""

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from pace_agent.engine.base import WeightSource
from pace_agent.engine.local.process import share_weights
from pace_agent.errors import PaceError, RunError
from pace_agent.rollout import handle
from pace_agent.rollout.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
CLOSE_SECONDS = 20.0
IGNORED = (signal.SIGINT, signal.SIGTERM)
STOP = signal.SIGUSR1
LOGS_PER_ANSWER = 100
"""More would fill the pipe while nobody reads it."""


class RuntimeProcess(handle.Asking):
    """A `RuntimeHandle`. `build` makes the runtime in the child: a function of a module, or a partial of one."""

    def __init__(self, build: Callable[[], Runtime]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, build), name="pace-runtime")
        self._theirs = theirs
        self._starting = False
        self._failure: PaceError | None = None
        self._closed = False

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        resource_tracker.ensure_running()  # starting it changes the signal mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*IGNORED, STOP})
        try:
            self._process.start()  # with signals held back until it has handlers for them
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._theirs.close()
        self._send((_start, (state,), {}))
        self._starting = True

    def started(self) -> None:
        if self._process.pid is None:
            raise RunError("the runtime was not started")
        if self._failure is not None:
            raise self._failure
        if self._starting:
            self._starting = False
            try:
                self._receive()
            except PaceError as error:
                self._failure = error
                raise

    def step_ended(self, weights: WeightSource) -> int:
        return self._with_weights(handle.step_ended, weights)

    def publish(self, weights: WeightSource) -> None:
        self._with_weights(handle.publish, weights)

    def ask(self, question: Callable[Concatenate[Runtime, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise RunError("the runtime is closed")
        self.started()
        self._send((question, args, kwargs))
        answer: T = self._receive()
        return answer

    def stop(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, STOP)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        if self._process.pid is not None:
            try:
                self._process.join(CLOSE_SECONDS)
            finally:  # Ctrl-C while it closes: at once
                if self._process.is_alive():
                    self._process.kill()
                    self._process.join()

    def _with_weights(self, question: Callable[[Runtime, WeightSource], Awaitable[T]], weights: WeightSource) -> T:
        """Tensors travel as a file in shared memory."""
        if not isinstance(weights, Mapping):
            return self.ask(question, weights)
        file = share_weights(weights)
        try:
            return self.ask(question, file)
        finally:
            file.unlink(missing_ok=True)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> Any:
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._died() from error
            if kind == "answer":
                return value
            if kind == "error":
                raise value
            name, level, message = value
            logging.getLogger(name).log(level, "%s", message)

    def _died(self) -> RunError:
        self._process.join(5.0)
        return RunError(
            f"the process that plays the rollouts ended with exit code {self._process.exitcode}; "
            "what it said stands above"
        )


async def _start(state: Mapping[str, Any] | None) -> None:
    """Names the first message; the child knows what to do."""


def _child(connection: Connection, build: Callable[[], Runtime]) -> None:
    for number in IGNORED:
        signal.signal(number, _take_no_notice)
    threading.Thread(target=_follow_parent, name="pace-parent", daemon=True).start()
    with suppress(asyncio.CancelledError):
        asyncio.run(_serve(connection, build))


def _take_no_notice(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN this is not handed down: what tools and sandboxes start can be terminated."""


def _follow_parent() -> None:
    """When the parent has ended, the pipe is closed and this process on its way out. Let nothing hold it for long."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


async def _serve(connection: Connection, build: Callable[[], Runtime]) -> None:
    """Answer questions until the pipe closes."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    runtime: Runtime | None = None
    stopping = False

    def read() -> None:
        try:
            while connection.poll():
                inbox.put_nowait(connection.recv())
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            main.cancel()
        except Exception as error:  # a question that can't be read has an answer too
            inbox.put_nowait(error)

    def stop() -> None:
        nonlocal stopping
        stopping = True
        if runtime is not None:
            runtime.stop()

    logs = _Logs(connection, loop)
    logging.getLogger("pace_agent").addHandler(logs)
    loop.add_reader(connection.fileno(), read)
    loop.add_signal_handler(STOP, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*IGNORED, STOP})
    try:
        while True:
            message = await inbox.get()
            answer: tuple[str, Any]
            try:
                if isinstance(message, Exception):
                    raise message
                question, args, kwargs = message
                if runtime is None:
                    runtime = build()
                    if args[0] is not None:
                        runtime.load_state_dict(args[0])
                    if stopping:
                        runtime.stop()
                    await runtime.start()
                    answer = ("answer", None)
                else:
                    answer = ("answer", await question(runtime, *args, **kwargs))
            except Exception as error:
                answer = ("error", _portable(error))
            logs.sent = 0
            _send_answer(connection, answer)
    finally:
        if runtime is not None:
            await runtime.aclose()


class _Logs(logging.Handler):
    """Sends warnings to the parent, which shows them. `sent` counts those since the last answer."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self.sent = 0
        self._connection = connection
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._send, record.name, record.levelno, record.getMessage())

    def _send(self, name: str, level: int, message: str) -> None:
        self.sent += 1
        if self.sent <= LOGS_PER_ANSWER:
            with suppress(OSError):  # the parent is gone
                self._connection.send(("log", (name, level, message[:500])))


def _send_answer(connection: Connection, answer: tuple[str, Any]) -> None:
    try:
        connection.send(answer)
    except OSError:
        pass  # the parent is gone, as the reader is about to learn
    except Exception as error:  # it does not pickle, and nothing was sent
        connection.send(("error", _portable(error)))


def _portable(error: Exception) -> PaceError:
    """The error itself where it is one of this package's that pickles; else a RunError that tells it."""
    if isinstance(error, PaceError):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    traceback.print_exception(error)
    return RunError(f"{type(error).__name__}: {error}")
