"""Builds are cached by content, safe side by side, and refuse what is not a plain source."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.sandbox import Limits, Zygote
from schemas.records import Solution, Target
from tests import samples
from verification.build import Build, BuildError, BuildTimeout, build
from verification.toolchain import ToolchainError, toolchain


def _build(solution: Solution, cache: Path, timeout_s: float = 120.0) -> Build:
    cache.mkdir(exist_ok=True)
    return build(solution, Target.CPU, toolchain(Target.CPU), cache, timeout_s, memory_gib=16)


def test_a_second_build_of_the_same_text_is_a_look_up(tmp_path: Path) -> None:
    first = _build(samples.solution(), tmp_path)
    again = _build(samples.solution(), tmp_path)
    assert not first.cached
    assert again.cached
    assert first.binary_hash == again.binary_hash
    changed = _build(samples.solution(kernel=samples.KERNEL.replace("0.5f", "0.25f")), tmp_path)
    assert not changed.cached
    assert changed.binary_hash != first.binary_hash


def test_python_text_is_not_part_of_the_build(tmp_path: Path) -> None:
    _build(samples.solution(), tmp_path)
    assert _build(samples.solution(samples.MODEL_NEW + "# other\n"), tmp_path).cached


def test_several_files_link_together(tmp_path: Path) -> None:
    solution = Solution.of(
        {
            "model_new.py": "",
            "kernels/a.cpp": '#include "h.h"\nextern "C" int a() { return b(); }',
            "kernels/b.cpp": '#include "h.h"\nint b() { return 0; }',
            "kernels/h.h": "int b();",
        }
    )
    assert _build(solution, tmp_path).library.exists()


def test_the_compilers_words_come_back(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected"):
        _build(samples.solution(kernel="int f( {"), tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_a_build_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(BuildTimeout, match=r"took over 0\.01 s"):
        _build(samples.solution(), tmp_path, timeout_s=0.01)
    assert not list(tmp_path.iterdir())
    assert not _build(samples.solution(), tmp_path).cached


@pytest.mark.parametrize(
    "path", ["kernels/../../evil.cpp", "kernels/a b.cpp", "kernels/$x.cpp", "kernels/x\ny.cpp"]
)
def test_paths_stay_inside(tmp_path: Path, path: str) -> None:
    with pytest.raises(BuildError, match="plain path"):
        _build(Solution.of({"model_new.py": "", path: "int x;"}), tmp_path)


def test_no_kernels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="kernels"):
        _build(Solution.of({"model_new.py": "x = 1"}), tmp_path)


def test_two_builders_of_one_solution(tmp_path: Path) -> None:
    results: list[Build] = []
    threads = [
        threading.Thread(target=lambda: results.append(_build(samples.solution(), tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({made.binary_hash for made in results}) == 1
    assert len(results) == 4


@pytest.fixture
def looks_again() -> Iterator[None]:
    """Whatever the test changes, `toolchain` sees it, and no later test does."""
    toolchain.cache_clear()
    yield
    toolchain.cache_clear()


def _program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.mark.parametrize("compiler", ["", "no-such-compiler", "ccache g++", "false"])
def test_a_compiler_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch, looks_again: None, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ToolchainError, match=r"install g\+\+|does not run"):
        toolchain(Target.CPU)


def test_no_compiler_is_said_clearly(monkeypatch: pytest.MonkeyPatch, looks_again: None) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=r"found no program 'g\+\+'.*install g\+\+"):
        toolchain(Target.CPU)
    with pytest.raises(ToolchainError, match="nvcc"):
        toolchain(Target.CUDA)


def test_another_compiler_is_used_once_cxx_names_it(
    monkeypatch: pytest.MonkeyPatch, looks_again: None, tmp_path: Path
) -> None:
    """Inductor does not look for clang++ by itself, so neither do we."""
    clang = _program(tmp_path, "clang++", "echo clang 19")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=r"let \$CXX name one program, such as clang\+\+"):
        toolchain(Target.CPU)
    monkeypatch.setenv("CXX", "clang++")
    assert toolchain(Target.CPU).version == "clang 19"
    assert toolchain(Target.CPU).compile_command.startswith(f"{clang} ")


def test_children_compile_with_the_compiler_that_builds(
    monkeypatch: pytest.MonkeyPatch, looks_again: None, tmp_path: Path
) -> None:
    compiler = _program(tmp_path, "my-c++", 'exec g++ "$@"')
    monkeypatch.setenv("CXX", str(compiler))
    zygote = Zygote.start(warm=False)
    try:
        worker = zygote.spawn("tests.sandbox_entry:handlers", {}, Limits(), "solution")
        seen = worker.call("who", 10)["environment"]
    finally:
        zygote.close()
    assert toolchain(Target.CPU).compile_command.startswith(f"{seen['CXX']} ")


FAKE_NVCC = """[ "$1" = --version ] && echo "Build fake" && exit
command -v "${NVCC_CCBIN-g++}" >/dev/null || { echo "nvcc fatal: no host compiler" >&2; exit 1; }"""


@pytest.mark.parametrize(
    "nvcc",
    [
        FAKE_NVCC,
        pytest.param(
            f'exec {shutil.which("nvcc")} "$@"',
            marks=pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here"),
        ),
    ],
    ids=["fake", "real"],
)
def test_nvcc_needs_a_compiler_of_the_host(
    monkeypatch: pytest.MonkeyPatch, looks_again: None, tmp_path: Path, nvcc: str
) -> None:
    _program(tmp_path, "nvcc", nvcc)
    host = shutil.which("g++")
    assert host is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
    with pytest.raises(ToolchainError, match=r"found none \(.*nvcc fatal.*install g\+\+"):
        toolchain(Target.CUDA)
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    with pytest.raises(ToolchainError, match=r"let \$NVCC_CCBIN name one program"):
        toolchain(Target.CUDA)
    monkeypatch.setenv("NVCC_CCBIN", host)
    assert toolchain(Target.CUDA).version.startswith("Build ")
