"""The comparison of verifiers: its cases, how it runs each verifier, and its arithmetic.

Ours is run at tiny size. The verifiers of others need a GPU, so theirs are small programs of our
own in the same places, with the same words.
"""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import verifiers
from benchmarks.peer_verifiers import (
    PROFILED,
    VERIFIED,
    CudaAgent,
    Gpu,
    KernelBench,
    PeerError,
    run_peer,
    strictly,
)
from benchmarks.verifier_cases import CASES, EXPLOIT, HONEST, KINDS, SUBJECTS, SUCCESS, WRONG, Case
from benchmarks.verifier_ours import Plan, TimedMachine, run_alone
from benchmarks.verifier_table import Decision, figures, run_row, spread, table
from kernel_agent.printers import as_load_inline, as_paper
from schemas.records import Target
from tests import factories
from verification.building.build import build
from verification.building.toolchain import toolchain
from verification.machine import Machine

H200 = Gpu(name="NVIDIA H200", driver="1", capability="9.0")
SHORT = SUBJECTS["short"]
NAMED = {case.name: case for case in CASES}


def decision(case: str = "plain", **changes: Any) -> Decision:
    fields: dict[str, Any] = {"kind": NAMED[case].kind, "accepted": True, "seconds": 1.0}
    return Decision(case=case, **fields | changes)


def test_four_of_each_kind() -> None:
    assert [sum(case.kind == kind for case in CASES) for kind in KINDS] == [4, 4, 4]
    assert len(NAMED) == len(CASES)
    assert [case.acceptable for case in CASES[:5]] == [True, False, False, False, False]


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
@pytest.mark.parametrize("case", CASES, ids=list(NAMED))
def test_every_case_has_the_forms_of_the_others(case: Case, subject: Any) -> None:
    solution = case.solution(subject, Target.CUDA)
    inline, paper = as_load_inline(solution, Target.CUDA), as_paper(solution, Target.CUDA)
    ast.parse(inline.text("model_new.py"))
    ast.parse(paper.text("model_new.py"))
    assert "kernels/kernel_binding.cpp" in {source.path for source in paper.files}
    text = solution.text("kernels/kernel.cu")
    assert "GELU" not in text and "FINISH" not in text


def test_a_mark_makes_another_solution_of_the_same_code() -> None:
    one, two = (CASES[0].solution(SHORT, Target.CPU, mark) for mark in ("a 1", "a 2"))
    assert one.solution_id != two.solution_id
    for source in one.files:
        assert source.text.splitlines()[0] != two.text(source.path).splitlines()[0]
        assert source.text.splitlines()[1:] == two.text(source.path).splitlines()[1:]


def test_the_forged_words_are_those_that_are_looked_for() -> None:
    words = SUCCESS.replace("\\n", "\n")
    assert VERIFIED in words and PROFILED.search(words)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
def test_all_kernels_compile_for_a_gpu(subject: Any, tmp_path: Path) -> None:
    tools = toolchain(Target.CUDA, "90")
    for case in CASES:
        solution = case.solution(subject, Target.CUDA)
        assert build(solution, Target.CUDA, tools, tmp_path, 300, 16).libraries, case.name


def test_figures() -> None:
    made = [
        decision(seconds=2.0, build_s=1.0, status="unmeasured"),
        decision("two kernels", accepted=False, seconds=4.0, build_s=1.5, reason="too slow"),
        decision("wrong constant", accepted=False, seconds=1.25, build_s=1.0),
        decision("forged result", accepted=True, seconds=9.0, timed=False),
        decision("torch behind a decoy", accepted=None, reason="no room"),
    ]
    found = figures(made)
    assert found["right"] == {HONEST: 1, WRONG: 1, EXPLOIT: 0}
    assert found["asked"] == {HONEST: 2, WRONG: 1, EXPLOIT: 2}
    assert (found["errors"], found["unmeasured"]) == (3, 1)
    assert found["wrongly"] == [
        "forged result: accepted",
        "torch behind a decoy: no decision: no room",
        "two kernels: refused: too slow",
    ]
    assert found["accepted_s"]["median"] == 2.0
    assert found["refused_after_build_s"] == {"median": 1.375, "p90": 2.5, "max": 2.5, "count": 2}


def test_spread() -> None:
    assert spread([]) is None
    assert spread(range(1, 11)) == {"median": 5.5, "p90": 9, "max": 10, "count": 10}


def test_rates_are_over_those_of_the_scripts() -> None:
    rows = [run_row("ours", [decision()], 55.0), run_row("cuda_agent", [decision()], 1.1)]
    lines = table(rows).splitlines()
    assert lines[1].split()[-2:] == ["55.0", "50"]
    assert table(rows[:1]).splitlines()[1].split()[-2:] == ["55.0", "-"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--target=cpu"], "expected --cuda_agent_dir=DIR and --kernelbench_dir=DIR"),
        (["--target=cpu", "--only=kernelbench"], "expected --kernelbench_dir=DIR"),
        (
            ["--target=cpu", "--only=cuda_agent", "--cuda_agent_dir=x"],
            "cuda_agent need --target=cuda",
        ),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verifiers.main(flags) == 2
    assert why in capsys.readouterr().err


def test_copies_that_are_none_are_said(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"agent_workdir/utils/verification\.py, got"):
        CudaAgent(str(tmp_path), SHORT, H200)
    with pytest.raises(PeerError, match=r"src/kernelbench/eval\.py, got"):
        KernelBench(str(tmp_path), SHORT, H200)


FAKE_VERIFICATION = """
from pathlib import Path

assert "class Model" in Path("model.py").read_text()
assert [p.name for p in sorted(Path("kernels").iterdir())] == ["kernel.cu", "kernel_binding.cpp"]
name = Path("model_new.py").read_text().splitlines()[0]
print("[PASS] verify success" if "forged" not in name else "failed, politely")
assert "constant" not in name, "Tensor-likes are not close!"
"""


@pytest.fixture
def fake_scripts(tmp_path: Path) -> str:
    utils = tmp_path / "CUDA-Agent" / "agent_workdir" / "utils"
    utils.mkdir(parents=True)
    (utils / "__init__.py").touch()
    (utils / "compile.sh").write_text('[ "$TORCH_CUDA_ARCH_LIST" = 9.0 ]\n')
    (utils / "verification.py").write_text(FAKE_VERIFICATION)
    (utils / "profiling.py").write_text(
        "name = open('model_new.py').readline()\n"
        "print('CUDA Extension: 132.5us' if 'decoy' not in name else 'no time')\n"
    )
    example = utils.parent / "kernels"
    example.mkdir()
    (example / "axpby.cu").touch()
    return str(tmp_path / "CUDA-Agent")


def test_the_scripts_are_run_one_after_the_other(fake_scripts: str, tmp_path: Path) -> None:
    peer = CudaAgent(fake_scripts, SHORT, H200)
    names = ("plain", "torch behind a decoy", "forged result", "wrong constant")
    row = run_peer("cuda_agent", peer.decide, [NAMED[n] for n in names], 1, 3, tmp_path / "runs")
    made = [Decision(**d) for d in row["decisions"]]
    assert [d.accepted for d in made] == [True, False, False, False]
    assert [d.timed for d in made] == [True, False, False, False]
    assert made[0].claimed_ms == 0.1325
    assert set(made[0].more) == {"compile_s", "verification_s", "profiling_s"}
    assert [d.status for d in made[1:]] == [
        "refused by profiling", "refused by verification", "refused by verification",
    ]  # fmt: skip
    assert "Tensor-likes are not close" in made[3].reason
    assert row["verdicts_per_minute"] == pytest.approx(60 / made[0].seconds, abs=0.01)


FAKE_EVALUATOR = """
import os
from types import SimpleNamespace


def eval_kernel_against_ref(original_model_src, custom_model_src, device, **named):
    assert named["num_correct_trials"] == 5 and named["num_perf_trials"] == 100
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "Hopper" and str(device) == "cuda:0"
    name = custom_model_src.splitlines()[0]
    if "forged" in name:
        os._exit(0)
    metadata = {"excessive_speedup": True} if "five calls" in name else {}
    wrong = "constant" in name
    if wrong:
        metadata["correctness_issue"] = "Output mismatch"
    return SimpleNamespace(
        compiled=True, correctness=not wrong, runtime=0.13, ref_runtime=0.4, metadata=metadata
    )
"""


@pytest.fixture
def fake_evaluator(tmp_path: Path) -> str:
    package = tmp_path / "KernelBench" / "src" / "kernelbench"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "eval.py").write_text(FAKE_EVALUATOR)
    (package / "utils.py").write_text(
        "import os\n\n\ndef set_gpu_arch(names):\n"
        "    os.environ['TORCH_CUDA_ARCH_LIST'] = ';'.join(names)\n"
    )
    (package / "kernel_static_checker.py").write_text(
        "def validate_kernel_static(text, backend, precision):\n"
        "    found = ['torch does it'] if '.erf()' in text else []\n"
        "    return not found, found, []\n"
    )
    return str(tmp_path / "KernelBench")


def test_the_evaluator_is_run_in_a_process_of_its_own(fake_evaluator: str, tmp_path: Path) -> None:
    peer = KernelBench(fake_evaluator, SHORT, H200)
    peer.check_imports()
    names = ("plain", "honest for five calls", "torch behind a decoy", "forged result",
             "wrong constant")  # fmt: skip
    row = run_peer("kernelbench", peer.decide, [NAMED[n] for n in names], 1, 2, tmp_path / "runs")
    made = [Decision(**d) for d in row["decisions"]]
    assert [d.accepted for d in made] == [True, True, True, False, False]
    assert made[0].claimed_ms == 0.13
    assert made[3].reason.startswith("exit code 0")
    assert made[4].reason == "correctness_issue: Output mismatch"
    strict = strictly(made)
    assert [d.accepted for d in strict] == [True, False, False, False, False]
    assert [d.reason for d in strict[1:3]] == ["excessive speedup", "torch does it"]


def test_a_package_that_does_not_import_is_said(fake_evaluator: str) -> None:
    file = Path(fake_evaluator, "src", "kernelbench", "eval.py")
    file.write_text("import a_module_nobody_has\n")
    with pytest.raises(PeerError, match=r"a_module_nobody_has.*install what it needs"):
        KernelBench(fake_evaluator, SHORT, H200).check_imports()


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_ours_decides_one_of_each_kind(cpu_machine: Machine, tmp_path: Path) -> None:
    settings = factories.machine_settings(tmp_path, zygote=cpu_machine.zygote.address)
    names = ("plain", "forged result", "rounded to bf16 inside")
    plan = Plan(
        settings=settings, subject="short", names=names, alone_s=0.0, ramp_s=0.0, seconds=0.0
    )
    machine = TimedMachine(settings)
    try:
        row = run_alone(plan, machine)
    finally:
        machine.close()
    made = {d["case"]: d for d in row["decisions"]}
    assert {name: d["accepted"] for name, d in made.items()} == {
        "plain": True, "forged result": False, "rounded to bf16 inside": False,
    }  # fmt: skip
    assert row["figures"]["errors"] == 0
    assert row["verdicts_per_minute"] == pytest.approx(3 / row["wall_s"] * 60, rel=0.01)
    for found in made.values():
        assert 0 < found["build_s"] < found["seconds"] <= found["finished_s"]
    assert "budget" in made["rounded to bf16 inside"]["reason"]


def test_no_decision_is_an_error_of_ours(tmp_path: Path) -> None:
    from benchmarks.verifier_ours import _decide

    def lost() -> Any:
        raise OSError("the parent has gone")

    machine = TimedMachine(factories.machine_settings(tmp_path))
    made = _decide(NAMED["forged result"], machine, 0.0, lost)
    assert (made.accepted, made.right) == (None, False)
    assert made.reason == "OSError: the parent has gone"
    assert not replace(made, kind=HONEST).right


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ours_is_right_about_all_alone_and_by_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "verifiers.json"
    flags = ["--target=cpu", "--only=ours", "--workers=2", "--seconds=20", "--ramp_s=1"]
    assert verifiers.main([*flags, "--alone_s=0", f"--json={file}"]) == 0
    record = json.loads(file.read_text())
    assert record["solutions"] == {case.name: case.kind for case in CASES}
    *alone, pool = record["rows"]
    assert [row["verifier"] for row in alone] == ["ours, one process", "ours, one, building ahead"]
    for row in alone:
        assert [d["case"] for d in row["decisions"]] == [case.name for case in CASES]
    assert [row["figures"]["wrongly"] for row in record["rows"]] == [[], [], []]
    counted = [d for d in pool["decisions"] if 1 <= d["finished_s"] < 21]
    assert pool["verdicts_per_minute"] == pytest.approx(len(counted) * 3, abs=0.01)
    assert pool["environment"]["device"] and pool["harness"]
