"""Of several answers to one question, the one that is checked is the furthest from the first."""

from __future__ import annotations

import pytest
import torch

from verification.workers import stray
from verification.workers.stray import Stray

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("answers", "furthest"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], 0),
        ([[1.0, 2.0], [1.0, 2.1], [1.5, 2.0], [1.0, 2.2]], 2),
        ([[INF, 2.0], [INF, 2.1], [INF, 2.2], [INF, 2.05]], 2),
        ([[NAN, 2.0], [NAN, 2.1], [NAN, 2.2], [NAN, 2.05]], 2),
        ([[1.0, 2.0], [1.0, 9.0], [NAN, 2.0], [1.0, 3.0]], 2),
        ([[1.0, 2.0], [1.0, 9.0], [INF, 2.0], [1.0, 3.0]], 2),
        ([[1 + 1j], [1 + 1.1j], [1 + 3j], [2 + 1j]], 2),
        ([[1, 2], [1, 3], [1, 5], [1, 2]], 2),
    ],
)
def test_the_furthest_is_kept(
    monkeypatch: pytest.MonkeyPatch, answers: list[list[complex]], furthest: int
) -> None:
    monkeypatch.setattr(stray, "PIECE", 1)
    found = Stray()
    for answer in answers:
        found.look("tensor", [torch.tensor(answer)])
    wanted = torch.tensor(answers[furthest])
    assert torch.equal(found.furthest[0].nan_to_num(), wanted.nan_to_num())
