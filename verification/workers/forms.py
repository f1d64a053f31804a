"""The forms of a solution in its own process: how `model_new.py` comes by what was built.

    cabi          `import cabi`, `cabi.load()`
    paper         `import cuda_extension`
    load_inline   `torch.utils.cpp_extension.load_inline(...)` or `load(...)`

The last is run twice. What it has `load` compile it may have written itself: into its folder for
temporary files, or where it works. Such a file goes by its name and text, because the folder may be
another one each time. `record` imports the solution with both functions replaced by a recorder,
uses it as far as it takes until one is called, and says what they were called with. `import_model`
replaces them by a lookup of what the judge has built from that; nothing compiles in a solution's
process. A solution that asks for something else than what was recorded, because its sources change
from run to run, gets an error.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from runtime import cabi
from runtime.view import PRIVATE, WORK
from schemas.codec import content_id
from verification.building.plans import CABI, PAPER
from verification.building.recorded import MAX_BYTES, ExtensionCall, FormError, Text

HEADERS = (".cuh", ".h", ".hpp", ".inl")
SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c", *HEADERS)
Answer = Callable[[ExtensionCall, bool], Any]
"""What a call of `load_inline` or `load` returns; the second argument is `is_python_module`."""


def import_model(form: str, scratch: Path, libraries: dict[str, str]) -> types.ModuleType:
    """Import `model_new.py` of a solution of any form.

    `libraries`: paths of the built libraries by the keys of their plans. May be called again in
    the same process with other libraries. Raises what the solution raises.
    """
    if form == "cabi":
        cabi.bind(libraries[CABI])
        sys.modules["cabi"] = cabi
    elif form == "paper":
        sys.modules[PAPER] = _load_extension(PAPER, libraries[PAPER])
    elif form == "load_inline":
        _answer_calls(scratch, lambda call, module: _built(call, module, libraries))
    else:
        raise FormError(f"expected the form cabi, load_inline or paper, got {form!r}")
    return _import(scratch)


def record(scratch: Path, uses: Sequence[Callable[[Any], Any]] = ()) -> list[dict[str, Any]]:
    """What a `load_inline` solution asks to be built, as JSON for `building.plans.extensions`.

    `uses`: what is done with it while it has asked for nothing; each gets what the one before gave,
    the first one the module. An error after the first call is left for the worker that has the
    libraries; an earlier one is raised. Not covered: calls made for some inputs only.
    """
    # Each once: a module of many layers may ask for the same extension in each of them.
    calls: dict[str, ExtensionCall] = {}

    def note(call: ExtensionCall, is_module: bool) -> types.ModuleType | None:
        calls[call.key] = call
        return _Placeholder(call.name) if is_module else None

    _answer_calls(scratch, note)
    try:
        used: Any = _import(scratch)
        for use in uses:
            if calls:
                break
            used = use(used)
    except Exception:
        if not calls:
            raise
    return [call.to_json() for call in calls.values()]


class _Placeholder(types.ModuleType):
    """Stands for an extension that is not built yet; its functions can be named, not called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def not_built(*arguments: Any, **named: Any) -> NoReturn:
            raise RuntimeError(f"{self.__name__}.{name} is called before the extension is built")

        return not_built


def _import(scratch: Path) -> types.ModuleType:
    if (scratch / WORK).is_dir() and not _sources_below(scratch.resolve()):
        os.chdir(scratch / WORK)  # it brings no sources to be read, and may want to write some
    if str(scratch) not in sys.path:
        sys.path.insert(0, str(scratch))
    path = scratch / "model_new.py"
    spec = importlib.util.spec_from_file_location("model_new", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_new"] = module
    spec.loader.exec_module(module)
    return module


def _built(call: ExtensionCall, is_module: bool, libraries: dict[str, str]) -> Any:
    path = libraries.get(call.key)
    if path is None:
        raise RuntimeError(
            f"the extension {call.name!r} is not one of the {len(libraries)} that model_new.py "
            "asked for when it was first used: its sources or flags change from run to run, or "
            "depend on its inputs; call load_inline with fixed text at import"
        )
    if is_module:
        return _load_extension(call.name, path)
    torch.ops.load_library(path)
    return path


def _load_extension(name: str, path: str) -> types.ModuleType:
    """A built module. Its full name is of the path: pybind11 keeps modules by full name and would
    give what it has for the name, say for a copy whose kernels are dead the live one."""
    full_name = f"built_{content_id(path)}.{name}"
    loader = importlib.machinery.ExtensionFileLoader(full_name, path)
    spec = importlib.util.spec_from_file_location(full_name, path, loader=loader)
    if spec is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _answer_calls(scratch: Path, answer: Answer) -> None:
    """Replace what torch offers for building extensions."""
    from torch.utils import cpp_extension

    def load_inline(
        name: str,
        cpp_sources: str | Sequence[str],
        cuda_sources: str | Sequence[str] | None = None,
        sycl_sources: Any = None,
        functions: str | Sequence[str] | dict[str, str] | None = None,
        extra_cflags: Sequence[str] | None = None,
        extra_cuda_cflags: Sequence[str] | None = None,
        extra_sycl_cflags: Any = None,
        extra_ldflags: Sequence[str] | None = None,
        extra_include_paths: Any = None,
        build_directory: Any = None,
        verbose: Any = False,
        with_cuda: Any = None,
        with_sycl: Any = None,
        is_python_module: bool = True,
        with_pytorch_error_handling: bool = True,
        keep_intermediates: Any = True,
        use_pch: Any = False,
        no_implicit_headers: bool = False,
    ) -> Any:
        call = ExtensionCall(
            name=name,
            cpp_sources=_listed(cpp_sources),
            cuda_sources=_listed(cuda_sources),
            functions=_functions(functions),
            error_handling=bool(with_pytorch_error_handling),
            implicit_headers=not no_implicit_headers,
            cflags=_listed(extra_cflags),
            cuda_cflags=_listed(extra_cuda_cflags),
            ldflags=_listed(extra_ldflags),
        )
        return answer(call, bool(is_python_module))

    def load(
        name: str,
        sources: str | Sequence[str],
        extra_cflags: Sequence[str] | None = None,
        extra_cuda_cflags: Sequence[str] | None = None,
        extra_sycl_cflags: Any = None,
        extra_ldflags: Sequence[str] | None = None,
        extra_include_paths: Any = None,
        build_directory: Any = None,
        verbose: Any = False,
        with_cuda: Any = None,
        with_sycl: Any = None,
        is_python_module: bool = True,
        is_standalone: Any = False,
        keep_intermediates: Any = True,
    ) -> Any:
        files, compiled = _sources(scratch, _listed(sources))
        call = ExtensionCall(
            name=name,
            files=files,
            compiled=compiled,
            cflags=_listed(extra_cflags),
            cuda_cflags=_listed(extra_cuda_cflags),
            ldflags=_listed(extra_ldflags),
        )
        return answer(call, bool(is_python_module))

    def refused(*arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError("nothing is compiled here: use load_inline or load")

    changed = {"load_inline": load_inline, "load": load, "_jit_compile": refused}
    for function, ours in changed.items():
        setattr(cpp_extension, function, ours)


def _listed(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(str(item) for item in value)


def _functions(value: str | Sequence[str] | dict[str, str] | None) -> tuple[Text, ...] | None:
    if value is None:
        return None
    named = value if isinstance(value, dict) else {name: name for name in _listed(value)}
    return tuple(Text(name=str(name), text=str(said)) for name, said in named.items())


def _sources(scratch: Path, paths: Sequence[str]) -> tuple[tuple[Text, ...], tuple[str, ...]]:
    """Texts by name, and the names of those to compile. Raises FormError.

    Of the solution's own folder every other source file comes along, because it may be included;
    of a folder in which it has written sources the headers do.
    """
    root = scratch.resolve()
    found: dict[str, Path] = {}
    compiled = []
    for path in paths:
        file, made = _source(root, path)
        compiled.append(file.name if made else file.relative_to(root).as_posix())
        headers = [beside for beside in file.parent.glob("*") if beside.suffix in HEADERS and made]
        for name, one in [(compiled[-1], file), *((header.name, header) for header in headers)]:
            if found.setdefault(name, one) != one:
                raise FormError(f"expected names of their own of all sources, got {name} twice")
        if not made:
            found = {name: root / name for name in _sources_below(root)} | found
    return tuple(_text(name, file) for name, file in sorted(found.items())), tuple(compiled)


def _source(root: Path, path: str) -> tuple[Path, bool]:
    """A file, and whether it is one that the solution has written: then it lies in a folder for
    temporary files. Raises FormError when it lies elsewhere."""
    full = (root / path).resolve()
    if not full.is_file():
        full = Path(path).resolve()  # where it works
    folders = (root / WORK, Path(tempfile.gettempdir()), *map(Path, PRIVATE))
    if full.is_relative_to(root) and not full.is_relative_to(root / WORK):
        return full, False
    if any(full.is_relative_to(folder.resolve()) for folder in folders):
        return full, True
    raise FormError(
        f"expected sources in the solution's own folder or a temporary one, got {path!r:.200}"
    )


def _text(name: str, file: Path) -> Text:
    if not file.is_file() or file.stat().st_size > MAX_BYTES:
        raise FormError(f"expected {name} to be a file of at most {MAX_BYTES} bytes")
    return Text(name=name, text=file.read_text())


def _sources_below(root: Path) -> list[str]:
    found = [path for path in root.rglob("*") if path.suffix in SOURCES and path.is_file()]
    return [
        path.relative_to(root).as_posix()
        for path in found
        if not path.is_symlink() and not path.is_relative_to(root / WORK)
    ]
