"""What a built solution asks of others, read from its files without loading them.

Two views of one build, because nvcc links the CUDA runtime statically, and that runtime itself
uses dlopen, sockets and much more:

    inspect_object   each kernels/*.o: what the solution's own text refers to
    inspect          solution.so: which libraries it wants, and which names no library gives it

Refusals are a static filter. It does not see addresses computed at run time (a function found
through the link map or the GOT), system calls in inline assembly, or what Python code does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from verification.building import fatbin


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FORMS = ("cabi", "load_inline", "paper")
TORCH = "torch"
"""What a policy calls torch's own operators when they may do part of the work."""
RUNTIME_LIBRARIES = _words(
    """
    libc libm libmvec libstdc++ libc++ libc++abi libgcc_s libgomp libomp libpthread libdl librt
    libcudart ld-linux ld-linux-x86-64 ld-linux-aarch64
    """
)
TORCH_LIBRARIES = _words("libtorch libtorch_cpu libtorch_cuda libtorch_python libc10 libc10_cuda")
HARMLESS_WEAK = _words(
    "_ITM_deregisterTMCloneTable _ITM_registerTMCloneTable __gmon_start__ __cxa_finalize"
)
"""What every shared library asks for in vain."""

REACHING_OUT = _words(
    """
    dlopen dlmopen dlsym dlvsym dlinfo dl_iterate_phdr __libc_dlopen_mode __libc_dlsym _dl_sym
    _r_debug _rtld_global _rtld_global_ro fork vfork _Fork clone clone3 posix_spawn posix_spawnp
    execl execle execlp execv execve execvp execvpe execveat fexecve system popen ptrace
    process_vm_readv process_vm_writev pidfd_getfd syscall socket socketpair connect bind listen
    accept accept4 sendmsg recvmsg mprotect pkey_mprotect memfd_create shm_open shmget shmat kill
    tgkill setenv putenv unsetenv clearenv setns unshare mount
    """
)
"""libc's doors to other code, other processes and the network."""
FOREIGN_LIBRARIES = _words(
    """
    cublas cudnn cufft curand cusparse cusolver cutensor nvrtc nvJitLink nvPTXCompiler cupti nvml
    nccl cblas_ LAPACKE_ mkl_ MKL_ openblas_ dnnl_ cuModuleLoad cuLibraryLoad cudaLibraryLoad
    cuLink cuGetExportTable cudaGetExportTable cudaIpc cuIpc aoti_torch_cpu_ aoti_torch_cuda_
    aoti_torch_call_dispatcher torch_call_dispatcher
    """
)
"""By prefix. cudaGetDriverEntryPoint is not here: honest code gets TMA's encoder from it."""
_BLAS = re.compile(r"[sdcz](gemm|gemv|syrk|trsm|ger|dot|axpy)_?$")
_TORCH = re.compile(r"_Z\w{0,5}N?K?(2at|3c10|5torch|6caffe2)")
_TORCH_COMPUTES = _words(
    """
    _ZN2at6native _ZN2at4cuda4blas _ZN2at4cuda24getCurrentCUDABlasHandle
    _ZN2at4cuda26getCurrentCUDABlasLtHandle _ZN2at9functorch
    _ZN3c1010Dispatcher _ZNK3c1010Dispatcher _ZN5torch3jit _ZNK5torch3jit _ZN5torch2nn
    _ZNK5torch2nn
    """
)
_OPERATOR = re.compile(r"_ZN2at4_ops(\d+)(\w+)")
_BACKEND = re.compile(r"_ZN2at\d+(?:cpu|cuda|meta|composite[a-z]+?)(\d+)(\w+)")
"""An operator's entry behind the dispatcher, such as at::cuda::_softmax."""
_MOVES_DATA = re.compile(
    r"(empty|new_empty|zeros|zero|new_zeros|ones|new_ones|full|new_full|fill|scalar_tensor|view|"
    r"reshape|_reshape_alias|_reshape_copy|_unsafe_view|contiguous|as_strided|narrow|slice|select|"
    r"permute|transpose|t|movedim|unsqueeze|squeeze|expand|flatten|unflatten|ravel|chunk|split|"
    r"unbind|detach|alias|clone|copy|to|_to_copy|item|_local_scalar_dense|set|resize|is_pinned|"
    r"size|stride|lift|requires_grad)(_like|_as|_strided)?_?(_[A-Za-z]\w*)?"
)
"""Operators that allocate, view or copy, with the overload's name behind."""


@dataclass(frozen=True, kw_only=True)
class BinaryReport:
    """What one file holds and asks for; names are sorted and mangled.

    `linked`: a shared library, not an object. `unbound`: wanted names which no library it was
    linked with provides, so that they would be taken from whatever the process has loaded (none
    for an object). `kernels` of compressed images are not known, `has_compressed` says so.
    `constructors`: functions that run when it is loaded; nvcc's own registration is one.
    """

    linked: bool
    needed: tuple[str, ...]
    undefined: tuple[str, ...]
    unbound: tuple[str, ...]
    exported: tuple[str, ...]
    kernels: tuple[str, ...]
    has_ptx: bool
    has_compressed: bool
    stray_device_code: int
    constructors: int


def inspect(library: Path) -> BinaryReport:
    """Read a shared library. Raises ValueError when it is none, or not readable as one."""
    return _read(library, linked=True)


def inspect_object(path: Path) -> BinaryReport:
    """Read an object file made by the build. Raises ValueError when it is none."""
    return _read(path, linked=False)


def audit(
    library: Path, objects: Iterable[Path], form: str, allowed: frozenset[str] = frozenset()
) -> list[str]:
    """Why a build may not be used: `refusals` of its library and of the objects it was linked from.

    Names that one object wants and another defines are the solution's own affair.
    Raises ValueError when a file cannot be read.
    """
    parts = [inspect_object(path) for path in objects]
    if not parts:
        raise ValueError(f"expected the object files that {library} was linked from, got none")
    own = {name for part in parts for name in part.exported}
    reasons = []
    for report in [inspect(library), *parts]:
        wanted = tuple(name for name in report.undefined if name not in own)
        reasons += refusals(replace(report, undefined=wanted), form, allowed)
    return list(dict.fromkeys(reasons))


def refusals(report: BinaryReport, form: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Why this file may not be part of a solution; empty when it may.

    Ask it about every object and about the linked library. `form` is one of FORMS; `allowed`
    names libraries that the problem's policy permits, such as "cublas" and "cudnn"; with "torch"
    an extension may call its operators.
    Raises ValueError for another form.
    """
    if form not in FORMS:
        raise ValueError(f"expected a form out of {FORMS}, got {form!r}")
    allowed_prefixes = tuple(allowed)
    reasons = {}
    if report.stray_device_code:
        reasons[""] = f"{report.stray_device_code} pieces of device code outside .nv_fatbin"
    for library in report.needed:
        if not _library_allowed(library, form, allowed):
            reasons[library] = f"needs the library {library}"
    for name in report.undefined:
        reason = _refused_symbol(name, report.linked, form, TORCH in allowed)
        if reason and not name.startswith(allowed_prefixes):
            reasons[name] = f"{reason}: {name}"
    for name in () if report.linked else report.exported:
        if name in REACHING_OUT:  # the CUDA runtime beside it would call this one
            reasons[name] = f"puts itself in the place of {name}"
    for name in report.unbound if form == "cabi" else ():
        if name not in reasons and not name.startswith(allowed_prefixes):
            reasons[name] = f"wants a name that no library it is linked with has: {name}"
    return list(reasons.values())


def _library_allowed(library: str, form: str, allowed: frozenset[str]) -> bool:
    stem = library.split(".so")[0]
    if stem in RUNTIME_LIBRARIES or any(stem.startswith(f"lib{name}") for name in allowed):
        return True
    return form != "cabi" and (stem in TORCH_LIBRARIES or stem.startswith("libpython3"))


def _refused_symbol(name: str, linked: bool, form: str, torch_allowed: bool) -> str | None:
    """Why a wanted name is refused. The static CUDA runtime is in every linked library."""
    if name in REACHING_OUT:
        return None if linked else "reaches out of the solution"
    if name.startswith(FOREIGN_LIBRARIES) or _BLAS.match(name):
        return "computes in, or loads, a library"
    if form == "cabi":
        return "uses libtorch" if _TORCH.match(name) else None
    if torch_allowed:
        return None
    if name.startswith(_TORCH_COMPUTES):
        return "computes in libtorch"
    operator = _OPERATOR.match(name)
    if operator is not None:
        base = operator[2][: int(operator[1])]
        return None if _MOVES_DATA.fullmatch(base) else f"computes with the operator {base}"
    backend = _BACKEND.match(name)
    if backend is not None and "6Tensor" in name:
        base = backend[2][: int(backend[1])]
        return None if _MOVES_DATA.fullmatch(base) else f"computes with the operator {base}"
    return None


def _read(path: Path, linked: bool) -> BinaryReport:
    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            kind = "ET_DYN" if linked else "ET_REL"
            if elf["e_type"] != kind:
                raise ValueError(f"expected {path} to be {kind}, got {elf['e_type']}")
            undefined, exported = _symbols(elf, ".dynsym" if linked else ".symtab")
            images, kernels, stray = _device_code(elf, path)
            return BinaryReport(
                linked=linked,
                needed=tuple(_needed(elf)),
                undefined=tuple(sorted(undefined)),
                unbound=tuple(sorted(_unbound(elf))) if linked else (),
                exported=tuple(sorted(exported)),
                kernels=tuple(sorted(kernels)),
                has_ptx=any(image.kind == "ptx" for image in images),
                has_compressed=any(image.compressed for image in images),
                stray_device_code=stray,
                constructors=_constructors(elf),
            )
        except (ELFError, fatbin.FatbinError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


def _section(elf: ELFFile, name: str) -> Any:
    """A section as the class that pyelftools has for its kind, or None."""
    return elf.get_section_by_name(name)


def _symbols(elf: ELFFile, table: str) -> tuple[set[str], set[str]]:
    """Wanted names, and functions that others may call."""
    undefined, exported = set(), set()
    section = _section(elf, table)
    for symbol in section.iter_symbols() if section else ():
        info = symbol["st_info"]
        if symbol["st_shndx"] == "SHN_UNDEF":
            undefined.add(symbol.name)
        elif info["type"] in ("STT_FUNC", "STT_LOOS") and info["bind"] != "STB_LOCAL":
            exported.add(symbol.name)
    return undefined - {""}, exported


def _needed(elf: ELFFile) -> Iterator[str]:
    dynamic = _section(elf, ".dynamic")
    for tag in dynamic.iter_tags("DT_NEEDED") if dynamic else ():
        yield tag.needed


def _unbound(elf: ELFFile) -> Iterator[str]:
    """Wanted names without a version, which is how a linker marks where a name was found.

    The C, C++, OpenMP and CUDA runtimes version their names; a library that does not (cuDNN) is
    allowed by prefix.
    """
    table, versions = _section(elf, ".dynsym"), _section(elf, ".gnu.version")
    for index, symbol in enumerate(table.iter_symbols() if table else ()):
        if symbol["st_shndx"] != "SHN_UNDEF" or not symbol.name or symbol.name in HARMLESS_WEAK:
            continue
        if versions is None or not isinstance(versions.get_symbol(index)["ndx"], int):
            yield symbol.name


def _constructors(elf: ELFFile) -> int:
    names = (".init_array", ".ctors", ".preinit_array")
    parts = [section for section in elf.iter_sections() if section.name.startswith(names)]
    return sum(int(section["sh_size"]) * 8 // elf.elfclass for section in parts)


def _device_code(elf: ELFFile, path: Path) -> tuple[list[fatbin.Image], set[str], int]:
    """Images, names of kernels, and how much device code lies elsewhere."""
    found: list[fatbin.Image] = []
    names: set[str] = set()
    places = []
    for section in elf.iter_sections():
        if section.name not in (fatbin.SECTION, fatbin.RELOCATABLE_SECTION):
            continue
        data = section.data()
        places.append((section["sh_offset"], section["sh_offset"] + section["sh_size"]))
        for image in fatbin.images(data):
            found.append(image)
            names |= {kernel.name for kernel in fatbin.kernels(data, image)}
    return found, names, len(fatbin.stray(path.read_bytes(), places))
