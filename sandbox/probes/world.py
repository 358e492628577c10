"""What the attacks of `pace_agent.sandbox.probes` aim at: files, listeners and a process made for them alone."""

import contextlib
import hashlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self

_SET_INSIDE = {
    "PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "PWD",
    "OLDPWD", "SHLVL", "TERM", "_",
}  # fmt: skip
"""Variables that a sandbox sets by itself, perhaps to what they are outside."""


class World:
    """`with World(...)` makes it and takes it away. `given` is what code inside is told of it."""

    def __init__(self, user: int | None) -> None:
        self._user = user if os.geteuid() == 0 else None
        self.token = secrets.token_hex(16)
        self.given: dict[str, object] = {}
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="pace-agent-probes-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.chmod(0o755)
            self.secret, self.target = folder / "secret", folder / "target"
            self.secret.write_text(self.token)
            self.secret.chmod(0o644)
            self.target.write_text("")
            self.target.chmod(0o666)
            self._tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            abstract, path = f"\0pace-agent-{self.token}", str(folder / "socket")
            self._unix = [stack.enter_context(_listen(name)) for name in (abstract, path)]
            (folder / "socket").chmod(0o666)
            mark = self.new_mark()
            self._victim = subprocess.Popen(
                ["sleep", mark], env={"PATH": os.defpath, "PACE_AGENT_PROBE": self.token}, stdin=subprocess.DEVNULL,
                user=self._user, group=self._user, extra_groups=None if self._user is None else [],
            )  # fmt: skip
            stack.callback(self._end_victim)
            entries = [f"{key}={value}" for key, value in os.environ.items() if key not in _SET_INSIDE]
            entries.append(f"PACE_AGENT_PROBE={self.token}")
            self.given = {
                "secret": str(self.secret),
                "target": str(self.target),
                "folder": str(folder),
                "port": self._tcp.getsockname()[1],
                "abstract": abstract,
                "socket": path,
                "victim": self._victim.pid,
                "token": mark,
                # Hashed: what must not get in is not told inside.
                "environment": [hashlib.sha256(os.fsencode(entry)).hexdigest() for entry in entries],
            }
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.close()

    def victim_lives(self) -> bool:
        return self._victim.poll() is None

    def _end_victim(self) -> None:
        self._victim.kill()
        self._victim.wait()

    def untouched(self) -> bool:
        """Whether the file that everyone may write is as it was made."""
        return self.target.read_bytes() == b""

    def restore(self) -> None:
        """What one probe did must not count against the next."""
        self.target.write_text("")
        self.was_called()

    def was_called(self) -> bool:
        """Whether anybody has connected to one of the listeners since it was last asked."""
        called = False
        for server in (self._tcp, *self._unix):
            server.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                called = True
        return called

    @staticmethod
    def new_mark() -> str:
        """Seconds for a `sleep` that can be told from every other one; it ends by itself after a minute."""
        return f"6{random.randrange(10)}.{secrets.randbits(48)}"

    @staticmethod
    def processes(mark: str) -> list[int]:
        """Processes of this machine that have the mark in their command line."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                        found.append(int(name))
        return found

    @staticmethod
    def kill(pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _listen(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(name)
        server.listen()
    except BaseException:
        server.close()
        raise
    return server
