"""A full device is asked again; a process at its own limit is not."""

from __future__ import annotations

import pytest

from verification.room import was_full, with_room

SAID = (
    "run: OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total "
    "capacity of 139.81 GiB of which {left} is free. Including non-PyTorch memory, this process "
    "has 15.02 GiB memory in use. 16.00 GiB allowed; Of the allocated memory 14.00 GiB is "
    "allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("asked", "left", "full"),
    [
        ("2.00 GiB", "100.00 GiB", False),
        ("2.00 GiB", "1.50 GiB", True),
        ("2.00 GiB", "900.00 MiB", True),
        ("512.00 MiB", "1.00 GiB", False),
        ("512.00 MiB", "0 bytes", True),
    ],
)
def test_torch_says_whose_limit_it_was(asked: str, left: str, full: bool) -> None:
    assert was_full(SAID.format(asked=asked, left=left)) is full


def test_what_says_nothing_may_have_met_a_full_device() -> None:
    assert was_full("run: RuntimeError: CUDA error: out of memory")


@pytest.mark.parametrize(
    ("pauses_s", "full", "expected"),
    [((), [True], 1), ((0.0, 0.0), [False], 1), ((0.0, 0.0), [True, False], 2),
     ((0.0, 0.0), [True, True, True], 3)],
)  # fmt: skip
def test_there_is_a_try_after_each_pause(
    pauses_s: tuple[float, ...], full: list[bool], expected: int
) -> None:
    tries: list[bool] = []

    def measure() -> bool:
        tries.append(full[len(tries)])
        return tries[-1]

    assert with_room(measure, bool, pauses_s) is full[expected - 1]
    assert len(tries) == expected
