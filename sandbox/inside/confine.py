"""What a process takes away from itself, by way of the C library: for programs that can pay for loading ctypes."""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CAPSET = {"x86_64": 126, "aarch64": 91}

libc = ctypes.PyDLL(None, use_errno=True)
"""Without letting go of the interpreter: it may not be in between when it is forked."""


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def set_dumpable(whether: bool) -> None:
    """Whether processes of the same user may look into this one, its memory and its descriptors. Forks inherit it."""
    checked(libc.prctl(_PR_SET_DUMPABLE, int(whether), 0, 0, 0), "PR_SET_DUMPABLE")


def drop_capabilities(machine: str) -> None:
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no more
    header = struct.pack("Ii", 0x20080522, 0)
    checked(libc.syscall(_CAPSET[machine], header, bytes(24)), "capset")


def install_filter(program: bytes) -> None:
    """An array of `struct sock_filter`, for this process and all that it starts, for good."""
    memory = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(memory))
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0), "the filter on system calls")
