"""Inputs follow from a seed alone, and the reference is not in the text that makes them."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from runtime.problem_code import load_module, make_model
from tests import samples
from verification.workers.correctness import Expected, compare
from verification.workers.distributions import (
    DISTRIBUTIONS,
    KEEPING,
    NEEDLES,
    OUTLIERS,
    OUTLIERS_SHARE,
    STATE_NEEDLE_SIZE,
    STATE_NEEDLES,
    WIDENING,
    add_needles,
    changed,
    widens,
)
from verification.workers.inputs import DRAWS, Draw, checksum, draw_inputs, resized, without_model
from verification.workers.ring import RING_SLOTS, InputRing, timed_inputs


def _inputs_module(code: str) -> types.ModuleType:
    return load_module(without_model(code), "inputs")


def test_both_processes_make_the_same_inputs() -> None:
    whole, stripped = load_module(samples.CODE, "one"), _inputs_module(samples.CODE)
    for name in DISTRIBUTIONS:
        draw = Draw(seed=5, distribution=name, state_seed=0)
        one, two = draw_inputs(whole, "cpu", draw), draw_inputs(stripped, "cpu", draw)
        assert torch.equal(one[0].view(torch.int32), two[0].view(torch.int32))
        assert checksum(one) == checksum(two)


def test_the_reference_is_gone_from_the_inputs_text() -> None:
    text = without_model(samples.CODE)
    assert "forward" not in text
    assert "gelu" not in text.split('"""')[-1]
    assert _inputs_module(samples.CODE).Model is None


def test_other_classes_stay_in_the_inputs_text() -> None:
    extra = """
@dataclasses.dataclass
class Sizes:
    rows: int = 3

class Base(nn.Module):
    pass

class Block(Base):
    pass

class Rule(torch.autograd.Function):
    pass
"""
    module = _inputs_module("import dataclasses\n" + samples.CODE + extra)
    assert module.Sizes().rows == 3
    assert [module.Base, module.Block, module.Rule, module.Model] == [None] * 4


def test_seeds_and_distributions_differ() -> None:
    module = load_module(samples.CODE, "one")
    seen = {
        checksum(draw_inputs(module, "cpu", Draw(seed=s, distribution=d, state_seed=0)))
        for s in (1, 2)
        for d in DISTRIBUTIONS
    }
    assert len(seen) == 2 * len(DISTRIBUTIONS)


def test_some_distributions_keep_signs_and_the_unit_interval() -> None:
    unit, signed = torch.rand(100, 7), torch.randn(100, 7)
    for change in KEEPING.values():
        assert bool(((change(unit, 0) >= 0) & (change(unit, 0) <= 1)).all())
        assert torch.equal(change(signed, 0) > 0, signed > 0)


def test_sorted_sizes_leave_a_sum_as_it_cancels() -> None:
    """Sorted with their signs, the first half of a row would add up to -0.4 of its length."""
    found = KEEPING["structured"](torch.randn(8, 4096), 0)
    sizes = found.abs()
    assert bool((sizes.diff(dim=1) >= 0).all())
    assert float(found.cumsum(1).abs().max()) < 400


def _mean_of_a_part(x: torch.Tensor, kept: slice) -> torch.Tensor:
    return x[kept].double().mean().float()


@pytest.mark.parametrize(
    "kept", [slice(None, -(1 << 19)), slice(1 << 19, None), slice(None, None, 2)]
)
@pytest.mark.parametrize("function", [lambda x: x, torch.square, lambda x: F.mish(x)])
def test_a_mean_over_a_part_is_wrong_among_outliers(
    kept: slice, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """It is right about what is alike: half of 2**25 numbers have the mean of all."""
    x = torch.rand(1 << 25, generator=torch.Generator().manual_seed(3))
    for distribution, seed, passes in (
        ("natural", 0, True),
        ("heavy", 7, False),
        ("heavy", 8, False),
    ):
        y = function(changed(x, distribution, seed))
        exact = y.double().mean()
        wanted = Expected(eager=exact.float(), exact=exact, depth=1 << 18)
        assert compare(y.mean(), wanted).passed
        assert compare(_mean_of_a_part(y, kept), wanted).passed is passes


def test_outliers_follow_from_the_seed_and_fit_the_type() -> None:
    x = torch.rand(1 << 20)
    one, same, other = (changed(x, "heavy", seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    outliers = one > 50
    assert int(outliers.sum()) == OUTLIERS
    share = float(one[outliers].sum() / one[~outliers].sum())
    assert OUTLIERS_SHARE < share < 2 * OUTLIERS_SHARE
    half = changed(torch.rand(1 << 20).half(), "heavy", 1)
    assert bool(half.isfinite().all()) and float(half.max()) == pytest.approx(256, rel=0.01)


def test_the_others_leave_the_unit_interval() -> None:
    unit = torch.rand(100, 70)
    centred, large, special = (WIDENING[n](unit, 0) for n in ("centred", "large", "special"))
    assert float(centred.min()) < -0.5
    assert float(centred.mean()) == pytest.approx(1.0, abs=1e-3)
    assert float(large.max()) > 50.0
    assert bool(torch.isnan(special).any())
    assert bool(torch.isposinf(special).any()) and bool(torch.isneginf(special).any())
    assert int((special != unit).sum()) <= NEEDLES
    assert torch.equal(
        WIDENING["special"](torch.rand(3), 0).isnan(), torch.tensor([1, 0, 0]).bool()
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "x", [torch.randn(6, 5).t(), torch.randn(3).expand(4, 3), torch.tensor(0.5), torch.empty(0, 2)]
)
def test_inputs_of_any_layout_are_changed(distribution: str, x: torch.Tensor) -> None:
    found = changed(x, distribution)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    if x.dim() and x.numel() == 30:
        assert found.stride() == x.stride()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_what_inputs_say_by_their_structure_stays(distribution: str) -> None:
    """A kernel for a triangular matrix, or for a mask of ones and zeros, is right about them."""
    triangle = torch.randn(40, 40).triu_()
    found = changed(triangle, distribution)
    assert bool((found.tril(-1) == 0).all())
    assert torch.equal(found, triangle) is (distribution in ("natural", "structured"))
    mask = (torch.rand(50, 50) < 0.5).float()
    assert torch.equal(changed(mask, distribution), mask)


def test_needles_and_timed_calls_leave_zeros_and_whole_numbers_alone() -> None:
    triangle, before = torch.randn(40, 40).triu_(), torch.empty(0)
    add_needles([triangle], 3)
    assert bool((triangle.tril(-1) == 0).all())
    module = load_module(samples.CODE, "ring_of_triangles")
    module.__dict__["get_inputs"] = lambda: [
        torch.randn(40, 40).triu_(),
        (torch.rand(50, 50) < 0.5).float(),
    ]
    ring = InputRing(module, "cpu", 1)
    for _ in range(8):
        triangle, mask = ring.advance()
        assert bool((triangle.tril(-1) == 0).all())
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert not torch.equal(triangle, before)
        before = triangle.clone()


def test_no_two_needles_are_alike_and_infinities_stay() -> None:
    """Among equal elements which one is the largest is a matter of taste."""
    x, mask = torch.randn(4096), torch.zeros(400)
    mask[::2] = -torch.inf
    kept = mask.clone()
    add_needles([x, mask], 3)
    needles = x.abs().topk(NEEDLES - 8).values
    assert float(needles.min()) > 40 and len(needles.unique()) == len(needles)
    assert torch.equal(mask, kept)


@pytest.mark.parametrize(("call", "able"), [("F.gelu(x)", True), ("x.long()", False)])
def test_what_would_fail_an_assertion_on_a_gpu_is_not_tried(call: str, able: bool) -> None:
    assert widens(samples.CODE.replace("F.gelu(x * self.weight)", call)) is able


def test_needles_change_a_few_elements_where_they_lie() -> None:
    floats, words, nothing = torch.rand(50, 100), torch.arange(5000), torch.empty(0)
    before = [floats.clone(), words.clone()]
    address, version = floats.data_ptr(), floats._version
    add_needles([floats, words, nothing, 7], 3)
    changed = floats != before[0]
    assert 1 <= int(changed.sum()) <= NEEDLES
    assert float(floats[changed].min()) > 20.0  # fifty times a root mean square of 0.58
    assert (floats.data_ptr(), floats._version) == (address, version)
    assert not torch.equal(words, before[1])
    assert torch.equal(words.sort().values, before[1])
    again = [b.clone() for b in before]
    add_needles(again, 3)
    assert torch.equal(again[0], floats)
    assert torch.equal(again[1], words)


def test_needles_in_parameters_are_few_and_no_outliers() -> None:
    weight = torch.randn(4096)
    before = weight.clone()
    add_needles([weight], 3, STATE_NEEDLE_SIZE, STATE_NEEDLES)
    changed = weight != before
    assert 1 <= int(changed.sum()) <= STATE_NEEDLES
    assert all(2.7 < size < 4.1 for size in weight[changed].abs().tolist())


def test_a_neighbouring_shape_has_one_row_less() -> None:
    found = resized([torch.ones(4, 3), torch.ones(4), torch.ones(3), 2.0])
    assert found is not None
    assert [v.shape for v in found[:3]] == [(3, 3), (3,), (3,)]
    assert resized([torch.ones(1, 3)]) is None
    assert resized([5]) is None


def test_checksum_sees_one_bit_and_the_order() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y.view(torch.int32)[500] ^= 1
    z = x.flip(0)
    assert len({checksum([x]), checksum([y]), checksum([z])}) == 3
    assert checksum([x.to(torch.bfloat16)[:3]]) != checksum([x.to(torch.bfloat16)[1:4]])
    assert checksum([torch.empty(0)]) == checksum([torch.empty(0)])


def test_the_ring_replays_and_never_repeats() -> None:
    module = load_module(samples.CODE, "one")
    ring = InputRing(module, "cpu", 9)
    seen = []
    for count in range(3 * RING_SLOTS):
        seen.append(checksum(ring.advance()))
        assert checksum(timed_inputs(module, "cpu", 9, count)) == seen[-1]
    assert len(set(seen)) == len(seen)
    addresses = {ring.advance()[0].data_ptr() for _ in range(RING_SLOTS)}
    assert len(addresses) == RING_SLOTS


def test_parameters_are_not_the_usual_ones_and_zeros() -> None:
    code = samples.CODE.replace("torch.randn(features))", "torch.ones(features))")
    model = make_model(load_module(code, "ones"), "cpu", 3)
    again = make_model(load_module(code, "ones"), "cpu", 3)
    other = make_model(load_module(code, "ones"), "cpu", 4)
    weight = next(model.parameters())
    assert float(weight.detach().min()) >= 1.0
    assert float(weight.detach().std()) > 0.01
    assert torch.equal(weight, next(again.parameters()))
    assert not torch.equal(weight, next(other.parameters()))


def test_every_distribution_is_drawn_from_and_needles_go_into_ordinary_inputs() -> None:
    for first, second in DRAWS.values():
        assert {*first, *second} == DISTRIBUTIONS.keys()
        assert second[-1] not in WIDENING
