"""A small program that runs one command and sees to it that nothing of it outlives its owner. Standard library only.

It is started by its file, in an interpreter without site packages; `processes.py` is the other side. What always holds:

* However the owner ends, the command gets SIGTERM, and after `grace` seconds everything that it started gets SIGKILL,
  also what left its process group or lost its parent: on Linux such orphans come to this program, the subreaper.
* It ends only when no process is left below it. Should it be killed itself, the command is killed by the kernel.
* The secret file exists, readable by its user alone, from the start until it is forgotten or the command has ended.

Standard input: one line of JSON (`command`, `environment`, `log`, `grace`, `owner`, `secret`), then `forget` to remove
the secret file; its end means stop. Standard output: `pid N`, and `exit CODE` (negative: the signal) at the end.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from types import FrameType
from typing import Any

SECRET_PATH = "{secret}"
"""Stands in the command for the path of the secret file."""
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

stop_asked = False


def main() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask_to_stop)
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:  # `select` sees what follows the line
        order = json.loads(unbuffered.readline())
    secret = write_secret(order["secret"]) if order["secret"] else None
    command = [f"{secret}/secret.yaml" if part == SECRET_PATH else part for part in order["command"]]
    pid = start(command, order["environment"], order["log"])
    say(f"pid {pid}")
    code = watch(pid, order, secret)
    kill_all()
    forget(secret)
    say(f"exit {code}")


def start(command: list[str], environment: dict[str, str], log: str) -> int:
    """The pid of `command`, whose output goes to the end of the file `log`."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(out, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]} can't be started: {error}\n".encode())
    finally:
        os._exit(127)


def watch(pid: int, order: dict[str, Any], secret: str | None) -> int:
    """The exit code of `pid`; it is made to end when the owner wants so or has gone."""
    deadline: float | None = None
    listening = True
    while (status := reap(pid)) is None:
        if listening and select.select([0], [], [], POLL_SECONDS)[0]:
            words = os.read(0, 4096)
            if b"forget" in words:
                forget(secret)
            listening = bool(words)
        elif not listening:
            time.sleep(POLL_SECONDS / 4)
        if deadline is None and (stop_asked or not listening or os.getppid() != order["owner"]):
            deadline = time.monotonic() + order["grace"]
            os.kill(pid, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def reap(pid: int) -> int | None:
    """Collect whatever has ended; the status of `pid` once it has."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == pid:
            return status
        if ended == 0:
            return None


def kill_all() -> None:
    """SIGKILL for every descendant, until there is none."""
    while True:
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has just ended
            children.setdefault(parent, []).append(int(name))
    found, fresh = [], [os.getpid()]
    while fresh:
        fresh = [child for pid in fresh for child in children.get(pid, [])]
        found += fresh
    return found


def write_secret(text: str) -> str:
    """A folder for this user alone that holds `text`."""
    folder = tempfile.mkdtemp(prefix="pace-agent-")
    with open(os.open(f"{folder}/secret.yaml", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return folder


def forget(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def ask_to_stop(number: int, frame: FrameType | None) -> None:
    global stop_asked
    stop_asked = True


def say(line: str) -> None:
    with suppress(OSError):  # the owner may be gone
        os.write(1, f"{line}\n".encode())


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
