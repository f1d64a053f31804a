"""Each admission rule refuses the problem planted for it, and admits its honest twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from dedup.signature import signature
from schemas.codec import content_id
from schemas.records import Admission, AdmitReason, Precision, Problem, Target
from verification import admission
from verification.admission import admit
from verification.machine import Machine

FORM = '''"""planted"""
import time
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512))

    def forward(self, x, y):
        {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
'''
HONEST = "return F.gelu(x * self.weight + y)"
INPUTS = "torch.randn(64, 512), torch.randn(64, 512)"
LARGE = INPUTS.replace("64", "6000")


def screened(
    machine: Machine, forward: str, inputs: str = INPUTS, declared: str = "", form: str = FORM
) -> Admission:
    code = form.format(forward=forward, inputs=inputs)
    problem = Problem(
        problem_id=content_id(code),
        code=code,
        ops=("planted",),
        data_source="torch#1",
        families=("planted",),
        target=Target.CPU,
        precision=Precision.FP32,
        seed=0,
        index=0,
    )
    return admit(problem, machine, signature, declared.split() or ["mul", "add", "gelu"])


def test_the_honest_twin_is_admitted(cpu_machine: Machine) -> None:
    found = screened(cpu_machine, HONEST, LARGE)
    assert found.reason is None, found.detail
    assert found.operators == ("mul", "add", "gelu")
    assert found.min_bytes == 4 * (3 * 6000 * 512 + 512)
    assert found.flops == 0
    assert found.headroom is not None
    assert found.roofline_ms is not None


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("return F.mse_loss(x * self.weight, y)", None),  # one number
        ("return (x * self.weight + y).mean(0, keepdim=True)", None),  # one row
        ("return F.mse_loss(x * self.weight, y) * 1e-9 + 3", AdmitReason.TRIVIAL_ANSWER),
        ("return (x * self.weight + y).mean(0, keepdim=True) * 1e-9 + self.weight",
         AdmitReason.TRIVIAL_ANSWER),
        ("return (x * self.weight + y).mean().sum()", AdmitReason.INSENSITIVE_OPERATOR),
    ],
)  # fmt: skip
def test_one_number_or_row_is_no_trivial_answer(
    cpu_machine: Machine, forward: str, reason: AdmitReason | None
) -> None:
    """A number is its own mean. It is trivial where other inputs give the same."""
    found = screened(cpu_machine, forward, LARGE, "mul sub pow mean add sum")
    assert found.reason in (reason, AdmitReason.DECLARED_OPS if reason is None else reason)


PLANTED = {
    "it raises": ("raise ValueError('no')", AdmitReason.EAGER_ERROR),
    "torch.compile raises": (
        "import torch._inductor.config as c; c.cpp.cxx = ('no-such-compiler',); " + HONEST,
        AdmitReason.COMPILE_ERROR,
    ),
    "torch.compile disagrees": (
        "how = 'tanh' if torch.compiler.is_compiling() else 'none'; "
        "return F.gelu(x * self.weight + y, approximate=how)",
        AdmitReason.COMPILE_MISMATCH,
    ),
    "random": ("return F.gelu(x * self.weight + y) + torch.randn(64, 1)",
               AdmitReason.NOT_REPEATABLE),
    "float8": ("return (x * self.weight + y).to(torch.float8_e4m3fn)", AdmitReason.UNSUPPORTED),
    "changes its input": ("x.mul_(1.5); " + HONEST, AdmitReason.NOT_REPEATABLE),
    "NaN": ("return torch.log(x * self.weight + y)", AdmitReason.NOT_FINITE),
    "constant": ("return F.gelu(x * self.weight + y) * 0 + 3", AdmitReason.CONSTANT_OUTPUT),
    "nearly its input": ("return x + 1e-9 * self.weight * y", AdmitReason.TRIVIAL_ANSWER),
    "an input that does nothing": ("return F.gelu(x * self.weight) + y * 0",
                                   AdmitReason.INSENSITIVE_INPUT),
    "a parameter that vanishes": ("return F.gelu(x * y) + self.weight * 1e-12",
                                  AdmitReason.INSENSITIVE_PARAMETER),
    "an operator that does nothing": ("return F.relu(F.relu(x * self.weight + y)) + x * y",
                                      AdmitReason.INSENSITIVE_OPERATOR),
    "a call on a list that does nothing": ("return F.gelu(torch.cat([x * self.weight + y]))",
                                           AdmitReason.INSENSITIVE_OPERATOR),
    "a call with two results that does nothing": (
        "z = torch.sort(x * self.weight + y, dim=1).values; "
        "return F.gelu(torch.cummax(z, dim=1).values)",
        AdmitReason.INSENSITIVE_OPERATOR,
    ),
    "other ops than declared": ("return F.relu(x * self.weight + y)", AdmitReason.DECLARED_OPS),
    "it exhausts memory": ("z = torch.ones(1 << 36); " + HONEST,
                           AdmitReason.OUT_OF_MEMORY),
    "it dies": ("import ctypes; ctypes.string_at(0); " + HONEST, AdmitReason.CRASH),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_fault_has_its_reason(cpu_machine: Machine, name: str) -> None:
    forward, reason = PLANTED[name]
    found = screened(cpu_machine, forward)
    assert found.reason is reason, f"{found.reason}: {found.detail}"
    assert found.detail
    assert found.eager_ms is None


TWINS = {  # the first two of planted faults; a split only moves data, so it need not do anything
    "a call on a list": ("return F.gelu(torch.cat([x * self.weight, y]))", "mul cat gelu"),
    "a call with two results": ("return F.gelu(torch.cummax(x * self.weight + y, dim=1).values)",
                                "mul add cummax gelu"),
    "a split": ("z, = torch.split(x * self.weight + y, 512, dim=1); return F.gelu(z)",
                "mul add split gelu"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_an_operator_that_matters_is_admitted(cpu_machine: Machine, name: str) -> None:
    forward, declared = TWINS[name]
    found = screened(cpu_machine, forward, LARGE, declared)
    assert found.reason is None, f"{found.reason}: {found.detail}"


def test_inputs_without_randomness(cpu_machine: Machine) -> None:
    found = screened(cpu_machine, HONEST, "torch.ones(64, 512), torch.randn(64, 512)")
    assert found.reason is AdmitReason.FIXED_INPUTS


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ("[torch.randn(64, 512)], torch.randn(64, 512)", "a dense tensor or a number"),
        ("torch.randn(64, 512).to_sparse(), torch.randn(64, 512)", "a dense tensor or a number"),
        ("torch.randn(64, 512).to(torch.float8_e4m3fn), torch.randn(64, 512)", "float8_e4m3fn"),
        ("torch.randn(64, 512), torch.randn(64, Model().weight.numel())", "the model's class"),
    ],
)
def test_inputs_that_nobody_could_draw_anew(cpu_machine: Machine, inputs: str, part: str) -> None:
    """A verdict would blame the solution for them, so the problem is refused."""
    forward = "x = x[0] if isinstance(x, list) else x; return F.gelu(x.float() * self.weight + y)"
    found = screened(cpu_machine, forward, inputs)
    assert found.reason is AdmitReason.UNSUPPORTED, f"{found.reason}: {found.detail}"
    assert part in found.detail
    assert admission.is_meaningless(found)


def test_what_cannot_be_computed_in_fp64(cpu_machine: Machine) -> None:
    forward = "return F.gelu((x * self.weight) @ y.float().t())"
    found = screened(cpu_machine, forward)
    assert found.reason is AdmitReason.REFERENCE_INACCURATE
    assert "fp64 cannot be computed" in found.detail


def test_tensors_made_on_the_way_are_in_fp64_too(cpu_machine: Machine) -> None:
    forward = "return F.gelu((x * self.weight + y) @ torch.tril(torch.ones(512, 512)))"
    found = screened(cpu_machine, forward, INPUTS.replace("64", "600"), "mul add matmul gelu")
    assert found.reason in (None, AdmitReason.DECLARED_OPS), f"{found.reason}: {found.detail}"


def test_a_number_among_the_inputs_need_not_change(cpu_machine: Machine) -> None:
    found = screened(
        cpu_machine, "return F.gelu(x * self.weight + y)", LARGE.split(", torch")[0] + ", 2.5"
    )
    assert found.reason is None, f"{found.reason}: {found.detail}"


def test_a_problem_without_inputs(cpu_machine: Machine) -> None:
    """Every call has the same answer then."""
    form = FORM.replace("forward(self, x, y)", "forward(self)")
    found = screened(cpu_machine, "return F.gelu(self.weight * 2)", "", "mul gelu", form)
    assert found.reason is AdmitReason.FIXED_INPUTS, found.detail


def test_a_tiny_problem_is_too_fast(cpu_machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes 0.03 ms, but a busy machine makes a millisecond of it now and then.
    monkeypatch.setitem(admission.EAGER_BAND_MS, Target.CPU, (50.0, 100.0))
    found = screened(cpu_machine, HONEST, "torch.randn(8, 512), torch.randn(8, 512)")
    assert found.reason is AdmitReason.TOO_FAST
    assert "expected 50 to 100 ms" in found.detail


def test_a_hanging_problem_costs_its_timeout(cpu_machine: Machine) -> None:
    kept = cpu_machine.timeout_s
    cpu_machine.timeout_s = 1.0
    try:
        found = screened(cpu_machine, "time.sleep(600); " + HONEST)
    finally:
        cpu_machine.timeout_s = kept
    assert found.reason is AdmitReason.TIMEOUT


def test_a_finished_screening_is_not_repeated(cpu_machine: Machine) -> None:
    first = screened(cpu_machine, HONEST)
    count = cpu_machine.store.count("admissions")
    assert screened(cpu_machine, HONEST) == first
    assert cpu_machine.store.count("admissions") == count


def test_memory_that_a_neighbour_had_is_asked_for_again(
    cpu_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(name: str) -> str:
        marker = str(tmp_path / name)
        return (
            f"import os\n        if not os.path.exists({marker!r}):\n"
            f"            os.mkdir({marker!r})\n"
            f"            raise torch.OutOfMemoryError('full')\n        {HONEST}"
        )

    found = screened(cpu_machine, tried("first"), LARGE)
    assert found.reason is AdmitReason.OUT_OF_MEMORY
    monkeypatch.setattr(cpu_machine, "room_pauses_s", (0.0,))
    found = screened(cpu_machine, tried("second"), LARGE)
    assert found.reason is None, found.detail
