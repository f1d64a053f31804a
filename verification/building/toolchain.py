"""Which compiler builds a solution, with which flags, and what the machine is.

Flags give the compiler what honest C++ needs to vectorise without giving up IEEE semantics: no
-ffast-math, because NaN and infinity must behave.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.records import Target

CPU_FLAGS = (
    "-std=c++17 -O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math "
    "-Wall -Wno-unknown-pragmas -fPIC"
)
CUDA_FLAGS = "-std=c++17 -O3 -lineinfo --no-compress -Xcompiler -fPIC"
# What torch adds when it builds extensions: half precision goes through its own types.
TORCH_CUDA_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ "
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__ --expt-relaxed-constexpr"
)
BINDING_OPTIMIZATION = "-O1"
"""Of C++ beside CUDA, which binds and launches: a sixth less time to compile than with -O2."""


class ToolchainError(Exception):
    """A target cannot be built for here; says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Commands for a ninja graph ($in, $out) and the compiler's own version line."""

    version: str
    compile_command: str
    link_command: str
    suffixes: tuple[str, ...]
    torch: TorchBuild

    def commands(self) -> tuple[str, ...]:
        """What a plain library depends on, whichever torch there is."""
        return (self.version, self.compile_command, self.link_command)


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """Commands for extensions that include torch's headers; `compile_*` by the file's suffix.

    `standard` is the C++ standard that the installed torch builds extensions with.
    """

    version: str
    standard: int
    compile_cpp: str
    compile_cu: str | None
    link_command: str


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
        torch=_torch_cpu(compiler),
    )


def _cuda(capability: str | None) -> Toolchain:
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise ToolchainError(
            "expected nvcc on the PATH for --target=cuda, found none: install the CUDA toolkit, or "
            "use --target=cpu"
        )
    version = _last_line([compiler, "--version"])
    toolkit = _dry_run(compiler)
    arch = f"-gencode=arch=compute_{capability},code=sm_{capability}" if capability else ""
    return Toolchain(
        version=version,
        compile_command=f"{compiler} {arch} {CUDA_FLAGS}",
        # No device code is relocatable, so nvcc need not spend half a second on linking it.
        link_command=f"{compiler} -shared --no-device-link $in -o $out",
        suffixes=(".cu", ".cpp"),
        torch=_torch_cuda(compiler, arch, toolkit),
    )


def _torch_cpu(compiler: str) -> TorchBuild:
    folder, version, standard = installed_torch()
    flags = CPU_FLAGS.replace("-std=c++17 ", "").replace(" -Wall", " -w")
    return TorchBuild(
        version=version,
        standard=standard,
        compile_cpp=f"{compiler} {flags} {_torch_includes(folder)}",
        compile_cu=None,
        link_command=f"{compiler} -shared -fopenmp $in -o $out {_torch_libraries(folder)} -lm",
    )


def _torch_cuda(nvcc: str, arch: str, toolkit: list[Path]) -> TorchBuild:
    """`toolkit`: folders of headers that nvcc includes by itself."""
    folder, version, standard = installed_torch()
    includes = _torch_includes(folder)
    includes += "".join(
        f" -isystem {shlex.quote(str(path))}"
        for path in pip_includes(folder.parent / "nvidia", toolkit)
    )
    if not (folder / "include/c10/cuda/impl/cuda_cmake_macros.h").exists():
        # A torch without CUDA: what includes c10/cuda compiles all the same, and cannot be loaded.
        includes += " -DC10_USING_CUSTOM_GENERATED_MACROS"
    # The runtime is shared with torch, as in torch's own builds, so that its checks see our errors.
    return TorchBuild(
        version=version,
        standard=standard,
        compile_cpp=f"{nvcc} -w {BINDING_OPTIMIZATION} -Xcompiler -fPIC {includes}",
        compile_cu=f"{nvcc} {arch} {TORCH_CUDA_FLAGS} -w -O3 -lineinfo -Xcompiler -fPIC {includes}",
        link_command=f"{nvcc} -shared --no-device-link --cudart shared $in -o $out "
        f"{_torch_libraries(folder)}",
    )


def _torch_includes(folder: Path) -> str:
    folders = [
        folder / "include",
        folder / "include/torch/csrc/api/include",
        Path(sysconfig.get_path("include")),
    ]
    listed = " ".join(f"-isystem {shlex.quote(str(path))}" for path in folders)
    return f"-DTORCH_API_INCLUDE_EXTENSION_H {listed}"


def _torch_libraries(folder: Path) -> str:
    """Of those torch links an extension with, the ones this torch has."""
    names = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python")
    found = [name for name in names if (folder / f"lib/lib{name}.so").exists()]
    return " ".join([f"-L{shlex.quote(str(folder / 'lib'))}", *(f"-l{name}" for name in found)])


@functools.cache
def installed_torch() -> tuple[Path, str, int]:
    """(folder, version, C++ standard of extensions) of the installed torch, without importing it.

    Raises ToolchainError when there is none.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ToolchainError("expected an installed torch, found none: pip install torch")
    folder = Path(found.origin).parent
    builder = (folder / "utils/cpp_extension.py").read_text()
    standards = re.findall(r"'-std=c\+\+(\d+)'", builder)
    return folder, importlib.metadata.version("torch"), max(map(int, standards), default=17)


def pip_includes(packages: Path, toolkit: Sequence[Path]) -> tuple[Path, ...]:
    """Folders of headers that torch was installed with, of which the toolkit lacks some: of cuBLAS
    and the like, which torch's own headers include, a small toolkit has none.

    nvcc looks in the toolkit first, so what is in both comes from there.
    """
    have = {header.name for folder in toolkit for header in folder.glob("*.h")}
    return tuple(
        folder
        for folder in sorted(packages.glob("*/include"))
        if any(header.name not in have for header in folder.glob("*.h"))
    )


def _dry_run(nvcc: str) -> list[Path]:
    """The folders of headers that nvcc includes by itself. It drives g++, or what $NVCC_CCBIN or
    its own settings name, and has to find that. Raises ToolchainError."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        raise ToolchainError(
            f"expected a C++ compiler for nvcc and --target=cuda, but nvcc found none ({said}): "
            "install g++, or let $NVCC_CCBIN name one program"
        )
    listed = re.search(r"^#\$ INCLUDES=(.*)$", done.stderr, re.MULTILINE)
    words = shlex.split(listed[1]) if listed else []
    return [Path(word[2:]) for word in words if word.startswith("-I")]


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
