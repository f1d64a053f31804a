"""The error budget, on numbers small enough to check by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from verification.workers.correctness import Expected, compare, figures

EPS32, EPS16 = 2.0**-23, 2.0**-7


def expected(values: list[float], dtype: torch.dtype = torch.float32, off: float = 0.0) -> Expected:
    exact = torch.tensor(values, dtype=torch.float64)
    return Expected(eager=(exact + off).to(dtype), exact=exact)


def test_figures_by_hand() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)  # rms = sqrt(12.5)
    value = torch.tensor([3.0, 4.5], dtype=torch.float64)
    ((largest, rms),) = figures([value], exact)
    assert figures([value], exact, torch.tensor([True, True])) == [(largest, rms)]
    assert largest == pytest.approx(0.5 / (math.sqrt(12.5) + 4.0))
    assert rms == pytest.approx(0.5 / (math.sqrt(12.5) + 4.0) / math.sqrt(2))


def test_equal_values_pass_with_error_zero() -> None:
    found = compare(torch.tensor([1.0, -2.0]), expected([1.0, -2.0]))
    assert found.passed
    assert found.error == 0.0
    assert found.budget == pytest.approx(64 * EPS32)


def test_where_eager_is_exact_a_few_ulps_are_allowed_and_no_more() -> None:
    wanted = expected([1.0] * 64)
    within = torch.ones(64)
    within[0] += 100 * EPS32  # divided by scale 1 + value 1
    beyond = torch.ones(64)
    beyond[0] += 140 * EPS32
    assert compare(within, wanted).passed
    assert not compare(beyond, wanted).passed


def test_eagers_own_error_is_the_yardstick() -> None:
    wanted = expected([1.0] * 10_000, off=1e-3)  # eager is 1e-3 off everywhere
    value = torch.ones(10_000)
    value[0] += 15e-3
    assert compare(value, wanted).passed
    assert not compare(torch.ones(10_000) + 8.5e-3, wanted).passed


def test_a_long_sum_may_have_the_error_of_a_plain_one() -> None:
    """It grows as the square root of the length; a loss of bits is still far beyond."""
    exact = torch.ones(64, dtype=torch.float64)
    value = torch.ones(64) + 60 * EPS32  # 30 in units of scale + value, where 16 are allowed
    short = Expected(eager=exact.float(), exact=exact, depth=8192)
    assert not compare(value, short).passed
    assert compare(value, replace(short, depth=36_000)).passed  # 190 / 6 = 31.6
    tf32 = torch.ones(64) + 2.0**-12
    assert not compare(tf32, replace(short, depth=1 << 20)).passed


def test_an_fp64_problem_is_not_summed_in_fp32() -> None:
    exact = torch.ones(64, dtype=torch.float64)
    wanted = Expected(eager=exact, exact=exact, depth=8192)
    assert compare(exact + 2.0**-48, wanted).passed
    assert not compare(exact + 2.0**-23, wanted).passed


def test_of_a_single_number_the_largest_error_decides() -> None:
    """64 units, of scale + value; of many elements a quarter of that in the root mean square."""
    one = expected([1.0])
    assert compare(torch.tensor([1.0 + 120 * EPS32]), one).passed
    assert not compare(torch.tensor([1.0 + 140 * EPS32]), one).passed
    many = expected([1.0] * 10_000)
    assert compare(torch.ones(10_000) + 30 * EPS32, many).passed
    assert not compare(torch.ones(10_000) + 40 * EPS32, many).passed


def test_complex_numbers_have_a_budget_too() -> None:
    exact = torch.fft.fft(torch.randn(64, 256, dtype=torch.float64))
    wanted = Expected(eager=exact.to(torch.complex64), exact=exact)
    assert compare(exact.to(torch.complex64) * (1 + 4 * EPS32), wanted).passed
    assert not compare(exact.conj().to(torch.complex64), wanted).passed
    assert not compare(exact.to(torch.complex64) * (1 + 2.0**-11), wanted).passed


def test_an_index_that_rounding_decides_may_be_either() -> None:
    eager, exact = torch.arange(100), torch.arange(100)
    exact[7] = 8
    wanted = Expected(eager=eager, exact=exact)
    assert compare(eager, wanted).passed and compare(exact, wanted).passed
    other = eager.clone()
    other[[20, 30]] += 1  # as many again may be decided otherwise
    assert compare(other, wanted).passed
    other[40] += 1
    assert not compare(other, wanted).passed
    assert not compare(other, Expected(eager=eager, exact=eager)).passed


def test_one_wrong_element_in_a_million_is_seen() -> None:
    exact = torch.randn(1_000_000, dtype=torch.float64)
    wanted = Expected(eager=exact.float(), exact=exact)
    value = exact.float()
    value[123_456] += 1e-3
    assert not compare(value, wanted).passed


def test_a_loss_of_precision_everywhere_is_seen_though_no_element_stands_out() -> None:
    exact = torch.randn(10_000, dtype=torch.float64)
    eager = exact.float()
    eager[0] += 1.0  # one bad element of eager's must not buy slack for all the others
    wanted = Expected(eager=eager, exact=exact)
    value = (exact * (1 + 0.3 * torch.rand(10_000, dtype=torch.float64))).float()
    found = compare(value, wanted)
    assert not found.passed
    assert "rms" in found.detail


def test_a_silent_downcast_fails() -> None:
    exact = torch.randn(4096, dtype=torch.float64)
    wanted = Expected(eager=exact.float(), exact=exact)
    assert not compare(exact.to(torch.bfloat16).float(), wanted).passed
    assert not compare(exact.to(torch.float16).float(), wanted).passed


def test_bf16_rounding_is_no_error_in_bf16() -> None:
    exact = torch.randn(4096, dtype=torch.float64)
    wanted = Expected(eager=exact.to(torch.bfloat16), exact=exact)
    assert compare(exact.float().to(torch.bfloat16), wanted).passed
    worse = (exact + 8 * EPS16).to(torch.bfloat16)
    assert not compare(worse, wanted).passed


@pytest.mark.parametrize(
    ("value", "passed"),
    [
        ([math.inf, 1.0, math.nan], True),
        ([-math.inf, 1.0, math.nan], False),
        ([1e30, 1.0, math.nan], False),
        ([math.inf, 1.0, 0.0], False),
        ([math.inf, math.nan, math.nan], False),
        ([math.inf, math.inf, math.nan], False),
    ],
)
def test_specials_must_stand_where_the_reference_has_them(value: list[float], passed: bool) -> None:
    wanted = expected([math.inf, 1.0, math.nan])
    assert compare(torch.tensor(value), wanted).passed is passed


@pytest.mark.parametrize(
    ("value", "passed"),
    [
        ([math.nan, 1.0, math.nan], True),
        ([-math.inf, 1.0, math.inf], True),
        ([1e30, 1.0, math.nan], False),
        ([math.inf, 1.0, 0.0], False),
        ([math.inf, math.nan, math.nan], False),
        ([math.inf, 1.5, math.nan], False),
    ],
)
def test_of_special_inputs_nan_stands_for_infinity(value: list[float], passed: bool) -> None:
    """A compensated sum makes NaN of infinity; what is a number must still be that number."""
    wanted = replace(expected([math.inf, 1.0, math.nan]), of_specials=True)
    assert compare(torch.tensor(value), wanted).passed is passed


def test_an_overflow_that_fp64_does_not_have_is_not_compared() -> None:
    exact = torch.tensor([1e300, 1.0], dtype=torch.float64)
    wanted = Expected(eager=torch.tensor([math.inf, 1.0]), exact=exact)
    assert compare(torch.tensor([3.0, 1.0]), wanted).passed


def test_where_eager_overflows_others_may_overflow_elsewhere() -> None:
    """A running product by pairs and one from left to right; a number must be right all the same,
    and without an overflow of eager's infinity is a mistake."""
    exact = torch.tensor([1e300, 1.0, 2.0], dtype=torch.float64)
    wanted = Expected(eager=torch.tensor([math.inf, 1.0, 2.0]), exact=exact)
    assert compare(torch.tensor([3.0, math.inf, 2.0]), wanted).passed
    assert not compare(torch.tensor([3.0, math.inf, 2.1]), wanted).passed
    assert not compare(torch.tensor([3.0, math.nan, 2.0]), wanted).passed
    assert not compare(torch.tensor([math.inf, 1.0]), expected([1.0, 1.0])).passed


def test_integers_are_equal_or_wrong() -> None:
    exact = torch.tensor([1, 2, 3])
    wanted = Expected(eager=exact, exact=exact)
    assert compare(torch.tensor([1, 2, 3]), wanted).passed
    found = compare(torch.tensor([1, 2, 4]), wanted)
    assert not found.passed
    assert "1 of 3" in found.detail


@pytest.mark.parametrize(
    "value", [torch.ones(2, 1), torch.ones(2, dtype=torch.float64), torch.ones(3)]
)
def test_shape_and_dtype_count(value: torch.Tensor) -> None:
    assert not compare(value, expected([1.0, 1.0])).passed


def test_zeros_do_not_pass_for_small_outputs() -> None:
    """An absolute tolerance would let them: softmax over 8192 columns is about 1e-4 everywhere."""
    exact = torch.softmax(torch.randn(4, 8192, dtype=torch.float64), -1)
    wanted = Expected(eager=exact.float(), exact=exact)
    assert not compare(torch.zeros(4, 8192), wanted).passed
