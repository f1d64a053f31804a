"""What built files ask for: honest builds pass, each door to others is refused by its name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import samples
from verification.building.binary import (
    BinaryReport,
    audit,
    inspect,
    inspect_object,
    refusals,
)
from verification.building.fatbin import FatbinError, images

HONEST_CU = """#include <cstdint>
#include <cuda_runtime.h>
#include <stdexcept>
__global__ void scale(const float* x, float* y, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
extern "C" int run(const float* x, float* y, int64_t n, cudaStream_t stream) {
    cudaFuncSetAttribute(scale, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    cudaMemsetAsync(y, 0, 4, stream);
    void* scratch = nullptr;
    cudaMallocAsync(&scratch, 1024, stream);
    cudaFreeAsync(scratch, stream);
    scale<<<(n + 255) / 256, 256, 1024, stream>>>(x, y, n);
    if (n < 0) throw std::runtime_error("n");
    return cudaGetLastError();
}
"""
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to compile")


def _cpp(folder: Path, text: str, name: str = "a", flags: str = "") -> tuple[Path, Path]:
    """A library and the object it was linked from, built as the verifier's toolchain does."""
    source, made, library = folder / f"{name}.cpp", folder / f"{name}.o", folder / f"{name}.so"
    source.write_text(text)
    compiled = ["g++", "-std=c++17", "-O2", "-fPIC", "-fopenmp", "-c", str(source), "-o", str(made)]
    subprocess.run(compiled, check=True)
    linked = ["g++", "-shared", "-fopenmp", str(made), "-o", str(library), *flags.split()]
    subprocess.run(linked, check=True)
    return library, made


def _cuda(folder: Path, text: str, *flags: str, name: str = "k") -> tuple[Path, Path]:
    source, made, library = folder / f"{name}.cu", folder / f"{name}.o", folder / f"{name}.so"
    source.write_text(text)
    common = ["nvcc", "-O3", "-Xcompiler", "-fPIC", *flags, "-c", str(source), "-o", str(made)]
    subprocess.run(common, check=True)
    linked = ["nvcc", "-shared", "--no-device-link", str(made), "-o", str(library)]
    subprocess.run(linked, check=True)
    return library, made


def _asks_for(*undefined: str, form: str = "cabi", allowed: frozenset[str] = frozenset()) -> str:
    report = BinaryReport(
        linked=False, needed=(), undefined=undefined, unbound=(), exported=(), kernels=(),
        has_ptx=False, has_compressed=False, stray_device_code=0, constructors=0,
    )  # fmt: skip
    return "; ".join(refusals(report, form, allowed))


def test_an_honest_cpu_build_passes(tmp_path: Path) -> None:
    library, made = _cpp(tmp_path, samples.KERNEL, flags="-lmvec -lm")
    report = inspect(library)
    assert report.exported == ("scale_gelu",)
    assert report.unbound == ()
    assert audit(library, [made], "cabi") == []


def test_honest_cpp_with_threads_and_exceptions_passes(tmp_path: Path) -> None:
    text = """#include <thread>
    #include <vector>
    #include <stdexcept>
    #include <cmath>
    #include <iostream>
    static std::vector<float> table(16);
    extern "C" int f(float* y, int n) {
        if (n < 0) throw std::invalid_argument("n");
        std::thread t([=] { for (int i = 0; i < n; ++i) y[i] = std::exp(y[i]) + table[i % 16]; });
        t.join();
        if (n == 7) std::cerr << "seven";
        return 0;
    }"""
    library, made = _cpp(tmp_path, text)
    assert audit(library, [made], "cabi") == []
    assert inspect_object(made).constructors >= 1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dlopen", 'dlopen("libtorch_cpu.so", 1)'),
        ("system", 'system("id")'),
        ("fork", "fork()"),
        ("mprotect", "mprotect(0, 0, 0)"),
        ("syscall", "syscall(39)"),
    ],
)
def test_doors_to_others_are_refused(tmp_path: Path, name: str, call: str) -> None:
    heads = "#include <dlfcn.h>\n#include <stdlib.h>\n#include <unistd.h>\n#include <sys/mman.h>\n"
    library, made = _cpp(tmp_path, f'{heads}extern "C" int f() {{ return (long){call} != 7; }}')
    assert audit(library, [made], "cabi") == [f"reaches out of the solution: {name}"]


def test_a_function_of_the_process_that_no_library_gives_is_refused(tmp_path: Path) -> None:
    text = 'extern "C" int fast_gemm(float*); extern "C" int f(float* x) { return fast_gemm(x); }'
    library, made = _cpp(tmp_path, text)
    assert audit(library, [made], "cabi") == [
        "wants a name that no library it is linked with has: fast_gemm"
    ]


def test_a_solutions_own_function_may_be_called_like_a_librarys(tmp_path: Path) -> None:
    uses = 'extern "C" int sgemm_(float*); extern "C" int f(float* x) { return sgemm_(x); }'
    (tmp_path / "uses.cpp").write_text(uses)
    subprocess.run(["g++", "-fPIC", "-c", "uses.cpp", "-o", "uses.o"], cwd=tmp_path, check=True)
    own = 'extern "C" int sgemm_(float* x) { return x[0] > 0; }'
    library, made = _cpp(tmp_path, own, flags=str(tmp_path / "uses.o"))
    assert audit(library, [made, tmp_path / "uses.o"], "cabi") == []
    assert refusals(inspect_object(tmp_path / "uses.o"), "cabi") != []


def test_a_library_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    _cpp(tmp_path, 'extern "C" int other() { return 1; }', name="libfastmath")
    flags = f"-L{tmp_path} -l:libfastmath.so"
    text = 'extern "C" int other(); extern "C" int f() { return other(); }'
    library, made = _cpp(tmp_path, text, flags=flags)
    assert "needs the library libfastmath.so" in audit(library, [made], "cabi")
    assert audit(library, [made], "cabi", frozenset({"fastmath", "other"})) == []


def test_taking_the_place_of_the_loader_is_refused(tmp_path: Path) -> None:
    _, made = _cpp(tmp_path, 'extern "C" void* dlsym(void*, const char*) { return 0; }')
    assert refusals(inspect_object(made), "cabi") == ["puts itself in the place of dlsym"]


def test_names_are_judged_by_form_and_policy() -> None:
    matmul = "_ZN2at4_ops6matmul4callERKNS_6TensorES4_"
    empty = "_ZN2at4_ops19empty_memory_format4callEN3c108ArrayRefINS2_6SymIntEEE"
    moving = [
        "_ZN2at4_ops5copy_4callERNS_6TensorERKS2_b",
        "_ZN2at4_ops12fill__Scalar4callERNS_6TensorERKN3c106ScalarE",
        "_ZN2at4_ops13transpose_int4callERKNS_6TensorEll",
        "_ZN2at4_ops8to_dtype4callERKNS_6TensorEN3c1010ScalarTypeEbb",
    ]
    check_failed = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
    assert "uses libtorch" in _asks_for(empty)
    assert _asks_for(empty, check_failed, *moving, "PyModule_New", form="load_inline") == ""
    for form in ("load_inline", "paper"):
        assert "operator matmul" in _asks_for(matmul, form=form)
        assert "cublasSgemm_v2" in _asks_for("cublasSgemm_v2", form=form)
        assert "libtorch" in _asks_for("_ZN3c1010Dispatcher9singletonEv", form=form)
    assert _asks_for("_ZN2at4_ops4topk4callERKNS_6TensorE", form="paper") != ""  # no transpose
    assert _asks_for("cublasSgemm_v2", allowed=frozenset({"cublas"})) == ""
    assert _asks_for("cudnnConvolutionForward", allowed=frozenset({"cublas"})) != ""
    assert _asks_for("cuModuleLoadData") != ""
    assert _asks_for("cudaGetDriverEntryPointByVersion", "cudaLaunchCooperativeKernel") == ""
    with pytest.raises(ValueError, match="cabi"):
        _asks_for(form="exe")


def test_what_is_no_library_is_said(tmp_path: Path) -> None:
    library, made = _cpp(tmp_path, 'extern "C" int f() { return 0; }')
    with pytest.raises(ValueError, match="ET_DYN"):
        inspect(made)
    (tmp_path / "text").write_text("no library")
    with pytest.raises(ValueError, match="cannot be read"):
        inspect(tmp_path / "text")
    (tmp_path / "cut").write_bytes(library.read_bytes()[:2000])
    with pytest.raises(ValueError, match="cut"):
        inspect(tmp_path / "cut")
    with pytest.raises(ValueError, match="object files"):
        audit(library, [], "cabi")


@needs_nvcc
def test_an_honest_cuda_build_passes_in_spite_of_its_runtime(tmp_path: Path) -> None:
    library, made = _cuda(tmp_path, HONEST_CU, "-gencode=arch=compute_90,code=sm_90")
    report = inspect(library)
    assert "dlopen" in report.undefined  # the static runtime's
    assert report.kernels == ("_Z5scalePKfPfl",)
    assert report.exported == ("run",)
    assert (report.has_ptx, report.stray_device_code) == (False, 0)
    assert audit(library, [made], "cabi") == []


@needs_nvcc
def test_ptx_compression_and_device_code_as_data_are_seen(tmp_path: Path) -> None:
    big = "\n".join(
        f"__global__ void k{i}(float* y) {{ y[threadIdx.x] = sinf(y[{i}]) * powf(y[1], y[2]); }}"
        for i in range(6)
    )
    _, made = _cuda(tmp_path, big, "--compress-mode=size", name="packed")
    packed = inspect_object(made)
    assert packed.has_ptx
    assert packed.has_compressed
    _, plain = _cuda(tmp_path, big, "--no-compress", "-gencode=arch=compute_90,code=sm_90")
    report = inspect_object(plain)
    assert not report.has_ptx
    assert not report.has_compressed
    assert len(report.kernels) == 6
    cubin = tmp_path / "k.cubin"
    subprocess.run(
        ["nvcc", "-arch=sm_90", "-cubin", str(tmp_path / "k.cu"), "-o", str(cubin)], check=True
    )
    hidden = ",".join(str(byte) for byte in cubin.read_bytes())
    library, made = _cpp(tmp_path, f'extern "C" const unsigned char data[] = {{{hidden}}};')
    assert audit(library, [made], "cabi") == ["1 pieces of device code outside .nv_fatbin"]


def test_a_damaged_container_is_said() -> None:
    with pytest.raises(FatbinError, match="expected a fatbin"):
        images(b"garbage " * 4)
    whole = bytes.fromhex("50ed55ba01001000") + (64).to_bytes(8, "little")
    with pytest.raises(FatbinError, match="expected a fatbin"):
        images(whole)  # 64 bytes of images are promised
    with pytest.raises(FatbinError, match=r"cut short|over the end"):
        images(whole + bytes(63) + b"\xff")


def test_operators_of_torch_are_for_extensions_whose_policy_allows_them() -> None:
    product = "_ZN2at4_ops2mm4callERKNS_6TensorES4_"
    native = "_ZN2at6native6linearERKNS_6TensorE"
    torch = frozenset({"torch"})
    for name in (product, native):
        assert _asks_for(name, form="load_inline")
        assert not _asks_for(name, form="load_inline", allowed=torch)
        assert _asks_for(name, form="cabi", allowed=torch)
    assert _asks_for("cublasCreate_v2", "fork", form="load_inline", allowed=torch).count(";") == 1
