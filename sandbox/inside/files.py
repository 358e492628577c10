"""Files of the sandbox's folder, reached without following a link: what openat2 calls BENEATH and NO_SYMLINKS."""

# ruff: noqa: SIM105 - contextlib is an import that every session would pay for
from __future__ import annotations

import errno
import os
import stat

PREFIX = "/box/"


def parts_of(path: str) -> list[str]:
    """The names on the way from the root to `path`; PermissionError if it leads elsewhere."""
    if path.startswith("/") and not path.startswith(PREFIX):
        raise PermissionError(errno.EACCES, "not below /box")
    if path.startswith(PREFIX):
        path = path[len(PREFIX) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise PermissionError(errno.EACCES, "not below /box")
    return parts


def open_below(root: str, path: str, flags: int, make_folders: bool = False) -> int:
    """A regular file below `root`. Each step is opened from the last one, so nothing can be swapped in between."""
    parts = parts_of(path)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            if make_folders:
                try:
                    os.mkdir(part, dir_fd=folder)
                except FileExistsError:
                    pass
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Not blocking: a named pipe must not hold the supervisor.
        fd = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(errno.EACCES, "not a regular file")
    return fd
