"""Other forms of a `cabi` solution, so that what is trained on our rows is not tied to our loader.

    load_inline   one self-contained model_new.py, as KernelBench's evaluator takes it
    paper         kernels/*.cu, kernels/*_binding.cpp and a model_new.py that imports cuda_extension

The kernels stay as they are. What is added is a wrapper per launcher, made from its C signature: a
pointer becomes a torch::Tensor (its data pointer is passed on), an integer an int64_t, a double a
double, and the last parameter the current stream. Calls in model_new.py stay as they are too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from schemas.records import Solution, Target
from verification.building.toolchain import CPU_FLAGS

EXTENSION = "ops6k_kernels"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAUNCHER = re.compile(r'extern\s+"C"\s+int\s+(\w+)\s*\(([^()]*)\)\s*\{')
_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_IMPORT = re.compile(r"^import cabi[ \t]*$", re.MULTILINE)
_LOAD = re.compile(r"^(\w+)[ \t]*=[ \t]*cabi\.load\(\)[ \t]*$", re.MULTILINE)
_INTEGERS = ("int64_t", "int", "int32_t", "long", "longlong", "size_t", "bool")


class PrintError(Exception):
    """A solution that cannot be printed in another form; says what is in the way."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a launcher: `kind` is tensor, integer or double, `type` its C type."""

    name: str
    kind: str
    type: str

    @property
    def torch_type(self) -> str:
        """What the wrapper takes."""
        kinds = {"tensor": "const torch::Tensor&", "integer": "int64_t", "double": "double"}
        return kinds[self.kind]

    @property
    def passed(self) -> str:
        """The wrapper's argument as the launcher takes it."""
        if self.kind == "tensor":
            return f"({self.type})t_{self.name}.data_ptr()"
        return f"({self.type})t_{self.name}"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A C function of a solution, without its last parameter, the stream.

    `span` is where the parameter list stands in the text it was found in.
    """

    name: str
    parameters: tuple[Parameter, ...]
    span: tuple[int, int]

    def declared(self, more: str) -> str:
        """A declaration in which pointers are plain: C linkage knows no types."""
        types = [f"{'void*' if p.kind == 'tensor' else p.type} {p.name}" for p in self.parameters]
        return f'extern "C" int {self.name}({", ".join([*types, more])});'

    def wrapped(self, stream: str, config: bool) -> list[str]:
        """A function `run_NAME` that takes tensors and calls the launcher."""
        takes = [f"{p.torch_type} t_{p.name}" for p in self.parameters]
        gives = [p.passed for p in self.parameters]
        if config:
            takes, gives = [*takes, "int64_t config"], [*gives, "(int)config"]
        return [
            f"static void run_{self.name}({', '.join(takes)}) {{",
            f"    const int code = {self.name}({', '.join([*gives, stream])});",
            f'    TORCH_CHECK(code == 0, "{self.name} returned error ", code);',
            "}",
        ]


def launchers(text: str) -> tuple[Launcher, ...]:
    """The launchers a source defines as `extern "C" int name(...) {`, in order.

    Raises PrintError for a parameter that is no pointer, integer or double.
    """
    bare = _COMMENT.sub(lambda found: " " * len(found[0]), text)
    return tuple(
        Launcher(name=m[1], parameters=_parameters(m[1], m[2]), span=m.span(2))
        for m in _LAUNCHER.finditer(bare)
    )


def _parameters(function: str, listed: str) -> tuple[Parameter, ...]:
    parts = [" ".join(part.split()) for part in listed.split(",")]
    stream = parts.pop()
    if not re.fullmatch(r"(void ?\*|cudaStream_t)( ?\w+)?", stream):
        raise PrintError(f"expected {function} to take a stream last, got {stream!r}")
    return tuple(_parameter(function, part, index) for index, part in enumerate(parts))


def _parameter(function: str, part: str, index: int) -> Parameter:
    plain = re.sub(r"\b(__restrict__|__restrict|restrict)\b", "", part)
    if "*" in plain:
        type_, _, name = plain.rpartition("*")
        kind, spelled = "tensor", f"{' '.join(type_.split())}*"
    else:
        words = [word for word in plain.split() if word != "const"]
        kinds = {"double": "double", **dict.fromkeys(_INTEGERS, "integer")}
        name = words.pop() if len(words) > 1 and words[-1] not in kinds else ""
        name, spelled = name, " ".join(word.removeprefix("std::") for word in words)
        kind = kinds.get(spelled.replace(" ", ""), "")
        if not kind:
            raise PrintError(
                f"expected parameters of {function} to be pointers, int64_t or double, got {part!r}"
            )
    return Parameter(name=name.strip() or f"argument{index}", kind=kind, type=spelled)


def as_load_inline(solution: Solution, target: Target) -> Solution:
    """One model_new.py that hands its kernels to torch's `load_inline`.

    All sources of `kernels/` become one translation unit, headers in place of their `#include`.
    Not covered: sources that define the same static name twice. Raises PrintError.
    """
    sources = _sources(solution, target)
    kernels = "\n".join(_flattened(text, path, solution, set()) for path, text in sources.items())
    found = _required(launchers(kernels))
    cuda = target is Target.CUDA
    wrappers = ["#include <c10/cuda/CUDAStream.h>" if cuda else "", ""]
    if cuda:
        wrappers += [launcher.declared("cudaStream_t stream") for launcher in found]
    stream = "c10::cuda::getCurrentCUDAStream().stream()" if cuda else "nullptr"
    for launcher in found:
        wrappers += ["", *_plain_pointers(launcher, cuda).wrapped(stream, config=False)]
    wrappers += ["", "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    wrappers += [f'    m.def("{f.name}", &run_{f.name});' for f in found]
    host = "\n".join([*wrappers, "}"]).lstrip("\n") + "\n"
    texts, arguments = _load_inline_call(kernels, host, cuda)
    files = {"model_new.py": _loaded(solution, texts, arguments)}
    return Solution.of(files, form="load_inline")


def _plain_pointers(launcher: Launcher, plain: bool) -> Launcher:
    """Where only our own declaration is in sight, pointers are passed as it has them."""
    if not plain:
        return launcher
    changed = tuple(
        Parameter(name=p.name, kind=p.kind, type="void*" if p.kind == "tensor" else p.type)
        for p in launcher.parameters
    )
    return Launcher(name=launcher.name, parameters=changed, span=launcher.span)


def _load_inline_call(kernels: str, host: str, cuda: bool) -> tuple[list[str], list[str]]:
    """(assignments of the texts, arguments of the call)."""
    if cuda:
        texts = [f"CUDA_SOURCE = {_quoted(kernels)}", f"CPP_SOURCE = {_quoted(host)}"]
        flags = ['extra_cuda_cflags=["-O3"]']
        return texts, ["cpp_sources=CPP_SOURCE", "cuda_sources=CUDA_SOURCE", *flags]
    skipped = ("-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-fPIC")
    flags = [f'"{flag}"' for flag in CPU_FLAGS.split() if flag not in skipped]
    return [f"CPP_SOURCE = {_quoted(kernels + chr(10) + host)}"], [
        "cpp_sources=CPP_SOURCE",
        f"extra_cflags=[{', '.join(flags)}]",
        'extra_ldflags=["-fopenmp", "-lm"]',
    ]


def as_paper(solution: Solution, target: Target) -> Solution:
    """kernels/NAME.cu with launchers that also take `int config`, and kernels/NAME_binding.cpp.

    `binding.cpp` and `binding_registry.h` belong to the layout and are not part of a solution.
    Raises PrintError.
    """
    sources = _sources(solution, target)
    headers = {f.path: f.text for f in solution.files if f.path.startswith("kernels/")}
    files = {path: text for path, text in headers.items() if path not in sources}
    cuda = target is Target.CUDA
    bound = 0
    for path, text in sources.items():
        found = launchers(text)
        files[path] = _with_config(text, found, cuda)
        if found:
            name = PurePosixPath(path).stem
            files[f"kernels/{name}_binding.cpp"] = _binding(name, found, cuda)
            bound += 1
    if not bound:
        _required(())
    files["model_new.py"] = _replaced(solution, "import cuda_extension", "", "cuda_extension")
    return Solution.of(files, form="paper")


def _with_config(text: str, found: tuple[Launcher, ...], cuda: bool) -> str:
    for launcher in reversed(found):
        start, end = launcher.span
        head, comma, _ = text[start:end].rpartition(",")
        space = "\n    " if "\n" in head else " "
        stream = "cudaStream_t stream" if cuda else "void* stream"
        config = f"{space if comma else ''}int config,{space}{stream}"
        tail = "\n" if text[start:end].endswith("\n") else ""
        text = text[:start] + head + comma + config + tail + text[end:]
    return text


def _binding(name: str, found: tuple[Launcher, ...], cuda: bool) -> str:
    lines = ["#include <torch/types.h>", "#include <torch/csrc/utils/pybind.h>"]
    if cuda:
        lines += ["#include <cuda_runtime.h>", "#include <c10/cuda/CUDAStream.h>"]
    lines += ['#include "../binding_registry.h"', ""]
    stream_type = "cudaStream_t stream" if cuda else "void* stream"
    lines += [launcher.declared(f"int config, {stream_type}") for launcher in found]
    stream = "c10::cuda::getCurrentCUDAStream().stream()" if cuda else "nullptr"
    for launcher in found:
        lines += ["", *_plain_pointers(launcher, True).wrapped(stream, config=True)]
    lines += ["", f"static void register_{name}(pybind11::module& m) {{"]
    for launcher in found:
        names = "".join(f', py::arg("{p.name}")' for p in launcher.parameters)
        lines.append(f'    m.def("{launcher.name}", &run_{launcher.name}{names}, ')
        lines[-1] += 'py::arg("config") = 0);'
    return "\n".join([*lines, "}", "", f"REGISTER_BINDING({name}, register_{name});"]) + "\n"


def _sources(solution: Solution, target: Target) -> dict[str, str]:
    if solution.form != "cabi":
        raise PrintError(f"expected a solution of the form cabi, got {solution.form!r}")
    suffixes = (".cu", ".cpp") if target is Target.CUDA else (".cpp",)
    found = {f.path: f.text for f in solution.files if f.path.startswith("kernels/")}
    return {path: text for path, text in found.items() if path.endswith(suffixes)}


def _required(found: tuple[Launcher, ...]) -> tuple[Launcher, ...]:
    if not found:
        raise PrintError('expected a launcher, extern "C" int name(...) {, in kernels/; found none')
    return found


def _flattened(text: str, path: str, solution: Solution, seen: set[str]) -> str:
    """The text with the solution's own headers in place of their `#include`, each once."""
    files = {f.path: f.text for f in solution.files}

    def include(found: re.Match[str]) -> str:
        wanted = str(PurePosixPath(path).parent / found[1])
        if wanted not in files:
            return found[0]
        if wanted in seen:
            return ""
        seen.add(wanted)
        return _flattened(files[wanted].replace("#pragma once\n", ""), wanted, solution, seen)

    return _LOCAL_INCLUDE.sub(include, text)


def _loaded(solution: Solution, texts: list[str], arguments: list[str]) -> str:
    call = "".join(f"    {argument},\n" for argument in [f'name="{EXTENSION}"', *arguments])
    head = "".join(f"{text}\n\n" for text in texts)
    imported = "from torch.utils.cpp_extension import load_inline"
    return _replaced(solution, imported, head, f"load_inline(\n{call})")


def _replaced(solution: Solution, import_line: str, before: str, loaded: str) -> str:
    """model_new.py with other lines for `import cabi` and `NAME = cabi.load()`."""
    text = solution.text("model_new.py")
    text, loads = _LOAD.subn(lambda found: f"{before}{found[1]} = {loaded}", text)
    text, imports = _IMPORT.subn(lambda _: import_line, text)
    if loads != 1 or imports != 1:
        raise PrintError(
            "expected one `import cabi` and one `lib = cabi.load()` in model_new.py, each on a "
            f"line of its own, got {imports} and {loads}"
        )
    return text


def _quoted(text: str) -> str:
    """As a raw Python literal that can be read, where that is possible."""
    fine = "'''" not in text and text.endswith("\n")
    return f"r'''\n{text}'''" if fine else repr(text)
