"""Builds are cached by content, safe side by side, and refuse what is not a plain source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.sandbox import Limits, Zygote
from schemas.records import Solution, Target
from tests import samples
from verification.building import build_cache
from verification.building.build import LIBRARY, Build, BuildError, BuildTimeout, build
from verification.building.build_cache import BuildCache
from verification.building.toolchain import ToolchainError, toolchain


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


def test_a_build_can_run_elsewhere(tmp_path: Path) -> None:
    """In a folder others may write, by whoever is asked to run ninja; the cache stays ours."""
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()
    ran: list[tuple[list[str], Path]] = []

    def run(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
        ran.append((command, folder))
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_dir()} == {
            0o777
        }
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stdout

    tools = toolchain(Target.CPU)
    made = build(samples.solution(), Target.CPU, tools, cache, 60, 16, run=run, scratch=scratch)
    assert [folder.parent for _, folder in ran] == [scratch]
    assert made.library.is_relative_to(cache)
    assert [path.name for path in made.libraries[0].objects] == ["scale_gelu.cpp.o"]
    assert not list(scratch.iterdir())


def test_what_a_builder_leaves_must_be_a_plain_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    cache = tmp_path / "cache"
    cache.mkdir()

    def run(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
        subprocess.run(command, cwd=folder, check=True)
        library = folder / "e0" / LIBRARY
        library.unlink()
        library.symlink_to(secret)
        return 0, ""

    with pytest.raises(BuildError, match="left no library"):
        build(samples.solution(), Target.CPU, toolchain(Target.CPU), cache, 60, 16, run=run)
    assert not list(cache.iterdir())


def _entry(cache: BuildCache, key: str, age_s: float, size: int = 1000) -> Path:
    source = cache.root / "source"
    source.write_bytes(b"x" * size)
    entry = cache.keep(key, {"file": source}, "file")
    source.unlink()
    os.utime(entry, (time.time() - age_s,) * 2)
    return entry


def _key(number: int) -> str:
    return f"{number:032x}"


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path, limit_bytes=2500, grace_s=60, every_s=1e9)
    old, older, used, fresh = (
        _entry(cache, _key(number), age_s) for number, age_s in enumerate((3600, 7200, 9999, 5))
    )
    assert cache.find(_key(2), "file") == used
    assert cache.trim() == 2
    assert [entry.exists() for entry in (old, older, used, fresh)] == [False, False, True, True]
    assert cache.find(_key(0), "file") is None
    # What was asked for lately stays, even above the limit.
    assert BuildCache(tmp_path, limit_bytes=0, grace_s=60).trim() == 0
    assert BuildCache(tmp_path, limit_bytes=0, grace_s=-1).trim() == 2
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_builds_go(tmp_path: Path) -> None:
    for name, age_s in (("build.a.tmp", 1e6), ("b.gone", 1e6), ("build.c.tmp", 10)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    BuildCache(tmp_path).trim()
    assert [path.name for path in tmp_path.iterdir()] == ["build.c.tmp"]


def test_what_is_asked_for_while_entries_are_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BuildCache(tmp_path, limit_bytes=0, grace_s=60, every_s=1e9)
    kept, gone = _entry(cache, _key(0), 3600), _entry(cache, _key(1), 3600)
    measured = build_cache._measured

    def measured_and_then(root: Path) -> list[tuple[float, int, Path]]:
        found = list(measured(root))
        assert cache.find(_key(0), "file") == kept
        return found

    monkeypatch.setattr(build_cache, "_measured", measured_and_then)
    assert cache.trim() == 1
    assert (kept.exists(), gone.exists()) == (True, False)


READER = """import random, sys, time
from pathlib import Path
from verification.building.build_cache import BuildCache
cache = BuildCache(Path(sys.argv[1]), limit_bytes=0, grace_s=60)
numbers = list(range(600))
random.Random(sys.argv[2]).shuffle(numbers)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "trim":
    print(sum(cache.trim() for _ in range(20)))
else:
    got = []
    for n in numbers:
        time.sleep(0.0003)
        if (entry := cache.find(f"{n:032x}", "file")) is not None:
            got.append(entry)
    time.sleep(0.5)
    print(sum((entry / "file").read_bytes() == b"x" * 1000 for entry in got) - len(got), len(got))
"""


def test_what_somebody_just_got_is_never_removed(tmp_path: Path) -> None:
    """Three processes ask for entries while two others remove all that nobody has asked for."""
    cache = BuildCache(tmp_path, every_s=1e9)
    for number in range(700):  # nobody asks for the last hundred
        _entry(cache, _key(number), 7200)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for name in ("1", "2", "3", "trim", "trim")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all at once
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [answer[0] for answer in answers[:3]] == ["0", "0", "0"]
    assert all(int(answer[1]) > 0 for answer in answers[:3])
    removed = sum(int(answer[0]) for answer in answers[3:])
    assert removed >= 100
    assert len(list(tmp_path.iterdir())) == 700 - removed


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
