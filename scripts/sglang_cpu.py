"""Make a virtual environment in which the real SGLang server runs on a CPU, for the tests:

    python scripts/sglang_cpu.py FOLDER [--print-python]

It takes 4 GB of disk and some minutes; where FOLDER holds a finished environment of the same recipe, it takes none.
SGLang asks for dozens of wheels that exist for CUDA only. So its needs are listed in `sglang_cpu.txt`, installed as
they stand, and `cuda_only.py` stands in for what it imports all the same. Both routers come along. It is enough for the
tests and for nothing else: no images, no quantised models, no speed.

What always holds:

* The stamp is written last, so a folder with a stamp is finished; one without is made anew.
* One process at a time works on FOLDER: others wait at FOLDER.lock, then find it finished.
* A folder that isn't such an environment is never deleted.

pip gets its packages from where its own settings say. They should offer torch's CPU build, else FOLDER grows by the
gigabytes of CUDA libraries.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINS = HERE / "sglang_cpu.txt"
STAND_INS = HERE / "cuda_only.py"
STEPS = 1
"""To be raised when `make` changes what it makes."""
GIGABYTE = 1e9
NEEDED = 4.5 * GIGABYTE
"""Bytes free beforehand: 3.9 GB stay, the rest is for what pip unpacks on the way."""
STAMP = "pace-agent-recipe"


class Failed(Exception):
    """The environment could not be made; the message is for people."""


def recipe() -> str:
    """What the finished environment depends on, as a hash."""
    parts = [str(STEPS), f"{sys.version_info.major}.{sys.version_info.minor}", PINS.read_text(), STAND_INS.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def finished(folder: Path) -> bool:
    """Whether `folder` holds all of this very recipe."""
    stamp = folder / STAMP
    return python_of(folder).exists() and stamp.is_file() and stamp.read_text() == recipe()


def prepare(folder: Path) -> bool:
    """Make the environment in `folder` unless it is there. Returns whether it had to be made.

    Raises `Failed` where the disk is too full, where pip fails, or where `folder` is something else.
    """
    if finished(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.with_name(folder.name + ".lock")):
        if finished(folder):
            return False
        clear(folder)
        check_disk(folder.parent)
        make(folder)
        return True


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path`. The system lets go of it when this process ends, whichever way."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process makes it (it holds {path}); waiting for that one")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def clear(folder: Path) -> None:
    """Delete what a broken-off or an older run left."""
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists()):
        raise Failed(f"{folder} holds something that isn't a virtual environment; name a new or an empty folder")
    say(f"{folder} is unfinished or of another recipe: making it anew")
    (folder / STAMP).unlink(missing_ok=True)
    shutil.rmtree(folder)


def check_disk(parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    if free < NEEDED:
        raise Failed(f"{parent} has {free / GIGABYTE:.1f} GB free; the environment needs {NEEDED / GIGABYTE:.1f} GB")


def make(folder: Path) -> None:
    """All steps, the stamp last."""
    begun = recipe()  # before the steps: who edits the recipe meanwhile gets another environment the next time
    say(f"making {folder}")
    run([sys.executable, "-m", "venv", str(folder)], "python -m venv failed")
    pins = PINS.read_text().splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    say(f"installing {torch}")
    # With its own dependencies, which differ from one build of torch to another.
    install(folder, [torch])
    say(f"installing SGLang and {sum('==' in pin for pin in pins)} pinned packages in all")
    install(folder, ["--no-deps", "-r", str(PINS)])
    site = run([str(python_of(folder)), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "no Python")
    shutil.copy(STAND_INS, Path(site.strip()) / STAND_INS.name)
    (Path(site.strip()) / "cuda_only.pth").write_text("import cuda_only; cuda_only.install()\n")
    say("trying to import the server")
    run([str(python_of(folder)), "-c", "import sglang.srt.entrypoints.http_server"], "the server can't be imported")
    (folder / STAMP).write_text(begun)


def install(folder: Path, what: list[str]) -> None:
    command = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    run(command, f"pip could not install {' '.join(what)}")


def run(command: list[str], failure: str) -> str:
    """The standard output of `command`. Raises `Failed` with its errors, or its last lines where none is marked."""
    # A Python path would mix other packages in.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        marked = [line for line in lines if "ERROR" in line] or lines[-15:]
        raise Failed("\n  ".join([f"{failure} (exit code {done.returncode}):", *marked]))
    return done.stdout


def say(message: str) -> None:
    print(f"sglang_cpu: {message}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path, help="where the environment is, or is to be")
    parser.add_argument("--print-python", action="store_true", help="print the path of its interpreter")
    asked = parser.parse_args()
    folder = asked.folder.absolute()  # not resolved: a link stays the name by which others know it
    try:
        if prepare(folder):
            say("done")
    except Failed as error:
        print(f"sglang_cpu: {error}", file=sys.stderr)
        return 1
    if asked.print_python:
        print(python_of(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
