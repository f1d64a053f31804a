"""Which compiler builds a solution, with which flags, and what the machine is.

Flags give the compiler what honest C++ needs to vectorise without giving up IEEE semantics: no
-ffast-math, because NaN and infinity must behave.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

from schemas.records import Target

CPU_FLAGS = (
    "-std=c++17 -O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math "
    "-Wall -Wno-unknown-pragmas -fPIC"
)
CUDA_FLAGS = "-std=c++17 -O3 -lineinfo -Xcompiler -fPIC"


class ToolchainError(Exception):
    """A target cannot be built for here; says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Commands for a ninja graph ($in, $out) and the compiler's own version line."""

    version: str
    compile_command: str
    link_command: str
    suffixes: tuple[str, ...]


@functools.cache
def toolchain(target: Target, capability: str | None = None) -> Toolchain:
    """The toolchain for a target. Raises ToolchainError when there is none.

    `capability` is the compute capability of the GPU, such as "90"; without one nvcc builds for its
    own default.
    """
    return _cpu() if target is Target.CPU else _cuda(capability)


def _cpu() -> Toolchain:
    # As Inductor chooses its compiler, so that what builds here is what torch.compile finds.
    named = os.environ.get("CXX", "g++")
    compiler = shutil.which(named)
    if compiler is None:
        raise ToolchainError(
            f"expected a C++ compiler for --target=cpu, found no program {named!r} on the PATH: "
            "install g++, or let $CXX name one program, such as clang++"
        )
    math = "-lmvec -lm" if _has_vector_math() else "-lm"
    return Toolchain(
        version=_first_line([compiler, "--version"]),
        compile_command=f"{compiler} {CPU_FLAGS}",
        link_command=f"{compiler} -shared -fopenmp $in -o $out {math}",
        suffixes=(".cpp",),
    )


def _cuda(capability: str | None) -> Toolchain:
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise ToolchainError(
            "expected nvcc on the PATH for --target=cuda, found none: install the CUDA toolkit, or "
            "use --target=cpu"
        )
    version = _last_line([compiler, "--version"])
    _check_host_compiler(compiler)
    arch = f"-gencode=arch=compute_{capability},code=sm_{capability}" if capability else ""
    return Toolchain(
        version=version,
        compile_command=f"{compiler} {arch} {CUDA_FLAGS}",
        # No device code is relocatable, so nvcc need not spend half a second on linking it.
        link_command=f"{compiler} -shared --no-device-link $in -o $out",
        suffixes=(".cu", ".cpp"),
    )


def _check_host_compiler(nvcc: str) -> None:
    """nvcc drives g++, or what $NVCC_CCBIN or its own settings name. A dry run has it look."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        raise ToolchainError(
            f"expected a C++ compiler for nvcc and --target=cuda, but nvcc found none ({said}): "
            "install g++, or let $NVCC_CCBIN name one program"
        )


def _has_vector_math() -> bool:
    """glibc's vectorised libm exists on x86-64 only (and is a library of its own)."""
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


def _first_line(command: list[str]) -> str:
    return _output(command).split("\n")[0]


def _last_line(command: list[str]) -> str:
    return _output(command).strip().split("\n")[-1]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{' '.join(command)} does not run: {error}") from error
