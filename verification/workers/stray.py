"""Repeats of one call, and which of them strays."""

from __future__ import annotations

from collections.abc import Iterator

import torch

PIECE = 1 << 24
WORSE = 1e30
"""NaN where there was none is further away than any number."""


class Stray:
    """Of several outputs for equal inputs, the one furthest from the first."""

    def __init__(self) -> None:
        self.structure = ""
        self.furthest: list[torch.Tensor] = []
        self.far = -1.0
        """In units of the first one's scale."""
        self._first: list[torch.Tensor] | None = None

    def look(self, structure: str, outputs: list[torch.Tensor]) -> None:
        if self._first is None:
            self._first = [output.clone() for output in outputs]
        distance = _distance(outputs, self._first)
        if distance > self.far:
            self.structure, self.far = structure, distance
            self.furthest = [output.clone() for output in outputs]


def _distance(outputs: list[torch.Tensor], first: list[torch.Tensor]) -> float:
    """Largest difference of an element, of the first outputs' largest; 0 for bitwise equality."""
    worst = 0.0
    for one, two in zip(outputs, first, strict=True):
        if torch.equal(one, two):
            continue
        scale = max(float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) for b in _pieces(two)) + 1e-30
        far = max(map(_difference, _pieces(one), _pieces(two)))
        worst = max(worst, far / scale, 1e-30)
    return worst


def _difference(one: torch.Tensor, two: torch.Tensor) -> float:
    same = (one == two) | (one.isnan() & two.isnan())
    found = (one - two).abs().masked_fill(same, 0.0)
    return float(found.nan_to_num(nan=WORSE, posinf=WORSE).max())


def _pieces(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """In fp64, a piece at a time: gigabytes stay put."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    yield from (part.double() for part in real.reshape(-1).split(PIECE))
