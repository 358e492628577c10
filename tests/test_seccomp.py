"""The filters, run by a small interpreter of classic BPF: so both architectures are tested on either."""

import errno
import struct

import pytest

from pace_agent.sandbox.seccomp import AARCH64, ALLOW, KILL_PROCESS, NEWEST_CALL, X86_64, Architecture, program


def decide(architecture: Architecture, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the kernel would do with this call."""
    data = struct.pack("=iIQ6Q", number, audit or architecture.audit, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program(architecture.name)))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, k)
            case 0x06:
                return k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x25:
                at += if_true if accumulator > k else if_false
            case 0x45:
                at += if_true if accumulator & k else if_false
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


def refused(error: int) -> int:
    return 0x00050000 | error


BOTH = pytest.mark.parametrize("architecture", [X86_64, AARCH64], ids=lambda a: a.name)


@BOTH
def test_every_listed_call_is_refused_and_ordinary_ones_are_not(architecture: Architecture) -> None:
    checked = {"clone", "socket", "socketpair", "ioctl", "mmap"}
    for name, number in architecture.calls.items():
        if name not in checked:
            assert decide(architecture, number) in (refused(errno.EPERM), refused(errno.ENOSYS)), name
    listed = set(architecture.calls.values())
    assert {decide(architecture, n) for n in range(NEWEST_CALL + 1) if n not in listed} == {ALLOW}


@BOTH
def test_calls_that_are_too_new_do_not_exist(architecture: Architecture) -> None:
    assert decide(architecture, NEWEST_CALL) == ALLOW
    assert decide(architecture, NEWEST_CALL + 1) == refused(errno.ENOSYS)
    assert decide(architecture, 10_000) == refused(errno.ENOSYS)


@BOTH
def test_another_architecture_is_killed(architecture: Architecture) -> None:
    assert decide(architecture, 0, audit=0x40000003) == KILL_PROCESS


def test_the_second_interface_of_x86_is_killed() -> None:
    assert decide(X86_64, 0x40000000) == KILL_PROCESS
    assert decide(X86_64, 0x40000000 | 56) == KILL_PROCESS


@BOTH
@pytest.mark.parametrize("family", [1, 2, 10, 16, 17, 38, 40])
def test_socket_families(architecture: Architecture, family: int) -> None:
    for name in ("socket", "socketpair"):
        expected = ALLOW if family in (1, 2, 10) else refused(errno.EAFNOSUPPORT)
        assert decide(architecture, architecture.calls[name], family) == expected
        # The kernel reads a 32-bit number: what stands above it must not matter.
        assert decide(architecture, architecture.calls[name], family | 1 << 32) == expected


@BOTH
def test_clone_makes_processes_and_threads_but_no_namespaces(architecture: Architecture) -> None:
    clone = architecture.calls["clone"]
    assert decide(architecture, clone, 17) == ALLOW
    assert decide(architecture, clone, 0x3D0F00) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(architecture, clone, flag | 17) == refused(errno.EPERM)
    assert decide(architecture, architecture.calls["clone3"]) == refused(errno.ENOSYS)


@BOTH
def test_nobody_types_into_a_terminal(architecture: Architecture) -> None:
    ioctl = architecture.calls["ioctl"]
    assert decide(architecture, ioctl, 0, 0x5401) == ALLOW
    assert decide(architecture, ioctl, 0, 0x5412) == refused(errno.EPERM)
    assert decide(architecture, ioctl, 0, 0x541C) == refused(errno.EPERM)


@BOTH
def test_nobody_takes_pages_of_the_machines_pool(architecture: Architecture) -> None:
    mmap = architecture.calls["mmap"]
    assert decide(architecture, mmap, 0, 4096, 3, 0x22) == ALLOW
    assert decide(architecture, mmap, 0, 4096, 3, 0x40022) == refused(errno.ENOMEM)


def test_there_is_no_filter_for_other_machines() -> None:
    with pytest.raises(KeyError):
        program("riscv64")
