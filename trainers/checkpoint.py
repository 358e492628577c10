"""Checkpoints that are whole or don't count.

What always holds:

* A checkpoint counts when its marker is there and every file that the marker lists has its size. The marker is written
  last, by a rename, after the files have reached the disk.
* An older checkpoint is removed only when a newer one counts, and its marker goes first. So a run that is killed at any
  moment after its first checkpoint keeps one that counts.

`pace_state.pkl` is a pickle: load only checkpoints that you or someone you trust has written.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pace_agent.errors import UserError

MARKER = "COMPLETE"
STATE = "pace_state.pkl"
NAME = re.compile(r"checkpoint-(\d+)")


def write_source_state(folder: Path, state: Mapping[str, Any]) -> None:
    with (folder / STATE).open("wb") as file:
        pickle.dump(dict(state), file, protocol=pickle.HIGHEST_PROTOCOL)


def load_source_state(checkpoint: Path) -> dict[str, Any]:
    """What the batch source saved. UserError for a folder that is not a whole checkpoint."""
    check_complete(checkpoint)
    with (checkpoint / STATE).open("rb") as file:
        state: dict[str, Any] = pickle.load(file)
    return state


def mark_complete(folder: Path, **facts: Any) -> None:
    """Flush every file to the disk, then write the marker with `facts`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    unfinished = folder / f"{MARKER}.tmp"
    with unfinished.open("w") as file:
        json.dump({**facts, "files": sizes}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MARKER)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The facts that `mark_complete` was given, and `files` with their sizes."""
    facts: dict[str, Any] = json.loads((checkpoint / MARKER).read_text())
    return facts


def is_complete(folder: Path) -> bool:
    try:
        sizes = read_marker(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def check_complete(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        raise UserError(f"no checkpoint folder at {checkpoint}")
    if not is_complete(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is not whole: it was interrupted, or files are missing from it")


def step_of(folder: Path) -> int:
    """The step of a `checkpoint-N` folder, -1 for any other."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def find_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint below `run_dir` that counts: in it, or in its folder `checkpoints`."""
    found = [
        folder
        for parent in (run_dir, run_dir / "checkpoints")
        if parent.is_dir()
        for folder in parent.iterdir()
        if step_of(folder) >= 0 and is_complete(folder)
    ]
    return max(found, key=step_of, default=None)


def remove_old(folder: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints in `folder` that count. Torn ones older than the newest go too."""
    steps = sorted((path for path in folder.iterdir() if step_of(path) >= 0), key=step_of)
    whole = [path for path in steps if is_complete(path)]
    if not whole:
        return
    for path in steps:
        if path not in whole[-keep:] and step_of(path) < step_of(whole[-1]):
            remove(path)


def remove(checkpoint: Path) -> None:
    """Take the marker first: a removal that is interrupted must not leave a folder that seems whole."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers: saving a model would draw one into whatever the run shows."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def replace_folder(new: Path, place: Path) -> None:
    """Put the folder `new` where `place` is; the old one is out of the way for a moment, never half overwritten."""
    old = place.with_name(f"{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)
