"""A copy of a built library whose own work is dead: the same calls, and nothing is computed.

A solution that gives right answers with its kernels dead had them from elsewhere. The copy is made
from the judge's build, so the solution has no part in it:

    with device code       the first instruction of every kernel becomes EXIT
    without (CPU target)   every exported function returns 0 at once

What it does not show: that a kernel does much of the work. A solution that computes with a library
and only copies the result with its own kernel is wrong without that kernel as well; attribution
by time (`verification.workers.attribution`, `verification.sampling`) is for that.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from verification.building import fatbin

EXIT = bytes.fromhex("4d790000000000000000800300ea0f00")
"""Unconditional EXIT, as ptxas writes it, byte for byte the same for sm_80, sm_90 and sm_100."""
OLDEST_ARCH = 75
"""Since Volta an instruction is 16 bytes, and since Turing ptxas writes EXIT like this."""
RETURN_ZERO = {
    "EM_X86_64": bytes.fromhex("31c0c3"),  # xor eax, eax; ret
    "EM_AARCH64": bytes.fromhex("00008052c0035fd6"),  # mov w0, #0; ret
}
ENTRY_MARK = bytes.fromhex("f30f1efa")
"""endbr64, to which indirect calls must jump on machines that enforce it; it stays."""
NOT_OURS = frozenset({"_init", "_fini"})
MODULE_START = "PyInit_"
"""What Python calls to import an extension; it must live for the calls to be made."""


@dataclass(frozen=True, kw_only=True)
class _Patch:
    name: str
    offset: int
    code: bytes


def knock_out(library: Path, output: Path, only: Collection[str] | None = None) -> tuple[str, ...]:
    """Write the dead copy of `library` to `output`, an executable file; returns what was killed.

    Names are mangled, sorted and without repeats. `only` kills just these. Raises ValueError
    when nothing can be killed, when a name of `only` is not there, or when the library would
    work on after it: with PTX, which the driver compiles anew, or with device code that is
    compressed or laid out in an unknown way.
    """
    patches = list(_patches(library))
    if not patches:
        raise ValueError(
            f"expected kernels or exported functions in {library}, found none: "
            "there is nothing to knock out"
        )
    missing = set(only or ()) - {patch.name for patch in patches}
    if missing:
        known = sorted({patch.name for patch in patches})
        raise ValueError(f"expected names out of {known}, got {sorted(missing)}")
    chosen = [patch for patch in patches if only is None or patch.name in only]
    if not chosen:
        raise ValueError("expected a name or more in `only`, got none")
    shutil.copyfile(library, output)
    with output.open("r+b") as file:
        for patch in chosen:
            file.seek(patch.offset)
            file.write(patch.code)
    output.chmod(0o755)
    return tuple(sorted({patch.name for patch in chosen}))


def _patches(library: Path) -> Iterator[_Patch]:
    with library.open("rb") as file:
        try:
            elf = ELFFile(file)
            if elf.get_section_by_name(fatbin.RELOCATABLE_SECTION) is not None:
                raise ValueError(f"{library} has relocatable device code: build it without -rdc")
            section = elf.get_section_by_name(fatbin.SECTION)
            # All the device code gone and only host code left would be a CPU library.
            if section is None:
                yield from _functions(elf, library)
            else:
                yield from _kernels(section["sh_offset"], section.data(), library)
        except ELFError as error:
            raise ValueError(f"{library} cannot be read: {error}") from error


def _kernels(start: int, data: bytes, library: Path) -> Iterator[_Patch]:
    for image in fatbin.images(data):
        where = f"{library}, sm_{image.arch}"
        if image.kind == "ptx":
            raise ValueError(
                f"{where}: PTX, which the driver compiles anew, would live on: build with "
                "-gencode=arch=compute_XX,code=sm_XX alone"
            )
        if image.compressed:
            raise ValueError(f"{where}: compressed device code: build with --no-compress")
        if image.kind != "cubin" or image.arch < OLDEST_ARCH:
            raise ValueError(f"{where}: expected a cubin for sm_{OLDEST_ARCH}+, got {image.kind}")
        for kernel in fatbin.kernels(data, image):
            if kernel.size < len(EXIT):
                raise ValueError(f"{where}: the kernel {kernel.name} has {kernel.size} bytes")
            yield _Patch(name=kernel.name, offset=start + kernel.offset, code=EXIT)


def _functions(elf: ELFFile, library: Path) -> Iterator[_Patch]:
    code = RETURN_ZERO.get(elf["e_machine"])
    if code is None:
        raise ValueError(f"{library}: expected x86-64 or aarch64, got {elf['e_machine']}")
    table: Any = elf.get_section_by_name(".dynsym")
    for symbol in table.iter_symbols() if table else ():
        # Weak ones are what the C++ compiler made of headers: templates, inline functions.
        strong = symbol["st_info"] == {"bind": "STB_GLOBAL", "type": "STT_FUNC"}
        if not strong or not isinstance(symbol["st_shndx"], int):
            continue
        if symbol.name in NOT_OURS or symbol.name.startswith(MODULE_START):
            continue
        section = elf.get_section(symbol["st_shndx"])
        if not section.name.startswith(".text"):
            continue
        offset = section["sh_offset"] + symbol["st_value"] - section["sh_addr"]
        head = section.data()[offset - section["sh_offset"] :][: len(ENTRY_MARK)]
        mark = len(ENTRY_MARK) if head == ENTRY_MARK else 0
        if symbol["st_size"] < mark + len(code):
            # Shorter than our two instructions: it returns, and can hardly compute anything.
            continue
        yield _Patch(name=symbol.name, offset=offset + mark, code=code)
