"""What is to be built for a solution: one plan per shared library, whatever the solution's form.

    cabi          kernels/* into one plain library
    paper         kernels/* and our own binding.cpp into the module `cuda_extension`
    load_inline   one module per recorded call of `load_inline` or `load`

Flags are the judge's own. Of those a solution asks for, the ones that change speed or meaning in
ways the error budget can judge are kept (-O, -D, -U, -std, register limits), the rest is dropped
and said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from schemas.records import Solution, Target
from verification.building.recorded import ExtensionCall, FormError, read_calls
from verification.building.toolchain import Toolchain

NATIVE = Path(__file__).resolve().parents[1] / "native"
CABI = "cabi"
PAPER = "cuda_extension"
LIGHT = "light"
"""The folder of an extension with headers that stand in for larger ones of torch."""
MAX_PATH = 200
BINDING_WORDS = re.compile(r"pybind|PYBIND|\bpy::|\bPy[A-Z]")
# Words without which a .cu file needs none of torch's headers.
TORCH_WORDS = re.compile(r"torch|Tensor|\bat::|\bc10|\bAT_|\bTORCH_|\bC10_|pybind|\bpy::|PYBIND")


class Kind(StrEnum):
    """How a library is compiled and linked."""

    SHARED = "shared"
    TORCH_EXTENSION = "torch_extension"


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan:
    """A library to build. `key` is how the worker asks for it; `sources` are path -> text.

    `light`: files for a first attempt, in place of those in `sources` or beside them, that compile
    faster and lack parts of torch few solutions use.
    """

    key: str
    kind: Kind
    sources: dict[str, str]
    compiled: tuple[str, ...]
    light: dict[str, str] = field(default_factory=dict)
    cpp_flags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def extensions(
    solution: Solution,
    target: Target,
    toolchain: Toolchain,
    recorded: Any = (),
    fast_math: bool = False,
    libraries: Collection[str] = (),
) -> tuple[ExtensionPlan, ...]:
    """The plans of a solution.

    `recorded`: what `forms.record` returned, for `load_inline`. `fast_math`: whether
    --use_fast_math is kept. `libraries`: names a solution may link with, such as "cublas".
    Raises FormError when the solution is not of its form.
    """
    if solution.form == "load_inline":
        calls = read_calls(list(recorded))
        if not calls:
            raise FormError(
                "expected model_new.py to call torch.utils.cpp_extension.load_inline (or load) "
                "when it is imported, constructed or first called, and it called neither"
            )
        return tuple(_called(c, target, toolchain, fast_math, libraries) for c in calls)
    sources = {f.path: f.text for f in solution.files if f.path.startswith("kernels/")}
    compiled = tuple(sorted(p for p in sources if p.endswith(toolchain.suffixes)))
    if not compiled:
        raise FormError(f"expected kernels/*{toolchain.suffixes[0]}, got {sorted(sources)}")
    for path in sources:
        safe(path)
    if solution.form == "cabi":
        return (ExtensionPlan(key=CABI, kind=Kind.SHARED, sources=sources, compiled=compiled),)
    if solution.form == "paper":
        return (_paper(sources, compiled, toolchain),)
    raise FormError(f"expected the form cabi, load_inline or paper, got {solution.form!r}")


def _paper(
    sources: dict[str, str], compiled: tuple[str, ...], toolchain: Toolchain
) -> ExtensionPlan:
    ours = {name: (NATIVE / name).read_text() for name in ("binding.cpp", "binding_registry.h")}
    standard = (f"-std=c++{toolchain.torch.standard}",)
    device = "".join(text for path, text in sources.items() if not path.endswith(".cpp"))
    return ExtensionPlan(
        key=PAPER,
        kind=Kind.TORCH_EXTENSION,
        sources={**sources, **ours},
        compiled=(*compiled, "binding.cpp"),
        light=_light_headers(),
        cpp_flags=standard,
        cuda_flags=(*standard, *_bindings(device)),
    )


def _called(
    call: ExtensionCall,
    target: Target,
    toolchain: Toolchain,
    fast_math: bool,
    libraries: Collection[str],
) -> ExtensionPlan:
    inline = not call.files
    sources = _inline_sources(call) if inline else {f.name: f.text for f in call.files}
    compiled = tuple(sources) if inline else call.compiled
    wrong = [p for p in compiled if p not in sources or not p.endswith(toolchain.suffixes)]
    if wrong or not compiled:
        raise FormError(
            f"expected sources of {call.name} to end in {' or '.join(toolchain.suffixes)} "
            f"for --target={target}, got {', '.join(wrong) or 'none'}"
        )
    light = _light_headers()
    hosted = ("main.cpp",) if inline else tuple(p for p in compiled if not p.endswith(".cu"))
    device = "\n".join(text for path, text in sources.items() if path not in hosted)
    if "cuda.cu" in sources and inline and not TORCH_WORDS.search("".join(call.cuda_sources)):
        plain = ("#include <cuda.h>", "#include <cuda_runtime.h>", *call.cuda_sources)
        light["cuda.cu"] = _joined(plain)
    own = (f"-DTORCH_EXTENSION_NAME={call.name}",)
    cpp, no_cpp = filtered(call.cflags, toolchain.torch.standard, fast_math=False)
    cuda, no_cuda = filtered(call.cuda_cflags, toolchain.torch.standard, fast_math)
    linked = [flag.strip().removeprefix("-l") for flag in call.ldflags]
    return ExtensionPlan(
        key=call.key,
        kind=Kind.TORCH_EXTENSION,
        sources=sources,
        compiled=compiled,
        light=light,
        cpp_flags=(*cpp, *own),
        cuda_flags=(*cuda, *own, *_bindings(device)),
        libraries=tuple(name for name in linked if name in libraries),
        dropped=(*no_cpp, *no_cuda, *(f for f in call.ldflags if not _links(f, libraries))),
    )


def _links(flag: str, libraries: Collection[str]) -> bool:
    return flag.strip().removeprefix("-l") in libraries


def _inline_sources(call: ExtensionCall) -> dict[str, str]:
    """The files that torch's load_inline would write (torch.utils.cpp_extension, 2.11 to 2.13)."""
    host = ["#include <torch/extension.h>"]
    device = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>"]
    if not call.implicit_headers:
        host, device = [], []
    sources = {"main.cpp": _joined((*host, *call.cpp_sources, *_module(call)))}
    if call.cuda_sources:
        sources["cuda.cu"] = _joined((*device, *call.cuda_sources))
    return sources


def _module(call: ExtensionCall) -> list[str]:
    if call.functions is None:
        return []
    lines = ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    for function in call.functions:
        name, said = function.name, json.dumps(function.text)
        bound = f"torch::wrap_pybind_function({name})" if call.error_handling else name
        lines.append(f"m.def({json.dumps(name)}, {bound}, {said});")
    return [*lines, "}"]


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(parts) + "\n"


def _bindings(device_text: str) -> tuple[str, ...]:
    """What has our light header bring pybind11 to device code, which it is slow in."""
    return ("-DBINDINGS_IN_DEVICE_CODE",) if BINDING_WORDS.search(device_text) else ()


def _light_headers() -> dict[str, str]:
    return {f"{LIGHT}/torch/extension.h": (NATIVE / "light/torch/extension.h").read_text()}


_KEPT = re.compile(
    r"-O[0-3]?|[-]{1,2}(expt-relaxed-constexpr|expt-extended-lambda|extended-lambda)"
    r"|--?maxrregcount=\d{1,3}|--?restrict|--?use_fast_math|--fmad=(true|false)"
    r"|-[DU][A-Za-z_]\w*(=[\w.+-]*)?|-std=c\+\+\d\d"
)
_WITH_VALUE = ("-D", "-U", "--maxrregcount", "-maxrregcount")
_OURS = re.compile(r"-[DU](TORCH_|PYBIND11_|_GLIBCXX|__CUDA_ARCH__)")


def filtered(
    flags: Sequence[str], standard: int, fast_math: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(flags kept, flags dropped). A standard older than torch's headers need becomes theirs."""
    words = [word for flag in flags for word in flag.split()]
    kept: list[str] = []
    dropped: list[str] = []
    while words:
        word = words.pop(0)
        if word in _WITH_VALUE and words:
            joined = "=" if "maxrregcount" in word else ""
            word += joined + words.pop(0)
        fine = _KEPT.fullmatch(word) and not _OURS.match(word)
        fine = fine and (fast_math or not word.endswith("use_fast_math"))
        if word.startswith("-std=") and fine:
            standard = max(standard, int(word[-2:]))
        else:
            (kept if fine else dropped).append(word)
    return (*kept, f"-std=c++{standard}"), tuple(dropped)


def safe(path: str) -> PurePosixPath:
    """A path that stays inside its folder and on a command line. Raises FormError."""
    relative = PurePosixPath(path)
    plain = len(path) <= MAX_PATH and re.fullmatch(r"[A-Za-z0-9_./+-]+", path)
    if relative.is_absolute() or ".." in relative.parts or not plain or "/-" in path:
        raise FormError(f"expected a plain path below kernels/, got {path!r:.300}")
    return relative
