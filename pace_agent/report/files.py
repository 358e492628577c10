"""Files that are whole or absent."""

import os
import tempfile
from pathlib import Path

from pace_agent.errors import UserError

RUN_FOLDER = """\
config.toml          the resolved configuration
metrics.jsonl        one row per step
ledger.jsonl         the counts of every state at every draw
trajectories.jsonl   every rollout with its messages, stamps, reward and fate
checkpoints/         the newest ones, to resume from
best/                the best model so far, as a Hugging Face folder
final/               the model at the end, as a Hugging Face folder
report.png           reward, staleness, pool and length ratio over the steps
summary.json         the run in one object
"""
"""What lies in a run folder."""


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new one, never a part.

    The data is on the disk before the name points to it. Permissions are the usual ones for a new file.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """The process's umask; reading it needs no change of it where /proc says it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022


def open_run_folder(path: Path) -> Path:
    """Make the folder of a new run; UserError when it can't be made or written, or already holds a run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "config.toml").exists():
            raise UserError(f"run.dir = {str(path)!r} already holds a run; go on with --resume {path}, or name another")
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"run.dir = {str(path)!r} can't be written: {error.strerror or error}") from error
    return path
