"""Dead copies: the same library with its work gone, and nothing else changed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from verification.building import fatbin
from verification.building.binary import inspect
from verification.building.knockout import EXIT, knock_out

WORKS = """
static int calls = 0;
template <class T> T twice(T x) { return x + x; }
extern "C" int work(float* y, int n) {
#pragma omp parallel for
    for (int i = 0; i < n; ++i) y[i] = twice(3.5f);
    return 7 + calls++;
}
extern "C" int more(float* y) { y[0] = 9; return work(y, 1); }
"""
KERNELS = """
__global__ void first(float* y) { y[threadIdx.x] = 1.0f; }
template <int N> __global__ void second(float* y) {
    __shared__ float s[64];
    s[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x ^ 1] + N;
}
extern "C" int run(float* y) { first<<<1, 64>>>(y); second<3><<<1, 64>>>(y); return 0; }
"""
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to compile")


def _cpu(folder: Path, text: str = WORKS, *flags: str) -> Path:
    (folder / "a.cpp").write_text(text)
    command = ["g++", "-O3", "-fPIC", "-fopenmp", "-shared", *flags, "a.cpp", "-o", "a.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "a.so"


def _cuda(folder: Path, *flags: str) -> Path:
    (folder / "k.cu").write_text(KERNELS)
    made = ["nvcc", "-O3", "-lineinfo", "-Xcompiler", "-fPIC", *flags, "-c", "k.cu", "-o", "k.o"]
    subprocess.run(made, cwd=folder, check=True)
    linked = ["nvcc", "-shared", "--no-device-link", "k.o", "-o", "k.so"]
    subprocess.run(linked, cwd=folder, check=True)
    return folder / "k.so"


def _changed(before: Path, after: Path) -> list[int]:
    old, new = before.read_bytes(), after.read_bytes()
    assert len(old) == len(new)
    return [index for index in range(len(old)) if old[index] != new[index]]


def _call(library: Path, name: str) -> tuple[int, list[float]]:
    values = (ctypes.c_float * 8)()
    code = getattr(ctypes.CDLL(str(library)), name)(values, 8)
    return code, list(values)


@pytest.mark.parametrize("flags", [(), ("-fcf-protection=full",), ("-fcf-protection=none",)])
def test_dead_functions_return_zero_and_write_nothing(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    library, dead = _cpu(tmp_path, WORKS, *flags), tmp_path / "dead.so"
    assert knock_out(library, dead) == ("more", "work")
    assert _call(library, "work") == (7, [7.0] * 8)
    assert _call(dead, "work") == (0, [0.0] * 8)
    assert _call(dead, "more") == (0, [0.0] * 8)
    assert 0 < len(_changed(library, dead)) <= 6
    assert os.access(dead, os.X_OK)


def test_one_function_can_be_killed_alone(tmp_path: Path) -> None:
    library, dead = _cpu(tmp_path), tmp_path / "dead.so"
    assert knock_out(library, dead, only={"more"}) == ("more",)
    assert _call(dead, "more") == (0, [0.0] * 8)
    assert _call(dead, "work") == (7, [7.0] * 8)
    with pytest.raises(ValueError, match=r"\['more', 'work'\].*'none'"):
        knock_out(library, dead, only={"none"})
    with pytest.raises(ValueError, match="in `only`"):
        knock_out(library, dead, only=())


def test_an_extension_can_still_be_imported(tmp_path: Path) -> None:
    text = WORKS + 'extern "C" int PyInit_a(float* y, int) { y[0] = 2; return 5; }'
    library, dead = _cpu(tmp_path, text), tmp_path / "dead.so"
    assert knock_out(library, dead) == ("more", "work")
    assert _call(dead, "PyInit_a") == (5, [2.0] + [0.0] * 7)


def test_nothing_to_kill_is_said(tmp_path: Path) -> None:
    library = _cpu(tmp_path, "static int f() { return 1; } extern int x; int x = f();")
    with pytest.raises(ValueError, match="nothing to knock out"):
        knock_out(library, tmp_path / "dead.so")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="cannot be read"):
        knock_out(tmp_path / "text", tmp_path / "dead.so")


@needs_nvcc
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_dead_kernels_exit_at_once_and_nothing_else_changes(tmp_path: Path, arch: str) -> None:
    options = f"-gencode=arch=compute_{arch},code=sm_{arch}", "--no-compress"
    library, dead = _cuda(tmp_path, *options), tmp_path / "dead.so"
    # The encoding is the compiler's own: every kernel ends with the same bytes.
    assert library.read_bytes().count(EXIT) >= 2
    names = ("_Z5firstPf", "_Z6secondILi3EEvPf")
    assert knock_out(library, dead) == names
    assert inspect(dead) == inspect(library)
    starts = _kernel_offsets(library)
    assert set(starts) == set(names)
    killed = dead.read_bytes()
    assert all(killed[start : start + 16] == EXIT for start in starts.values())
    allowed = {start + index for start in starts.values() for index in range(16)}
    assert set(_changed(library, dead)) <= allowed

    assert knock_out(library, dead, only=names[:1]) == names[:1]
    killed = dead.read_bytes()
    assert killed[starts[names[0]] :][:16] == EXIT
    assert killed[starts[names[1]] :][:16] != EXIT


def _kernel_offsets(library: Path) -> dict[str, int]:
    """Where kernels start in the file, by readelf and the container's own headers."""
    data = library.read_bytes()
    listed = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True)
    line = next(line for line in listed.stdout.splitlines() if fatbin.SECTION in line)
    start, size = (int(word, 16) for word in line.split("PROGBITS")[1].split()[1:3])
    section = data[start : start + size]
    return {
        kernel.name: start + kernel.offset
        for image in fatbin.images(section)
        for kernel in fatbin.kernels(section, image)
    }


@needs_nvcc
def test_what_would_live_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PTX"):  # nvcc's default embeds it
        knock_out(_cuda(tmp_path), tmp_path / "dead.so")
    packed = _cuda(tmp_path, "-gencode=arch=compute_90,code=sm_90", "--compress-mode=size")
    with pytest.raises(ValueError, match="--no-compress"):
        knock_out(packed, tmp_path / "dead.so")
    parts = _cuda(tmp_path, "-gencode=arch=compute_90,code=sm_90", "--no-compress", "-rdc=true")
    with pytest.raises(ValueError, match="-rdc"):
        knock_out(parts, tmp_path / "dead.so")
    assert not (tmp_path / "dead.so").exists()
