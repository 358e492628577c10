"""Mounts that only we and our rooms see: ways through closed folders, and memory file systems with a bound on files."""

import ctypes
import os

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)

PLACE = "/sys"
"""Covered in a room's mounts before it starts: nothing that builds a room needs it, and every Linux has it."""
FOLDERS = {"box": 0o755, "tmp": 0o1777, "shm": 0o1777}
"""Names below PLACE of a room's writable folders, with their modes."""


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _blocked_ancestor(path: str, user: int) -> str | None:
    """The topmost folder above `path` that `user` (with no group of ours) may not search."""
    parts = os.path.abspath(path).split("/")
    for end in range(2, len(parts)):
        folder = "/".join(parts[:end])
        state = os.stat(folder)
        bit = 0o100 if state.st_uid == user else 0o001
        if not state.st_mode & bit:
            return folder
    return None


def expose(paths: list[str], user: int) -> None:
    """Make folders reachable for `user` where a closed folder (a 0700 home, for one) stands above them.

    In a mount namespace of our own the closed folder is covered by an empty one in which only `paths` stand, at
    their old names. Nothing changes for anyone else, and what was closed stays closed.
    """
    blocked = {path: _blocked_ancestor(path, user) for path in paths}
    covers = sorted({cover for cover in blocked.values() if cover})
    if not covers:
        return
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    # Opened after unshare: a mount of another namespace can't be bound.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path, cover in blocked.items() if cover}
    os.umask(0o022)
    for cover in covers:
        _checked(_libc.mount(b"tmpfs", os.fsencode(cover), b"tmpfs", 6, b"mode=0755,size=64k"), f"cover {cover}")
    # Outer folders first, so that a path inside another one is not covered by it.
    for path in sorted(sources, key=len):
        if not os.path.lexists(path):
            os.makedirs(path)
            # The descriptor reaches the folder behind the cover.
            _checked(
                _libc.mount(b"/proc/self/fd/%d" % sources[path], os.fsencode(path), None, _MS_BIND | _MS_REC, None),
                f"bind {path}",
            )
        os.close(sources[path])


def become_mounter() -> bool:
    """Get the right to mount, as an ordinary user by a user namespace; whether we have it. First tried in a fork."""
    trial = os.fork()
    if trial == 0:
        try:
            _own_user_namespace()
            make_folders(os.geteuid(), 1 << 16, 16)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(trial, 0)[1] != 0:
        return False
    _own_user_namespace()
    return True


def _own_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        return
    _checked(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as handle:
            handle.write(text)


def make_folders(user: int, size: int, files: int) -> None:
    """In the process that becomes a room: memory file systems for it, at most `size` bytes and `files` files each."""
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    flags = _MS_NOSUID | _MS_NODEV
    _checked(_libc.mount(b"tmpfs", os.fsencode(PLACE), b"tmpfs", flags, b"mode=0755,size=64k"), f"cover {PLACE}")
    for name, mode in FOLDERS.items():
        path = f"{PLACE}/{name}"
        os.mkdir(path)
        options = f"mode={mode:o},uid={user},gid={user},size={size},nr_inodes={files}".encode()
        _checked(_libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options), path)
