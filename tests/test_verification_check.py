"""`python -m verification check`: what it reads, what it prints, how it exits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.records import Precision, Target, VerdictStatus
from tests import factories, samples
from verification import admission, check, folder
from verification.__main__ import main
from verification.check import ProblemRefused, judge_once
from verification.folder import FolderError, problem_of, read_problem, read_solution, solution_of
from verification.machine import Machine
from verification.report import CORRECT, REFUSED, UNDECIDED, UNREADABLE, describe_verdict, exit_code

FILES = {"model_new.py": samples.MODEL_NEW, "kernels/scale_gelu.cpp": samples.KERNEL}


def write(root: Path, files: dict[str, str]) -> str:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return str(root)


@pytest.fixture
def problem(tmp_path: Path) -> str:
    (tmp_path / "problem.py").write_text(samples.CODE)
    return str(tmp_path / "problem.py")


def test_a_problem_is_its_text_and_its_docstrings_precision(problem: str) -> None:
    read = read_problem(problem, Target.CPU, Precision.TF32)
    assert read.code == samples.CODE
    assert read.precision is Precision.FP32  # the docstring's, not the flag's
    assert read.problem_id == samples.problem().problem_id


def test_a_precision_that_was_given_is_part_of_the_problem() -> None:
    """The same text in another precision must not find the other's verdicts in the store."""
    text = samples.CODE.replace("precision: fp32", "")
    one, two = (problem_of(text, Target.CPU, p) for p in (Precision.FP32, Precision.TF32))
    assert (one.precision, two.precision) == (Precision.FP32, Precision.TF32)
    assert one.problem_id != two.problem_id
    assert one.code.startswith(text)  # so that line numbers stay


@pytest.mark.parametrize(
    ("files", "form"),
    [
        (FILES, "cabi"),
        ({"model_new.py": "x", "kernels/a.cu": "", "kernels/a_binding.cpp": ""}, "paper"),
        ({"model_new.py": "x"}, "load_inline"),
    ],
)
def test_the_form_is_found_from_the_files(tmp_path: Path, files: dict[str, str], form: str) -> None:
    found = read_solution(write(tmp_path, files)).solution
    assert found.form == form
    assert {file.path: file.text for file in found.files} == files
    wrong = "cabi" if form == "load_inline" else "load_inline"
    with pytest.raises(FolderError, match=f"for form {wrong}"):
        read_solution(str(tmp_path), wrong)


def test_one_file_is_a_whole_solution(tmp_path: Path) -> None:
    write(tmp_path, {"anything.py": "class ModelNew: ..."})
    solution = read_solution(str(tmp_path / "anything.py")).solution
    assert solution.text("model_new.py") == "class ModelNew: ..."


def test_what_is_no_source_is_left_aside_and_named(tmp_path: Path) -> None:
    more = {"README.md": "x", "model.py": "x", "kernels/a.so": "x", ".git/config": "x"}
    found = read_solution(write(tmp_path, FILES | more))
    assert found.ignored == (".git", "README.md", "kernels/a.so", "model.py")
    assert len(found.solution.files) == 2


PATHS = ("../x.cu", "/etc/x.cu", "kernels/../../x.cu", "kernels/a b.cu", "kernels/.x.cu", "x.cu",
         "kernels/$x.cu", "kernels/x\n.cu", "kernels//x.cu", "kernels/x.so", "kernels/ü.cu",
         "kernels/" + "x" * 300 + ".cu")  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_cannot_leave_or_surprise(path: str) -> None:
    with pytest.raises(FolderError, match="and kernels/NAME"):
        solution_of({"model_new.py": "", path: ""})


def test_a_name_is_a_file_or_a_folder() -> None:
    with pytest.raises(FolderError, match="a file or a folder of one name"):
        solution_of({"model_new.py": "", "kernels/a.cu": "", "kernels/a.cu/b.cu": ""})


def test_sizes_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FILES)
    for name, value, error in (
        ("MAX_FILE_BYTES", 100, "at most 100 bytes"),
        ("MAX_FILES", 1, "at most 1 files"),
        ("MAX_TOTAL_BYTES", 500, "at most 500 bytes in all"),
        ("MAX_NAMES", 2, "at most 2 names"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(folder, name, value)
            with pytest.raises(FolderError, match=error):
                read_solution(str(tmp_path))
    assert read_solution(str(tmp_path)).solution.files


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.cu").write_text("secret")
    root = tmp_path / "solution"
    write(root, FILES)
    (root / "kernels/link.cu").symlink_to(tmp_path / "secret.cu")
    with pytest.raises(FolderError, match="expected a plain file, got a symbolic link"):
        read_solution(str(root))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"x = '\xff'", "expected UTF-8, got byte 0xff at 5"),
        (b"x\0", "expected text, got a NUL at 1"),
        (b" \n", "expected a module with Model, get_inputs and get_init_inputs, got no text"),
        (b'"""precision: fp8"""', "expected precision: bf16, tf32 or fp32, got 'fp8'"),
    ],
)
def test_text_must_be_text(tmp_path: Path, data: bytes, error: str) -> None:
    (tmp_path / "p.py").write_bytes(data)
    with pytest.raises(FolderError, match=error):
        read_problem(str(tmp_path / "p.py"), Target.CPU, Precision.FP32)


def test_an_error_is_one_line_whatever_a_name_holds(tmp_path: Path) -> None:
    root = tmp_path / "solution"
    write(root, FILES)
    os.mkfifo(root / "kernels/\x1b[2J\n\udcff.cu")
    with pytest.raises(FolderError) as raised:
        read_solution(str(root))
    assert str(raised.value).isprintable()


def test_exit_codes_follow_the_verdict() -> None:
    codes = {
        VerdictStatus.CORRECT: CORRECT,
        VerdictStatus.INCORRECT: REFUSED,
        VerdictStatus.BUILD_ERROR: REFUSED,
        VerdictStatus.UNMEASURED: UNDECIDED,
        VerdictStatus.REFERENCE_ERROR: UNDECIDED,
    }
    for status, code in codes.items():
        assert exit_code(factories.verdict(status)) == code


def test_a_report_says_everything_and_commands_no_terminal(tmp_path: Path) -> None:
    found = read_solution(write(tmp_path, FILES | {"notes.txt": "x"}))
    isolation = factories.verdict().isolation
    assert isolation is not None
    text = describe_verdict(factories.verdict(), samples.problem(), found)
    for part in (
        "correct",
        "4.000 (3.920 to 4.080)",
        "50%",
        "isolation  full",
        "notes.txt",
        "1e-07",
    ):
        assert part in text, (part, text)
    wrong = factories.verdict(VerdictStatus.BUILD_ERROR, reason="\x1b[2Jline\n" * 100)
    text = describe_verdict(wrong, samples.problem(), found)
    assert "refused: build_error" in text
    assert "\x1b" not in text
    assert "60 more lines" in text


@pytest.mark.parametrize("arguments", [[], ["check"], ["check", "a", "b", "--target=tpu"]])
def test_usage_errors_are_argparses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == UNREADABLE


def test_unreadable_input_is_one_line_and_2(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", problem, str(tmp_path / "none")]) == UNREADABLE
    assert main(["check", str(tmp_path), problem]) == UNREADABLE
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 2
    assert "expected" in err


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """A folder with a wrong solution: its verdict needs no quiet machine."""
    kernel = samples.KERNEL.replace("0.70710678f", "0.7f")
    return write(tmp_path / "wrong", FILES | {"kernels/scale_gelu.cpp": kernel})


def test_a_check_prints_and_writes_the_verdict(
    cpu_machine: Machine,
    tmp_path: Path,
    wrong: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "_machine", lambda *_: contextlib.nullcontext(cpu_machine))
    monkeypatch.setitem(admission.EAGER_BAND_MS, Target.CPU, (50.0, 100.0))
    (tmp_path / "problem.py").write_text(samples.CODE.replace("4099, 1024", "67, 257"))
    written = tmp_path / "out.json"
    arguments = ["check", str(tmp_path / "problem.py"), wrong, f"--json={written}"]
    assert main(arguments) == REFUSED
    said = capsys.readouterr().out
    assert said.startswith("the problem itself is doubtful: too_fast")
    assert "refused: incorrect" in said
    found = json.loads(written.read_text())
    assert (found["exit_code"], found["verdict"]["status"]) == (REFUSED, "incorrect")
    assert found["admission"]["roofline_ms"] is not None


def test_a_refused_problem_is_told_and_3(
    cpu_machine: Machine,
    tmp_path: Path,
    wrong: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "_machine", lambda *_: contextlib.nullcontext(cpu_machine))
    (tmp_path / "problem.py").write_text("import os\nos._exit(0)\n")
    assert main(["check", str(tmp_path / "problem.py"), wrong]) == UNDECIDED
    assert "the problem is refused: crash" in capsys.readouterr().out


def test_our_own_failures_are_one_line_and_3(
    problem: str, wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space\nleft")

    monkeypatch.setattr(check, "_machine", fail)
    assert main(["check", problem, wrong]) == UNDECIDED
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "OSError: no space left" in said


@pytest.mark.slow  # everything from nothing: warm parent, rates, compiled baselines
def test_the_command_by_itself(problem: str, wrong: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "verification", "check", f"--store={tmp_path / 'store'}"]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([*line, problem, wrong], capture_output=True, text=True, cwd=root)
    assert done.returncode == REFUSED, done.stdout + done.stderr
    assert "refused: incorrect" in done.stdout
    assert "Traceback" not in done.stderr


def changed(old: str, new: str, size: str = "67, 256") -> str:
    code = samples.CODE.replace("4099, 1024", size)
    assert old in code
    return code.replace(old, new)


REFERENCES = {
    "leaves at import": ("import torch\n", "import os; os._exit(0)\n", "crash"),
    "cannot be parsed": ("import torch\n", "import torch (\n", "eager_error"),
    "has a trivial answer": ("F.gelu(x * self.weight)", "x + 1e-9 * x * self.weight",
                             "trivial_answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_a_problem_that_says_nothing_is_refused(cpu_machine: Machine, name: str) -> None:
    old, new, reason = REFERENCES[name]
    hostile = problem_of(changed(old, new), Target.CPU, Precision.FP32)
    with pytest.raises(ProblemRefused, match=reason):
        judge_once(hostile, samples.solution(), cpu_machine, "reward", False)


def test_a_problem_without_a_model_is_no_fault_of_the_solution(cpu_machine: Machine) -> None:
    other = problem_of(changed("class Model(", "class Other("), Target.CPU, Precision.FP32)
    judged = judge_once(other, samples.solution(), cpu_machine, "reward", False)
    assert judged.admission.reason == "eager_error"
    assert judged.verdict.status is VerdictStatus.REFERENCE_ERROR


def test_a_hanging_problem_is_refused(cpu_machine: Machine) -> None:
    hanging = problem_of(
        changed("import torch\n", "while True: pass\n"), Target.CPU, Precision.FP32
    )
    kept, cpu_machine.timeout_s = cpu_machine.timeout_s, 1.0
    try:
        with pytest.raises(ProblemRefused, match="timeout"):
            judge_once(hanging, samples.solution(), cpu_machine, "reward", False)
    finally:
        cpu_machine.timeout_s = kept


def test_a_doubtful_problem_is_judged_all_the_same(
    cpu_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a tiny one, outside the band that problems of the data set must lie in."""
    # It takes 0.03 ms, but a busy machine makes a millisecond of it now and then.
    monkeypatch.setitem(admission.EAGER_BAND_MS, Target.CPU, (50.0, 100.0))
    tiny = problem_of(changed("67, 256", "67, 255"), Target.CPU, Precision.FP32)
    wrong = samples.solution(kernel=samples.KERNEL.replace("0.70710678f", "0.7f"))
    judged = judge_once(tiny, wrong, cpu_machine, "reward", False)
    assert judged.admission.reason == "too_fast"
    assert judged.admission.roofline_ms is not None
    assert judged.verdict.status is VerdictStatus.INCORRECT


def test_a_trivial_problem_is_judged_on_request(cpu_machine: Machine) -> None:
    old, new, _ = REFERENCES["has a trivial answer"]
    trivial = problem_of(changed(old, new), Target.CPU, Precision.FP32)
    lazy = samples.solution(samples.MODEL_NEW.replace("return out", "return x.clone()"))
    judged = judge_once(trivial, lazy, cpu_machine, "reward", True)
    assert judged.admission.reason == "trivial_answer"
    assert judged.verdict.checks  # it came to that


ROW_SUMS = '''"""precision: fp32"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass
class Sizes:
    rows: int = 500
    columns: int = 8192


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(Sizes().rows - 1, -1, -1))

    def forward(self, x):
        return x.sum(1)[self.order]


def get_inputs():
    return [torch.randn(Sizes().rows, Sizes().columns)]


def get_init_inputs():
    return []
'''
PLAIN_SUMS = {
    "model_new.py": """
import torch
import torch.nn as nn
import cabi

lib = cabi.load()


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(499, -1, -1))

    def forward(self, x):
        out = x.new_empty(x.shape[0])
        lib.sums(x, out, x.shape[0], x.shape[1])
        return out
""",
    "kernels/sums.cpp": """
#include <cstdint>
extern "C" int sums(const float* x, float* out, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r) {
        float sum = 0;
        for (int64_t c = 0; c < columns; ++c) sum += x[r * columns + c];
        out[rows - 1 - r] = sum;
    }
    return 0;
}
""",
}


def test_plain_sums_in_an_order_that_is_known_are_right(cpu_machine: Machine) -> None:
    """Signed numbers one after the other, and an index that is no parameter written out."""
    problem = problem_of(ROW_SUMS, Target.CPU, Precision.FP32)
    judged = judge_once(problem, solution_of(PLAIN_SUMS), cpu_machine, "reward", True)
    assert judged.verdict.status in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED), (
        judged.verdict.reason
    )
