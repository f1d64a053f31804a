"""Parameters under names of the solution's own: by what both constructors draw from one seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dedup.signature import signature
from runtime.sandbox import Worker
from schemas.codec import content_id
from schemas.records import Admission, Problem, Solution, Verdict, VerdictStatus
from tests import samples
from verification import timing
from verification.admission import admit
from verification.bench import PARAMETERS_RENAMED
from verification.guards import Guard
from verification.judge import Judge
from verification.machine import Machine
from verification.policy import Policy
from verification.workers.names import NoCounterpart, OtherNames, load, match_names, renamed

DRAWN, ALSO_DRAWN = torch.tensor([0.5, -2.0]), torch.tensor([-2.0, 0.5])


def P(values: torch.Tensor) -> nn.Parameter:
    """A parameter; plain tensors stand for buffers."""
    return nn.Parameter(values.clone())


def empty() -> torch.Tensor:
    return torch.empty(0)


def ones() -> torch.Tensor:
    return torch.ones(2)


def test_equal_values_are_the_same_tensor_whatever_the_order() -> None:
    wanted = {"linear.weight": P(DRAWN), "shift": P(ALSO_DRAWN)}
    own = {"shift": P(DRAWN), "b": P(ALSO_DRAWN)}
    assert match_names(own, wanted) == {"shift": "linear.weight", "b": "shift"}


def test_equal_constants_go_in_order_and_by_kind() -> None:
    wanted = {"n.weight": P(ones()), "n.var": ones(), "m.weight": P(ones()), "m.var": ones()}
    by_kind = {"v": ones(), "w": ones(), "a": P(ones()), "b": P(ones())}
    expected = {"v": "n.var", "w": "m.var", "a": "n.weight", "b": "m.weight"}
    assert match_names(by_kind, wanted) == expected
    # All of them are buffers here, which are more than the problem has.
    in_order = {name: ones() for name in ("a", "v", "b", "w")}
    expected = {"a": "n.weight", "v": "n.var", "b": "m.weight", "w": "m.var"}
    assert match_names(in_order, wanted) == expected


def test_equal_constants_go_by_name_before_that() -> None:
    wanted = {"n.weight": P(ones()), "m.weight": P(ones()), "gain": P(ones())}
    own = {"gain": P(ones()), "m_weight": P(ones()), "mine": P(ones())}
    assert match_names(own, wanted) == {
        "gain": "gain", "m_weight": "m.weight", "mine": "n.weight",
    }  # fmt: skip


def test_what_a_solution_holds_twice_has_one_counterpart() -> None:
    norm, drawn = P(ones()), P(DRAWN)
    wanted = {"n.weight": P(ones()), "l.weight": P(DRAWN)}
    own = {"g": norm, "n.weight": norm, "w": drawn, "copy": drawn.detach().clone()}
    assert match_names(own, wanted) == {
        "g": "n.weight", "n.weight": "n.weight", "w": "l.weight", "copy": "l.weight",
    }  # fmt: skip
    # A constant of its own may be anything, and stays.
    assert "mine" not in match_names({**own, "mine": ones()}, wanted)


def test_what_the_solution_does_not_have_is_no_matter() -> None:
    wanted = {"n.weight": P(DRAWN), "n.num_batches_tracked": torch.tensor(0)}
    assert match_names({"w": P(DRAWN)}, wanted) == {"w": "n.weight"}
    assert match_names({}, wanted) == {}


@pytest.mark.parametrize(
    "value",
    [
        ALSO_DRAWN,
        DRAWN.double(),
        DRAWN.reshape(1, 2),
        torch.tensor([0.5, -2.0 + 2.0**-22]),
        torch.tensor([0.5, float("nan")]),
    ],
)
def test_no_counterpart_is_said_with_names(value: torch.Tensor) -> None:
    wanted = {"linear.weight": P(DRAWN), "more": P(DRAWN + 7), "scale": P(ones())}
    with pytest.raises(NoCounterpart) as error:
        match_names({"mine": P(value), "other": P(ones())}, wanted)
    kind = str(value.dtype).removeprefix("torch.")
    assert f"got mine ({kind} {list(value.shape)})," in str(error.value)
    assert "there is left linear.weight (float32 [2]), more (float32 [2]);" in str(error.value)
    assert "name them as Model does, or construct them" in str(error.value)


def test_every_bit_counts() -> None:
    nan, zeros = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    assert match_names({"a": nan.clone()}, {"b": nan}) == {"a": "b"}
    assert match_names({"a": -zeros, "c": zeros}, {"b": zeros, "d": -zeros}) == {"a": "d", "c": "b"}
    for odd in (
        torch.tensor([True, False]),
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.ones(2).bfloat16(),
    ):
        assert match_names({"a": odd.clone()}, {"b": odd}) == {"a": "b"}


def test_the_last_of_a_shape_are_the_same() -> None:
    """One drew from a bound of its own; with two of a shape nothing tells which is which."""
    wanted = {"linear.weight": P(DRAWN), "linear.bias": P(torch.tensor([3.0, 4.0, 5.0]))}
    own = {"weight": P(DRAWN * 1.01), "bias": P(torch.tensor([3.0, 4.0, 5.0])), "none": P(empty())}
    assert match_names(own, wanted) == {"weight": "linear.weight", "bias": "linear.bias"}
    with pytest.raises(NoCounterpart):
        match_names({**own, "also": P(DRAWN * 1.02)}, wanted)


def test_names_that_end_alike_go_first() -> None:
    """Ones and zeros of a norm, in another order than the problem's."""
    wanted = {"bn.weight": P(ones()), "bn.bias": P(torch.zeros(2)),
              "bn.running_mean": torch.zeros(2), "bn.running_var": ones()}  # fmt: skip
    own = {"mean": torch.zeros(2), "bias": torch.zeros(2), "var": ones(), "weight": ones()}
    assert match_names(own, wanted) == {
        "bias": "bn.bias", "weight": "bn.weight", "mean": "bn.running_mean",
        "var": "bn.running_var",
    }  # fmt: skip


def test_what_has_no_counterpart_stays_as_constructed() -> None:
    model = nn.Linear(2, 2)
    kept = model.bias.detach().clone()
    load(model, {"w": torch.ones(2, 2)}, {"weight": "w"})
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert torch.equal(model.bias, kept)


def test_a_long_list_is_cut_short() -> None:
    with pytest.raises(NoCounterpart, match=r"p4 \(float32 \[2\]\), 3 more, .* is left nothing;"):
        match_names({f"p{index}": P(DRAWN + index) for index in range(8)}, {})


def test_only_names_that_do_not_fit_are_other_names() -> None:
    model = nn.Linear(2, 1, bias=False)
    load(model, {"weight": torch.ones(1, 2)})
    assert torch.equal(model.weight, torch.ones(1, 2))
    with pytest.raises(OtherNames, match="Missing key"):
        load(model, {"linear.weight": torch.ones(1, 2)})
    with pytest.raises(RuntimeError, match="size mismatch") as error:
        load(model, {"weight": torch.ones(1, 3)})
    assert not isinstance(error.value, OtherNames)


def test_a_model_that_takes_other_names_by_itself_is_let() -> None:
    class Own(nn.Linear):
        def load_state_dict(self, state_dict: Any, *more: Any, **named: Any) -> Any:
            mine = {"weight": state_dict["linear.weight"]}
            return super().load_state_dict(mine, *more, **named)

    model = Own(2, 1, bias=False)
    load(model, {"linear.weight": torch.ones(1, 2)})
    assert torch.equal(model.weight, torch.ones(1, 2))


def test_new_values_go_by_the_map() -> None:
    weights = {"scale": torch.zeros(2), "shift": torch.ones(2)}
    assert renamed(weights, None) is weights
    swapped = renamed(weights, {"shift": "scale", "b": "shift"})
    assert {name: float(value[0]) for name, value in swapped.items()} == {"shift": 0.0, "b": 1.0}


def test_a_state_with_parameters_told_from_buffers_passes_through_a_file(tmp_path: Path) -> None:
    """As the reference writes it: the file holds tensors, and loading it runs nothing."""
    made = nn.BatchNorm1d(2)
    torch.save(made.state_dict(keep_vars=True), tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    own = {"var": ones(), "scale": P(ones()), "shift": P(torch.zeros(2)), "mean": torch.zeros(2)}
    assert match_names(own, found) == {
        "var": "running_var", "scale": "weight", "shift": "bias", "mean": "running_mean",
    }  # fmt: skip


# What follows goes through the judge.

CODE = (
    samples.CODE.replace("features: int)", "features: int, factor: float)")
    .replace("self.weight = nn.Parameter(torch.randn(features))",
             "self.scale = nn.Parameter(torch.randn(features))\n"
             "        self.shift = nn.Parameter(torch.randn(features))\n"
             "        self.register_buffer('offset', torch.zeros(features))\n"
             "        self.factor = factor")
    .replace("F.gelu(x * self.weight)",
             "F.gelu(x * self.scale + self.shift) * self.factor + self.offset")
    .replace("return [features]", "return [features, 1.5]")
)  # fmt: skip
"""Two parameters of one shape, and a constant."""
MINE = """
        self.{first} = nn.Parameter(torch.randn(features))
        self.{second} = nn.Parameter(torch.randn(features))
        self.register_buffer("{third}", torch.zeros(features))
        self.factor = factor
"""
CALL = (
    "lib.scale_gelu(x, self.{first}, self.{second}, self.{third}, out, x.shape[0], x.shape[1], "
    "self.factor)"
)
RENAMED = {"first": "shift", "second": "b", "third": "c"}
"""`shift` is the problem's `scale` here: whoever goes by names gives it the wrong values."""
USUAL = {"first": "scale", "second": "shift", "third": "offset"}


def solution(names: dict[str, str], **changes: str) -> Solution:
    """An honest solution with these names; keywords replace texts: `made`, `call`, `returned`."""
    model_new = (
        samples.MODEL_NEW.replace("features: int)", "features: int, factor: float)")
        .replace(
            "        self.weight = nn.Parameter(torch.randn(features))\n",
            changes.get("made", MINE).format(**names).lstrip("\n"),
        )
        .replace(
            "lib.scale_gelu(x, self.weight, out, x.shape[0], x.shape[1])",
            changes.get("call", CALL).format(**names),
        )
        .replace("return out", changes.get("returned", "return out").format(**names))
    )
    kernel = (
        samples.KERNEL.replace(
            "const float* __restrict w,",
            "const float* __restrict w, const float* __restrict b, const float* __restrict o,",
        )
        .replace("int64_t cols, void*", "int64_t cols, double factor, void*")
        .replace("* w[c];", "* w[c] + b[c];")
        .replace("erff(v * 0.70710678f));", "erff(v * 0.70710678f)) * (float)factor + o[c];")
    )
    return samples.solution(model_new, kernel)


def problem() -> Problem:
    return dataclasses.replace(samples.problem(), code=CODE, problem_id=content_id(CODE))


@pytest.fixture(scope="module")
def admission(cpu_machine: Machine) -> Admission:
    found = admit(problem(), cpu_machine, signature, ("mul", "add", "gelu", "mul", "add"))
    assert found.reason is None, found.detail
    return found


@pytest.fixture(scope="module")
def judge(cpu_machine: Machine, admission: Admission) -> Iterator[Judge]:
    with Judge(problem(), admission, cpu_machine, Policy(partial_isolation=True)) as made:
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What workers are asked."""
    methods: list[str] = []
    ask = Machine.ask

    def spied(self: Machine, worker: Worker, method: str, *more: Any, **params: Any) -> Any:
        methods.append(method)
        return ask(self, worker, method, *more, **params)

    monkeypatch.setattr(Machine, "ask", spied)
    return methods


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the clock: a right solution is unmeasured."""
    monkeypatch.setattr(Judge, "_time", lambda *_: None)


def right(verdict: Verdict) -> bool:
    return verdict.status in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED)


def test_a_solution_with_names_of_its_own_is_accepted(judge: Judge, asked: list[str]) -> None:
    verdict = judge.verify(solution(RENAMED))
    assert right(verdict), verdict.reason
    assert PARAMETERS_RENAMED in verdict.labels
    assert {"change_state", "run_needles"} <= set(asked)
    assert verdict.attribution is not None and verdict.attribution.knocked_out == 1
    # The build whose kernels are dead goes by the same map.
    assert asked.count("build_model") == 2
    assert asked.count("constructed_state") == asked.count("match_names") == 1


def test_it_is_published_too(
    judge: Judge, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process makes its own map; other constructor arguments go by it as well."""
    monkeypatch.setitem(timing.PROCESSES, "publish", 2)
    monkeypatch.setitem(timing.ROUNDS, "publish", 8)
    verdict = judge.verify(solution(RENAMED), "publish")
    assert right(verdict), verdict.reason
    assert PARAMETERS_RENAMED in verdict.labels
    assert "run_arguments" in asked and "arguments_specialised" not in verdict.labels
    assert asked.count("match_names") == asked.count("load") >= 3


@pytest.mark.usefixtures("untimed")
def test_with_the_usual_names_nothing_more_is_asked(judge: Judge, asked: list[str]) -> None:
    verdict = judge.verify(solution(USUAL))
    assert right(verdict), verdict.reason
    assert PARAMETERS_RENAMED not in verdict.labels
    assert asked.count("build_model") == 2
    assert not {"constructed_state", "match_names"} & set(asked)


@pytest.mark.usefixtures("untimed")
def test_random_numbers_drawn_at_import_do_not_matter(judge: Judge) -> None:
    made = solution(RENAMED)
    drawing = made.text("model_new.py").replace("cabi.load()", "cabi.load()\ntorch.randn(3)")
    verdict = judge.verify(samples.solution(drawing, made.text("kernels/scale_gelu.cpp")))
    assert right(verdict), verdict.reason


def test_parameters_drawn_otherwise_are_refused(judge: Judge) -> None:
    """Something else is drawn before them, as where layers are constructed in another order."""
    other = MINE.replace("        self.{first}", "        torch.randn(7)\n        self.{first}")
    verdict = judge.verify(solution(RENAMED, made=other))
    assert verdict.status is VerdictStatus.RUNTIME_ERROR, verdict.reason
    assert verdict.reason.startswith("match_names: NoCounterpart: expected "), verdict.reason
    assert "got shift (float32 [1024]), b (float32 [1024]), of Model there is left" in (
        verdict.reason
    )
    assert "construct them as Model does and in the same order" in verdict.reason


def test_a_counterpart_with_another_meaning_is_wrong(judge: Judge) -> None:
    """Scale and shift are exchanged in the call: the map goes by values, the checks decide."""
    exchanged = (
        CALL.replace("{first}", "{}").replace("{second}", "{first}").replace("{}", "{second}")
    )
    verdict = judge.verify(solution(RENAMED, call=exchanged))
    assert verdict.status is VerdictStatus.INCORRECT, verdict.reason


@pytest.mark.usefixtures("untimed")
def test_its_knock_out_still_works(cpu_machine: Machine, admission: Admission) -> None:
    """One that is right without its kernels is caught; could the dead build not take over the
    parameters, it would not run and pass for an honest one."""
    torch_only = (
        "return torch.nn.functional.gelu(x * self.{first} + self.{second}) * self.factor"
        " + self.{third}"
    )
    policy = Policy(libraries=frozenset({"torch"}))
    with Judge(problem(), admission, cpu_machine, policy) as judge:
        verdict = judge.verify(solution(RENAMED, returned=torch_only))
    assert verdict.reason.startswith(Guard.KNOCK_OUT), verdict.reason
    assert PARAMETERS_RENAMED in verdict.labels
