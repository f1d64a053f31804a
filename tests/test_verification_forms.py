"""Three forms of a solution: what is recorded, planned, built and imported.

Extensions that include torch's headers take a minute to compile here, so the fast tests build
modules of plain Python.h on the same way.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from schemas.records import Solution, Target
from tests import samples
from verification.building.build import Build, BuildError, build
from verification.building.plans import PAPER, ExtensionPlan, Kind, extensions, filtered
from verification.building.recorded import ExtensionCall, FormError, Text, read_calls
from verification.building.toolchain import pip_includes, toolchain
from verification.workers import forms

PLAIN = """#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "plain", "", -1, methods};
PyMODINIT_FUNC PyInit_plain() { return PyModule_Create(&module); }
"""
MODEL = f"""from torch.utils.cpp_extension import load_inline
SOURCE = {PLAIN!r}
plain = load_inline(
    name="plain", cpp_sources=SOURCE, no_implicit_headers=True,
    extra_cflags=["-DANSWER=42", "-ffast-math"], verbose=True,
)
answer = plain.answer
"""
TORCH_MODEL = '''import torch
from torch.utils import cpp_extension

SOURCE = """
torch::Tensor scaled(torch::Tensor x, double factor) {
    TORCH_CHECK(x.is_contiguous(), "expected a contiguous tensor");
    auto out = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i)
        out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * factor;
    return out;
}
"""
ops = cpp_extension.load_inline("scale_ops", [SOURCE], functions=["scaled"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ops.scaled(x, 3.0)
'''
BINDING = """#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
#include "../binding_registry.h"

extern "C" int double_all(const float* x, float* out, int64_t n, int config, void* stream);

static torch::Tensor twice(torch::Tensor x, int config = 0) {
    auto out = torch::empty_like(x);
    double_all(x.data_ptr<float>(), out.data_ptr<float>(), x.numel(), config, nullptr);
    return out;
}

static void bind(pybind11::module& m) {
    m.def("twice", &twice, py::arg("x"), py::arg("config") = 0);
}

REGISTER_BINDING(twice, bind);
"""
KERNEL = """#include <cstdint>
extern "C" int double_all(const float* x, float* out, int64_t n, int, void*) {
    for (int64_t i = 0; i < n; ++i) out[i] = 2 * x[i];
    return 0;
}
"""


def write(folder: Path, solution: Solution) -> Path:
    for source in solution.files:
        file = folder / source.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.text)
    return folder


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a form changes in this process is changed back."""
    for name in ("load", "load_inline", "_jit_compile"):
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("model_new", "cabi", PAPER):
        monkeypatch.setitem(sys.modules, name, sys)  # remembers whether there was one
        del sys.modules[name]


def record(folder: Path) -> Any:
    """As the judge gets it."""
    return json.loads(json.dumps(forms.record(folder, [lambda module: module.ModelNew()])))


def model_of(solution: Solution, folder: Path, made: Build) -> types.ModuleType:
    libraries = {library.key: str(library.path) for library in made.libraries}
    return forms.import_model(solution.form, folder, libraries)


def make(solution: Solution, cache: Path, recorded: Any = ()) -> Build:
    cache.mkdir(exist_ok=True)
    tools = toolchain(Target.CPU)
    return build(solution, Target.CPU, tools, cache, 280.0, 16.0, recorded=recorded)


def one_file(text: str) -> Solution:
    return Solution.of({"model_new.py": text}, form="load_inline")


def plan_of(call: ExtensionCall, **more: Any) -> ExtensionPlan:
    tools = toolchain(Target.CPU)
    return extensions(one_file(""), Target.CPU, tools, [call.to_json()], **more)[0]


def test_load_inline_is_recorded_built_and_found(tmp_path: Path) -> None:
    solution = one_file(MODEL)
    folder = write(tmp_path / "solution", solution)
    recorded = record(folder)
    assert [call["name"] for call in recorded] == ["plain"]
    made = make(solution, tmp_path / "cache", recorded)
    assert made.dropped == ("-ffast-math",)
    assert model_of(solution, folder, made).answer() == 42
    # The same text elsewhere is the same extension, and its object needs no compiler.
    again = make(solution, tmp_path / "cache", record(write(tmp_path / "other", solution)))
    assert again.cached
    assert again.binary_hash == made.binary_hash


def test_what_was_not_recorded_is_refused(tmp_path: Path) -> None:
    solution = one_file(MODEL.replace("42", "41"))
    folder = write(tmp_path / "solution", solution)
    made = make(solution, tmp_path / "cache", record(folder))
    (folder / "model_new.py").write_text(MODEL)
    with pytest.raises(RuntimeError, match=r"'plain' is not one of the 1 that model_new\.py"):
        model_of(solution, folder, made)


def test_nothing_else_compiles(tmp_path: Path) -> None:
    solution = one_file(
        MODEL + "from torch.utils.cpp_extension import _jit_compile\n_jit_compile()"
    )
    folder = write(tmp_path / "solution", solution)
    made = make(solution, tmp_path / "cache", record(folder))
    with pytest.raises(RuntimeError, match="nothing is compiled here"):
        model_of(solution, folder, made)


def test_a_call_in_the_constructor_is_recorded(tmp_path: Path) -> None:
    body = "".join(f"        {line}\n" for line in MODEL.splitlines())
    lazy = f"class ModelNew:\n    def __init__(self):\n{body}"
    assert [c["name"] for c in record(write(tmp_path, one_file(lazy)))] == ["plain"]


def test_errors_before_the_first_call_are_the_solutions(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        record(write(tmp_path, one_file("1 / 0\n" + MODEL)))
    assert len(record(write(tmp_path, one_file(MODEL + "plain.answer()\n")))) == 1


def test_load_takes_files_of_its_own_folder_only(tmp_path: Path) -> None:
    load = "from torch.utils.cpp_extension import load\nplain = load('plain', {!r})\n"
    half = "int half() { return 21; }\n"
    files = {
        "kernels/plain.cpp": PLAIN.replace("ANSWER", "2 * half()").replace(
            "<Python.h>", '<Python.h>\n#include "half.h"'
        ),
        "kernels/half.h": "int half();\n",
        "kernels/half.cpp": half,
        "model_new.py": load.format(["kernels/plain.cpp", "kernels/half.cpp"]),
    }
    solution = Solution.of(files, form="load_inline")
    folder = write(tmp_path / "solution", solution)
    made = make(solution, tmp_path / "cache", record(folder))
    assert model_of(solution, folder, made).plain.answer() == 42
    assert [path.name for path in made.libraries[0].objects] == ["half.cpp.o", "plain.cpp.o"]
    (folder / "model_new.py").write_text(load.format(["/etc/passwd"]))
    with pytest.raises(FormError, match=r"or a temporary one, got '/etc/passwd'"):
        record(folder)


WITH_HEADER = PLAIN.replace("<Python.h>", '<Python.h>\n#include "number.h"')
WRITTEN = f"""import tempfile
from pathlib import Path
from torch.utils.cpp_extension import load

folder = Path(tempfile.mkdtemp())
(folder / "number.h").write_text("#define ANSWER 42")
(folder / "plain.cpp").write_text({WITH_HEADER!r})
plain = load("plain", [str(folder / "plain.cpp")])
answer = plain.answer
"""


def test_load_takes_files_that_the_solution_has_written(tmp_path: Path) -> None:
    solution = one_file(WRITTEN)
    folder = write(tmp_path / "solution", solution)
    recorded = record(folder)
    assert recorded[0]["compiled"] == ["plain.cpp"]
    assert [file["name"] for file in recorded[0]["files"]] == ["number.h", "plain.cpp"]
    made = make(solution, tmp_path / "cache", recorded)
    assert model_of(solution, folder, made).answer() == 42  # from another folder


def test_written_files_need_names_of_their_own(tmp_path: Path) -> None:
    twice = 'other = Path(tempfile.mkdtemp()) / "plain.cpp"\nother.write_text("")\n'
    both = WRITTEN.replace("plain = load", f"{twice}plain = load").replace(
        '"plain.cpp")])', '"plain.cpp"), other])'
    )
    with pytest.raises(FormError, match=r"got plain\.cpp twice"):
        record(write(tmp_path, one_file(both)))


def test_unchanged_files_are_not_compiled_again(tmp_path: Path) -> None:
    files = {"plain.cpp": "int half();\n" + PLAIN.replace("ANSWER", "half()")}
    ran: list[str] = []

    def run(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
        ran.append((folder / "build.ninja").read_text())
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stdout

    def made(half: str, plain: str = files["plain.cpp"]) -> Build:
        texts = (Text(name="half.cpp", text=half), Text(name="plain.cpp", text=plain))
        call = ExtensionCall(name="plain", files=texts, compiled=("plain.cpp", "half.cpp"))
        tools, calls = toolchain(Target.CPU), [call.to_json()]
        return build(one_file(""), Target.CPU, tools, tmp_path, 60, 16, recorded=calls, run=run)

    first = made("int half() { return 1; }")
    second = made("int half() { return 2; }")
    assert first.binary_hash != second.binary_hash
    assert [graph.count("-c plain.cpp") for graph in ran] == [1, 0]
    assert [graph.count("-c half.cpp") for graph in ran] == [1, 1]
    # A file that includes another source is compiled again when that one changes.
    includes = '#if 0\n#include "plain.cpp"\n#endif\nint half() { return 3; }'
    made(includes)
    made(includes, files["plain.cpp"] + "// changed")
    assert ran[3].count("-c half.cpp") == 1


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("-O2", True),
        ("-DBLOCK=128", True),
        ("-D NAME", True),
        ("-U__CUDA_NO_HALF_OPERATORS__", True),
        ("--expt-relaxed-constexpr", True),
        ("-maxrregcount=64", True),
        ("--use_fast_math", False),
        ("-use_fast_math", False),
        ("-ffast-math", False),
        ("-Ofast", False),
        ("-gencode=arch=compute_80,code=sm_80", False),
        ("-arch=sm_90a", False),
        ("-include /etc/passwd", False),
        ("-I/etc", False),
        ("-DX=$(id)", False),
        ("-DX=a;b", False),
        ("-fplugin=x.so", False),
        ("-Wl,-rpath,/tmp", False),
        ("@file", False),
        ("-DTORCH_EXTENSION_NAME=other", False),
    ],
)
def test_only_some_flags_are_kept(asked: str, kept: bool) -> None:
    taken, dropped = filtered([asked], 17, fast_math=False)
    assert (not dropped, taken[-1]) == (kept, "-std=c++17")
    assert ("".join(taken[:-1]) == asked.replace(" ", "")) == kept


def test_fast_math_is_kept_where_the_policy_allows_it() -> None:
    assert filtered(["--use_fast_math"], 17, fast_math=True)[0][0] == "--use_fast_math"


def test_a_standard_is_raised_to_what_torch_needs() -> None:
    assert filtered(["-std=c++14"], 20, fast_math=False) == (("-std=c++20",), ())
    assert filtered(["-std=c++20"], 17, fast_math=False) == (("-std=c++20",), ())


def test_libraries_only_as_the_policy_says() -> None:
    call = ExtensionCall(name="x", cpp_sources=("",), ldflags=("-lcublas", "-L/tmp", "evil.o"))
    plan = plan_of(call)
    assert (plan.libraries, plan.dropped) == ((), ("-lcublas", "-L/tmp", "evil.o"))
    plan = plan_of(call, libraries={"cublas"})
    assert (plan.libraries, plan.dropped) == (("cublas",), ("-L/tmp", "evil.o"))


def test_bindings_are_made_as_torch_makes_them() -> None:
    functions = (Text(name="f", text='says "hello"\n'),)
    call = ExtensionCall(name="x", cpp_sources=("int f();",), functions=functions)
    text = plan_of(call).sources["main.cpp"]
    assert text.startswith("#include <torch/extension.h>\nint f();\n")
    assert 'm.def("f", torch::wrap_pybind_function(f), "says \\"hello\\"\\n");' in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a b"),
        ("name", "x; rm -rf"),
        ("cflags", "-O3"),
        ("cflags", [1]),
        ("cpp_sources", ["\ud800"]),
        ("files", [{"name": "../x.cpp", "text": ""}]),
        ("files", [{"name": "a$b.cpp", "text": ""}]),
        ("files", ["x.cpp"]),
        ("cpp_sources", ["x" * (5 << 20)]),
    ],
)
def test_a_record_is_not_believed(field: str, value: Any) -> None:
    good = ExtensionCall(name="x", cpp_sources=("int x;",)).to_json()
    assert read_calls([good])
    with pytest.raises(FormError, match="expected"):
        read_calls([{**good, field: value}])
    with pytest.raises(FormError, match="recorded call"):
        read_calls([{**good, "more": 1}])


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"to call torch\.utils\.cpp_extension\.load_inline"):
        make(one_file("x = 1"), tmp_path)


def test_headers_that_the_toolkit_lacks_come_from_torchs_packages(tmp_path: Path) -> None:
    toolkit, packages = tmp_path / "toolkit", tmp_path / "nvidia"
    for file in ("toolkit/a.h", "nvidia/some/include/a.h", "nvidia/more/include/b.h"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    assert pip_includes(packages, [toolkit]) == (packages / "more/include",)
    (toolkit / "b.h").write_text("")
    assert pip_includes(packages, [toolkit]) == ()
    assert pip_includes(tmp_path / "none", [toolkit]) == ()


def test_cuda_sources_need_the_cuda_target(tmp_path: Path) -> None:
    call = ExtensionCall(name="x", cpp_sources=("",), cuda_sources=("__global__ void k() {}",))
    with pytest.raises(BuildError, match=r"end in \.cpp for --target=cpu, got cuda\.cu"):
        make(one_file(""), tmp_path, [call.to_json()])


def test_another_form_is_refused(tmp_path: Path) -> None:
    files = {f.path: f.text for f in samples.solution().files}
    with pytest.raises(BuildError, match="cabi, load_inline or paper, got 'triton'"):
        make(Solution.of(files, form="triton"), tmp_path)


def test_compile_errors_are_readable(tmp_path: Path) -> None:
    call = ExtensionCall(name="x", cpp_sources=("int f( {",), implicit_headers=False)
    with pytest.raises(BuildError) as caught:
        make(one_file(""), tmp_path, [call.to_json()])
    assert str(caught.value).startswith("FAILED: main.cpp.o")
    assert "main.cpp:1:" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert "-isystem" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_papers_layout_gets_our_registry() -> None:
    files = {"model_new.py": "", "kernels/a_binding.cpp": BINDING, "binding.cpp": "not ours"}
    (plan,) = extensions(Solution.of(files, form="paper"), Target.CPU, toolchain(Target.CPU))
    assert (plan.key, plan.kind) == (PAPER, Kind.TORCH_EXTENSION)
    assert plan.compiled == ("kernels/a_binding.cpp", "binding.cpp")
    assert "PYBIND11_MODULE(cuda_extension" in plan.sources["binding.cpp"]
    assert "REGISTER_BINDING" in plan.sources["binding_registry.h"]


def test_a_plain_library_does_not_depend_on_torch() -> None:
    tools = toolchain(Target.CPU)
    assert not [command for command in tools.commands() if "torch" in command]
    assert "torch" in tools.torch.compile_cpp


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_torch_extension_runs(tmp_path: Path) -> None:
    solution = one_file(TORCH_MODEL)
    folder = write(tmp_path / "solution", solution)
    made = make(solution, tmp_path / "cache", record(folder))
    model = model_of(solution, folder, made).ModelNew()
    assert model(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_that_misses_a_header_is_repeated_with_all_of_them(tmp_path: Path) -> None:
    source = "torch::Tensor f(torch::Tensor x) { return torch::nn::functional::relu(x); }"
    call = ExtensionCall(name="x", cpp_sources=(source,))
    assert len(make(one_file(""), tmp_path, [call.to_json()]).libraries) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_papers_layout_runs(tmp_path: Path) -> None:
    model = "import cuda_extension\ntwice = cuda_extension.twice\n"
    files = {"model_new.py": model, "kernels/a_binding.cpp": BINDING, "kernels/a.cpp": KERNEL}
    solution = Solution.of(files, form="paper")
    folder = write(tmp_path / "solution", solution)
    made = make(solution, tmp_path / "cache")
    first = model_of(solution, folder, made).twice
    assert first(torch.ones(2), config=1).tolist() == [2.0, 2.0]
    # A second copy in the same process has its own functions, and the first keeps its.
    changed = {**files, "kernels/a.cpp": KERNEL.replace("2 * x", "5 * x")}
    other = make(Solution.of(changed, form="paper"), tmp_path / "cache")
    second = model_of(solution, folder, other).twice
    assert (second(torch.ones(1)).item(), first(torch.ones(1)).item()) == (5.0, 2.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_cuda_sources_compile(tmp_path: Path) -> None:
    """With nvcc, and without a GPU: the module is compiled and linked, not loaded."""
    call = ExtensionCall(
        name="x",
        cpp_sources=("torch::Tensor twice(torch::Tensor x);",),
        cuda_sources=(
            """#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
__global__ void kernel(const float* x, float* out) { out[threadIdx.x] = 2 * x[threadIdx.x]; }
torch::Tensor twice(torch::Tensor x) {
    auto out = torch::empty_like(x);
    auto stream = c10::cuda::getCurrentCUDAStream();
    kernel<<<1, 32, 0, stream>>>(x.data_ptr<float>(), out.data_ptr<float>());
    return out;
}""",
        ),
        functions=(Text(name="twice", text="twice"),),
        cflags=("-O3", "-std=c++17"),
        cuda_cflags=("-O3", "--use_fast_math", "-gencode=arch=compute_80,code=sm_80"),
    )
    tools = toolchain(Target.CUDA, "90")
    made = build(one_file(""), Target.CUDA, tools, tmp_path, 800, 16, recorded=[call.to_json()])
    assert {path.name for path in made.libraries[0].objects} == {"main.cpp.o", "cuda.cu.o"}
    assert made.dropped == ("--use_fast_math", "-gencode=arch=compute_80,code=sm_80")
