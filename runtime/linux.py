"""The few system calls that Python does not wrap, through libc.

Numbers of the calls that are older than the common table (424 and up) are in `runtime.seccomp`.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP = 0x02000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: int | bytes | ctypes.Structure | None) -> int:
    """Call a function of libc that says -1 when it fails. Raises OSError.

    Integers go as long, structures by address.
    """
    converted: list[object] = []
    for argument in arguments:
        if isinstance(argument, int):
            converted.append(ctypes.c_long(argument))
        elif isinstance(argument, ctypes.Structure):
            converted.append(ctypes.byref(argument))
        else:
            converted.append(argument)
    result = int(getattr(libc, function)(*converted))
    if result == -1:
        number = ctypes.get_errno()
        named = [a.decode() for a in arguments if isinstance(a, bytes) and a]
        raise OSError(number, f"{function}: {os.strerror(number)}", *named[-1:])
    return result


def syscall(name: str, number: int, *arguments: int | bytes | ctypes.Structure | None) -> int:
    """A system call by number. Raises OSError that carries its name."""
    try:
        return call("syscall", number, *arguments)
    except OSError as error:
        raise OSError(
            error.errno, f"{name}: {os.strerror(error.errno or 0)}", error.filename
        ) from None


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint32 * 6),)


def drop_capabilities() -> None:
    """Give up every capability, such as those a new user namespace came with. Raises OSError."""
    call("capset", _CapabilityHeader(CAPABILITY_VERSION_3, 0), _Capabilities())
