"""The device code inside a compiled file: NVIDIA's fatbin container and the cubins in it.

The container is not documented by NVIDIA; what is read here is what nvcc 12 and 13 write, checked
against the compiler by the tests:

    section .nv_fatbin   one or more fatbins
    fatbin               u32 magic, u16 version, u16 header size, u64 size of the images
    image                u16 kind, u16 version, u32 header size, u64 payload size,
                         u32 compressed size, u32, u16 minor, u16 major, u32 arch, ..., u64 flags
    cubin                an ELF file; a kernel is a FUNC symbol marked as an entry
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

SECTION = ".nv_fatbin"
RELOCATABLE_SECTION = "__nv_relfatbin"
"""What nvcc -rdc makes, which is linked on the device side later."""
MAGIC = 0xBA55ED50
_FATBIN = struct.Struct("<IHHQ")
_IMAGE = struct.Struct("<HHIQIIHHIIIQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PTX, _CUBIN = 1, 2
_COMPRESSED = 0x2000 | 0x8000  # LZ4, zstd
_ENTRY = 0x10  # STO_CUDA_ENTRY in st_other
_STT_FUNC = 2
_EM_CUDA = 190


class FatbinError(ValueError):
    """Device code that is not laid out as expected."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """One image: `kind` is "cubin", "ptx" or "kind N"; `offset` and `size` in bytes of the data."""

    kind: str
    arch: int
    compressed: bool
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel by its mangled name; `offset` of its first instruction in the data, bytes."""

    name: str
    arch: int
    offset: int
    size: int


def images(data: bytes) -> list[Image]:
    """Every image of a `.nv_fatbin` section. Raises FatbinError."""
    found: list[Image] = []
    position = 0
    while position < len(data):
        if not any(data[position : position + 8]):  # padding between fatbins
            position += 8
            continue
        start, end = _fatbin(data, position)
        found += _images_of(data, start, end)
        position = end
    return found


def kernels(data: bytes, image: Image) -> list[Kernel]:
    """The kernels of one image; none unless it is an uncompressed cubin. Raises FatbinError."""
    if image.kind != "cubin" or image.compressed:
        return []
    try:
        cubin = ELFFile(BytesIO(data[image.offset : image.offset + image.size]))
        table: Any = cubin.get_section_by_name(".symtab")
        names: Any = cubin.get_section_by_name(".strtab")
        if table is None or names is None:
            return []
        found = []
        # By hand: the entry mark lies in bits of st_other that pyelftools leaves out.
        for name, info, other, section, value, size in _SYMBOL.iter_unpack(table.data()):
            if info & 0xF == _STT_FUNC and other & _ENTRY and section:
                text = cubin.get_section(section)
                found.append(
                    Kernel(
                        name=names.get_string(name),
                        arch=image.arch,
                        offset=image.offset + text["sh_offset"] + value,
                        size=size,
                    )
                )
        return found
    except (ELFError, struct.error, KeyError, UnicodeDecodeError) as error:
        raise FatbinError(f"expected a cubin at byte {image.offset}: {error}") from error


def stray(data: bytes, skip: Iterable[tuple[int, int]]) -> list[int]:
    """Where device code lies in `data` outside the byte ranges `skip` (start, end).

    Fatbins and bare cubins by their headers. PTX text and anything encoded or compressed by the
    author itself is not seen.
    """
    known = list(skip)
    found = []
    for mark in (struct.pack("<I", MAGIC), b"\x7fELF"):
        position = data.find(mark)
        while position != -1:
            if not any(start <= position < end for start, end in known) and _real(data, position):
                found.append(position)
            position = data.find(mark, position + 1)
    return sorted(found)


def _real(data: bytes, position: int) -> bool:
    if data[position : position + 4] == b"\x7fELF":
        machine = data[position + 18 : position + 20]
        return machine == struct.pack("<H", _EM_CUDA)
    try:  # the runtime's own code has the number as a constant
        return bool(_images_of(data, *_fatbin(data, position)))
    except FatbinError:
        return False


def _fatbin(data: bytes, position: int) -> tuple[int, int]:
    """Where the images of the fatbin at `position` start and end."""
    try:
        magic, _, header, size = _FATBIN.unpack_from(data, position)
    except struct.error as error:
        raise FatbinError(f"a fatbin cut short at byte {position}") from error
    start, end = position + header, position + header + size
    if magic != MAGIC or header < _FATBIN.size or end > len(data):
        raise FatbinError(f"expected a fatbin at byte {position}, found magic {magic:#x}")
    return start, end


def _images_of(data: bytes, start: int, end: int) -> list[Image]:
    found = []
    while start < end:
        try:
            kind, _, header, size, _, _, _, _, arch, _, _, flags = _IMAGE.unpack_from(data, start)
        except struct.error as error:
            raise FatbinError(f"an image cut short at byte {start}") from error
        if header < _IMAGE.size or start + header + size > end:
            raise FatbinError(f"an image at byte {start} reaches over the end of its fatbin")
        found.append(
            Image(
                kind={_PTX: "ptx", _CUBIN: "cubin"}.get(kind, f"kind {kind}"),
                arch=arch,
                compressed=bool(flags & _COMPRESSED),
                offset=start + header,
                size=size,
            )
        )
        start += header + size
    return found
