"""A process of ours that dies with us, whatever becomes of us. `guard.py` is the program between the two."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pace_agent.engine.sglang.serving.guard import POLL_SECONDS, SECRET_PATH

GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL. Servers look for the signal every five seconds, and then free their GPU's memory."""

__all__ = ["SECRET_PATH", "GuardedProcess"]


class GuardedProcess:
    """One command, its output in a log file. Used by one thread; `finish` before it is dropped.

    Args:
        command: what to run; the word {secret} in it stands for the path of a file that holds `secret`.
        environment: all of its environment.
        log: its output is added to the end; created for this user alone.
        secret: text that must not be seen in the list of processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        secret: str = "",
    ) -> None:
        self.pid: int | None = None
        self.exit_code: int | None = None
        self._text = b""
        guard = Path(__file__).with_name("guard.py")
        # A session of its own: Ctrl-C in the terminal is for us, who then stop it in order.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guard)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        order = {
            "command": list(command),
            "environment": dict(environment),
            "log": str(log),
            "grace": GRACE_SECONDS,
            "owner": os.getpid(),
            "secret": secret,
        }
        self._tell(json.dumps(order) + "\n")

    def running(self, wait: float = POLL_SECONDS) -> bool:
        """Whether it still runs; returns after at most `wait` seconds, or as soon as there is news."""
        assert self._guard.stdout is not None
        if select.select([self._guard.stdout], [], [], wait)[0]:
            news = os.read(self._guard.stdout.fileno(), 4096)
            self._text += news
            *lines, self._text = self._text.split(b"\n")
            for word, _, number in (line.partition(b" ") for line in lines):
                if word == b"pid":
                    self.pid = int(number)
                elif word == b"exit":
                    self.exit_code = int(number)
            return bool(news)
        return True

    def forget_secret(self) -> None:
        """It has read the file by now."""
        self._tell("forget\n")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for all of it after the grace. Doesn't wait."""
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()

    def finish(self) -> int:
        """Stop it, wait until nothing of it is left, and return its exit code (negative: the signal)."""
        self.stop()
        while self.running():
            pass
        assert self._guard.stdout is not None
        self._guard.stdout.close()
        self._guard.wait()
        _kill_session(self._guard.pid)  # there is something left only if the guard itself was killed
        return self.exit_code if self.exit_code is not None else -signal.SIGKILL

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        data = line.encode()
        with suppress(OSError):  # it has ended: `running` says so
            while data:
                data = data[self._guard.stdin.write(data) :]


def _kill_session(session: int) -> None:
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if os.getsid(int(name)) == session:
                os.kill(int(name), signal.SIGKILL)
