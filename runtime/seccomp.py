"""A seccomp filter: system calls that a solution has no use for fail with EPERM.

No other program is started, no other process looked into, nothing mounted, no namespace made, no
kernel interface used that is large, young or privileged. Threads, plain fork, files, memory,
ioctl and local sockets go on working: OpenMP and the CUDA driver need them. Numbers are those of
the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).

Not covered: what a device's own ioctl does, and code written to memory and run there.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
from collections.abc import Iterator

from runtime.linux import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_SECCOMP,
    call,
)

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Added to the numbers of a second, rarely used interface of x86-64."""

# name: (x86_64, aarch64); None where there is none.
START = {"execve": (59, 221), "execveat": (322, 281)}
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # large or young parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "personality": (135, 92), "modify_ldt": (154, None), "lookup_dcookie": (212, 18),
    "uselib": (134, None), "nfsservctl": (180, 42),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "vhangup": (153, 58), "sethostname": (170, 161), "setdomainname": (171, 162),
    "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
FALLOCATE, MADVISE = (285, 47), (28, 233)

FAMILIES = (socket.AF_UNIX, socket.AF_NETLINK)
"""No internet even where there is no network namespace; and no AF_VSOCK, which none of them rules:
it reaches the host of a virtual machine."""
NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
    | CLONE_NEWCGROUP
)  # fmt: skip
MADV_REMOVE = 9
BEYOND_KEEP_SIZE = 0xFFFFFFFE
"""Modes of fallocate that take pages out of a file, which others may have mapped."""

# The classic BPF machine: load a word, compare, jump, return.
LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
REFUSE = ERRNO | errno.EPERM
MODE_FILTER = 2

Instruction = tuple[int, int, int, int]


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def program(machine: str, may_start_programs: bool) -> list[Instruction]:
    """The filter for an architecture, one of ARCHITECTURES. Raises KeyError for another."""
    column = list(ARCHITECTURES).index(machine)
    refused = dict(REFUSED) if may_start_programs else {**START, **REFUSED}
    steps: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),  # 32-bit calls have other numbers
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
    ]
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # Without it libc uses clone, whose flags are in a register and not in memory.
    steps += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    steps += _unless(CLONE[column], 0, [(ANY_BIT, NAMESPACES)], REFUSE, ALLOW)
    steps += _unless(FALLOCATE[column], 1, [(ANY_BIT, BEYOND_KEEP_SIZE)], REFUSE, ALLOW)
    steps += _unless(MADVISE[column], 2, [(EQUAL, MADV_REMOVE)], REFUSE, ALLOW)
    families = [(EQUAL, int(family)) for family in FAMILIES]
    for numbers in (SOCKET, SOCKETPAIR):
        steps += _unless(numbers[column], 0, families, ALLOW, REFUSE)
    return [*steps, (RETURN, 0, 0, ALLOW)]


def _unless(
    number: int, argument: int, tests: list[tuple[int, int]], then: int, otherwise: int
) -> Iterator[Instruction]:
    """For one system call: `then` if any test holds for its argument, else `otherwise`."""
    yield (EQUAL, 0, 3 + len(tests), number)
    yield (LOAD, 0, 0, ARGUMENTS + 8 * argument)
    for left, (test, value) in zip(range(len(tests), 0, -1), tests, strict=True):
        yield (test, left, 0, value)
    yield (RETURN, 0, 0, otherwise)
    yield (RETURN, 0, 0, then)


def install(may_start_programs: bool) -> None:
    """Filter this process's calls from here on, and those of all it starts.

    It has set no_new_privs. Raises OSError, and KeyError on another architecture.
    """
    steps = program(platform.machine(), may_start_programs)
    array = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    call("prctl", PR_SET_SECCOMP, MODE_FILTER, _Program(len(steps), array), 0, 0)
