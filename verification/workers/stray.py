"""Repeats of one call, and which of them strays."""

from __future__ import annotations

import torch


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
        difference = (one.double() - two.double()).abs().nan_to_num(nan=1e30).max()
        scale = two.double().abs().nan_to_num().max() + 1e-30
        worst = max(worst, float(difference / scale), 1e-30)
    return worst
