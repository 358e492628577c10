"""Keep a process running: wait until it serves, start it again when it ends on its own, and give up at some point."""

import http.client
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pace_agent.engine.sglang.serving.processes import GuardedProcess
from pace_agent.errors import RunError, UserError

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
STEADY_SECONDS = 600.0
"""Who served this long starts counting restarts anew."""
PROBE_SECONDS = 5.0
PORTS = range(20_000, 30_000)
"""Below the ports that systems give to outgoing connections, which could take one while a server still loads."""


class KeptProcess:
    """A place where one process serves, and after its end another one.

    A thread of its own starts them and watches them. `gone` is set once no further one will follow, and `failure` says
    why. Nobody waits for a process that was started again to serve: `is_ready` of the first one is waited for.

    Args:
        name: for messages, such as "the server http://127.0.0.1:1".
        command: gives the command of the next process.
        is_ready: whether it serves; called again and again until it does.
        environment: all of its environment.
        log: the file for its output.
        start_seconds: time for `is_ready` to become true.
        secret: what the word {secret} in the command stands for the file of.
        hide: words that no message may show.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], list[str]],
        *,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str],
        log: Path,
        start_seconds: float,
        secret: str = "",
        hide: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = log
        self.pid: int | None = None
        self.failure = ""
        self.ready = threading.Event()
        self._command = command
        self._is_ready = is_ready
        self._environment = environment
        self._start_seconds = start_seconds
        self._secret = secret
        self._hide = hide
        self._restarts = 0
        self._gone = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def gone(self) -> bool:
        return self._gone.is_set()

    def start(self) -> None:
        self._thread.start()

    def ask_to_close(self) -> None:
        self._closing.set()

    def join(self) -> None:
        """Wait until nothing of it is left. After `ask_to_close`."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._one_process():
                pass
        except Exception as error:
            log.exception("the thread that watches %s failed", self.name)
            self.failure = f"{self.name} is not watched any more: {error}"
        finally:
            self._gone.set()

    def _one_process(self) -> bool:
        """Start the process and stay with it to its end. Whether to start another one."""
        command = self._command()
        process = GuardedProcess(command, environment=self._environment, log=self.log, secret=self._secret)
        started = time.monotonic()
        served: float | None = None
        late = False
        try:
            while process.running():
                self.pid = process.pid
                if self._closing.is_set() or late:
                    process.stop()
                elif served is None and self._is_ready():
                    served = time.monotonic()
                    process.forget_secret()
                    self._serves()
                elif served is None:
                    late = time.monotonic() - started > self._start_seconds
        finally:
            self.pid = None
            code = process.finish()
        if self._closing.is_set():
            return False
        if served is not None and time.monotonic() - served > STEADY_SECONDS:
            self._restarts = 0
        return self._ended(f"was not ready after {self._start_seconds:g} s" if late else _ending(code), command)

    def _serves(self) -> None:
        if self.ready.is_set():
            log.warning("%s serves again", self.name)
        self.ready.set()

    def _ended(self, how: str, command: Sequence[str]) -> bool:
        said = f"{self.name} {how}. The end of {self.log}:\n{tail(self.log, hide=self._hide)}"
        if not self.ready.is_set():
            self.failure = f"{said}\nIts command: {' '.join(command)}"
            return False
        if self._restarts == MAX_RESTARTS:
            self.failure = said
            log.error("%s\nIt was started again %d times; it is given up now", said, MAX_RESTARTS)
            return False
        self._restarts += 1
        log.warning("%s\nStarting it again (%d of %d)", said, self._restarts, MAX_RESTARTS)
        return True


def wait_ready(processes: Sequence[KeptProcess]) -> None:
    """Wait until every one serves; RunError as soon as one has failed."""
    while not all(process.ready.is_set() for process in processes):
        for process in processes:
            if process.gone:
                raise RunError(process.failure)
            process.ready.wait(0.1)


def close_all(processes: Sequence[KeptProcess]) -> None:
    """Stop them, all at once, and wait until nothing of them is left."""
    for process in processes:
        process.ask_to_close()
    for process in processes:
        process.join()


def environment_for(python: str, hidden: Sequence[str] = ()) -> dict[str, str]:
    """The environment of this process for the interpreter `python`, without the variables `hidden`."""
    if python != sys.executable:
        # A path that is meant for this interpreter would lay its packages over those of another one.
        hidden = (*hidden, "PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    # Modules of the working folder must not take the place of installed ones.
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def has_module(python: str, module: str, environment: Mapping[str, str]) -> bool:
    """Whether the interpreter `python` finds `module`; UserError where it can't be run."""
    question = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec({module!r}) else 3)"
    try:
        return subprocess.run([python, "-c", question], capture_output=True, env=dict(environment)).returncode == 0
    except OSError as error:
        raise UserError(f"sglang.python = {python!r} can't be run: {error.strerror or error}") from error


def status_of(port: int, path: str, key: str = "") -> int:
    """The status of a GET on the loopback interface; 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _ending(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def tail(log: Path, lines: int = 15, hide: Sequence[str] = ()) -> str:
    """The last lines of a log, indented, without the secrets to `hide`."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return "  (there is no log)"
    for secret in hide:
        text = text.replace(secret, "***") if secret else text
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (the log is empty)"


def free_ports(count: int, first: int = 0, key: str = "sglang.port") -> list[int]:
    """`count` ports of the loopback interface that nobody listens on: from `first` on, or any where it is 0.

    Nothing holds them until they are used. UserError where one from `first` on is taken.
    """
    if first:
        ports = list(range(first, first + count))
        if taken := [port for port in ports if not _is_free(port)]:
            raise UserError(f"{key} = {first}: port {taken[0]} of this machine is taken; choose another, or 0 for any")
        return ports
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
