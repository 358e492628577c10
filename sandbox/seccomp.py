"""System-call filters for the sandbox, as classic BPF programs assembled here.

What always holds:

* A program of another architecture, or of the x32 interface, is killed at its first call.
* A call number that is newer than this list gets ENOSYS: what we have not read about can't be used.
* Everything that is denied fails with an error code, so ordinary programs fall back instead of dying.

The filter is a second wall. Namespaces, an unprivileged user and read-only mounts are the first, and they hold
without it; the filter takes away kernel code that model-written programs have no use for, and the kinds of memory
(memfd, System V) that get past per-process limits.
"""

import errno
import platform
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

KILL_PROCESS = 0x80000000
ALLOW = 0x7FFF0000

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCKET_FAMILIES = (AF_UNIX, AF_INET, AF_INET6)
"""Loopback and local sockets work; netlink, packet, vsock, alg and the rest don't exist."""

CLONE_NAMESPACES = 0x7E020000
"""Every CLONE_NEW* flag that clone takes: user, mount, pid, net, ipc, uts, cgroup."""

HUGE_PAGES = 0x40000
"""MAP_HUGETLB: such pages come from a pool of the whole machine, and count for no limit."""

TERMINAL_INJECTION = (0x5412, 0x541C)
"""ioctls TIOCSTI and TIOCLINUX, which type into a terminal."""

NEWEST_CALL = 462
"""mseal, of Linux 6.10. Calls added later share one numbering on all architectures."""

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER, _RETURN = 0x20, 0x15, 0x45, 0x25, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_SHARED_NUMBERS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "statmount": 457,
    "listmount": 458,
}
"""Calls numbered after the architectures agreed on one table."""

_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "memfd_create": 319, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67,
    "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220,
    "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "bpf": 321, "userfaultfd": 323, "perf_event_open": 298,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "syslog": 103, "acct": 163, "quotactl": 179,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305,
    "iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134, "ustat": 136, "sysfs": 139, "_sysctl": 156,
    "create_module": 174, "get_kernel_syms": 177, "query_module": 178, "nfsservctl": 180, "lookup_dcookie": 212,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "fanotify_mark": 301,
    "personality": 135, "vhangup": 153, "sethostname": 170, "setdomainname": 171, "vmsplice": 278,
    "migrate_pages": 256, "move_pages": 279, "io_setup": 206, "inotify_init": 253, "inotify_init1": 294,
    "clone": 56, "socket": 41, "socketpair": 53, "ioctl": 16, "mmap": 9,
}  # fmt: skip

_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "memfd_create": 279, "shmget": 194, "shmctl": 195, "shmat": 196, "shmdt": 197,
    "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193,
    "msgget": 186, "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "mq_open": 180,
    "add_key": 217, "request_key": 218, "keyctl": 219,
    "bpf": 280, "userfaultfd": 282, "perf_event_open": 241,
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
    "reboot": 142, "swapon": 224, "swapoff": 225, "syslog": 116, "acct": 89, "quotactl": 60,
    "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266,
    "nfsservctl": 42, "lookup_dcookie": 18,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "fanotify_init": 262, "fanotify_mark": 263,
    "personality": 92, "vhangup": 58, "sethostname": 161, "setdomainname": 162, "vmsplice": 75,
    "migrate_pages": 238, "move_pages": 239, "io_setup": 0, "inotify_init1": 26,
    "clone": 220, "socket": 198, "socketpair": 199, "ioctl": 29, "mmap": 222,
}  # fmt: skip

_CHECKED = {"clone", "socket", "socketpair", "ioctl", "mmap"}
"""Allowed or not by one of their arguments."""

_ABSENT = {
    "clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create", "memfd_secret",
    "io_setup", "inotify_init", "inotify_init1",
}  # fmt: skip
"""These fail as if the kernel were too old to have them: callers know how to go on without. clone3 hides its flags
behind a pointer, so the C library must be sent back to clone. What io_setup and inotify hand out is counted over the
whole machine or over all processes of a user, so one sandbox could take it away from the host."""


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    audit: int
    """Value of the kernel's AUDIT_ARCH constant."""
    calls: Mapping[str, int]
    x32_bit: int = 0
    """Set in the number of calls through a second interface that must not be used; 0 where there is none."""


X86_64 = Architecture("x86_64", 0xC000003E, _SHARED_NUMBERS | _X86_64, x32_bit=0x40000000)
AARCH64 = Architecture("aarch64", 0xC00000B7, _SHARED_NUMBERS | _AARCH64)

ARCHITECTURES = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`; jumps count the instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _refuse(error: int) -> int:
    return 0x00050000 | error


def _when_number(number: int, body: Iterable[bytes]) -> list[bytes]:
    """Run `body`, which must return, when the call's number is `number`; else go on after it."""
    block = list(body)
    return [_instruction(_JUMP_EQUAL, number, 0, len(block)), *block]


def _argument(index: int) -> bytes:
    """Load the low half of an argument: both architectures are little-endian, and the kernel reads no more of these."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * index)


def _only_families() -> list[bytes]:
    allowed = [_instruction(_JUMP_EQUAL, family, len(SOCKET_FAMILIES) - i) for i, family in enumerate(SOCKET_FAMILIES)]
    refused = _instruction(_RETURN, _refuse(errno.EAFNOSUPPORT))
    return [_argument(0), *allowed, refused, _instruction(_RETURN, ALLOW)]


def _without_bits(index: int, bits: int, error: int) -> list[bytes]:
    """Refuse where an argument has any of these bits."""
    return [
        _argument(index),
        _instruction(_JUMP_SET, bits, 0, 1),
        _instruction(_RETURN, _refuse(error)),
        _instruction(_RETURN, ALLOW),
    ]


def _no_terminal_injection() -> list[bytes]:
    first, second = TERMINAL_INJECTION
    return [
        _argument(1),
        _instruction(_JUMP_EQUAL, first, 1),
        _instruction(_JUMP_EQUAL, second, 0, 1),
        _instruction(_RETURN, _refuse(errno.EPERM)),
        _instruction(_RETURN, ALLOW),
    ]


_CHECKS: Mapping[str, Callable[[], list[bytes]]] = {
    "clone": partial(_without_bits, 0, CLONE_NAMESPACES, errno.EPERM),
    "socket": _only_families,
    "socketpair": _only_families,
    "ioctl": _no_terminal_injection,
    "mmap": partial(_without_bits, 3, HUGE_PAGES, errno.ENOMEM),
}


def program(machine: str | None = None) -> bytes:
    """The filter for `machine` (default: this one), as an array of `struct sock_filter`. KeyError if there is none."""
    architecture = ARCHITECTURES[(machine or platform.machine()).lower()]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, architecture.audit, 1),
        _instruction(_RETURN, KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    if architecture.x32_bit:
        code += [_instruction(_JUMP_SET, architecture.x32_bit, 0, 1), _instruction(_RETURN, KILL_PROCESS)]
    code += [_instruction(_JUMP_GREATER, NEWEST_CALL, 0, 1), _instruction(_RETURN, _refuse(errno.ENOSYS))]
    for name, number in architecture.calls.items():
        if name in _CHECKED:
            code += _when_number(number, _CHECKS[name]())
        else:
            error = errno.ENOSYS if name in _ABSENT else errno.EPERM
            code += _when_number(number, [_instruction(_RETURN, _refuse(error))])
    code.append(_instruction(_RETURN, ALLOW))
    return b"".join(code)


def _bits(flags: int) -> list[int]:
    return [1 << bit for bit in range(32) if flags >> bit & 1]


_OTHER_FAMILIES = [
    *((0, "SCMP_CMP_EQ", family, 0) for family in range(max(SOCKET_FAMILIES)) if family not in SOCKET_FAMILIES),
    (0, "SCMP_CMP_GT", max(SOCKET_FAMILIES), 0),
]
_BY_ARGUMENT = {
    # Each condition denies by itself. Only the low half of an argument is compared where the kernel reads no more.
    "clone": (errno.EPERM, [(0, "SCMP_CMP_MASKED_EQ", flag, flag) for flag in _bits(CLONE_NAMESPACES)]),
    "ioctl": (errno.EPERM, [(1, "SCMP_CMP_MASKED_EQ", 0xFFFFFFFF, number) for number in TERMINAL_INJECTION]),
    "mmap": (errno.ENOMEM, [(3, "SCMP_CMP_MASKED_EQ", HUGE_PAGES, HUGE_PAGES)]),
    "socket": (errno.EAFNOSUPPORT, _OTHER_FAMILIES),
    "socketpair": (errno.EAFNOSUPPORT, _OTHER_FAMILIES),
}


def docker_profile() -> dict[str, Any]:
    """The same denials as a seccomp profile of Docker, for both architectures.

    A daemon passes over names that its library doesn't know, and calls newer than this list are allowed; the program
    inside adds `program()` before it starts anything.
    """
    names = sorted({*X86_64.calls, *AARCH64.calls} - _CHECKED)
    rules: list[dict[str, Any]] = [
        _rule([name for name in names if name not in _ABSENT], errno.EPERM),
        _rule([name for name in names if name in _ABSENT], errno.ENOSYS),
    ]
    for name, (error, conditions) in _BY_ARGUMENT.items():
        rules += [
            _rule([name], error) | {"args": [{"index": index, "op": operator, "value": value, "valueTwo": second}]}
            for index, operator, value, second in conditions
        ]
    architectures = [{"architecture": f"SCMP_ARCH_{each.name.upper()}"} for each in (X86_64, AARCH64)]
    return {"defaultAction": "SCMP_ACT_ALLOW", "archMap": architectures, "syscalls": rules}


def _rule(names: list[str], error: int) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error}
