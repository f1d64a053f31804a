"""How many terms an element is the sum of, however the sum is spelt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from verification.workers.depth import Depth

DEPTHS: dict[str, tuple[Callable[[], object], int]] = {
    "a product": (lambda: torch.ones(2, 5) @ torch.ones(5, 3), 5),
    "two": (lambda: (torch.ones(2, 5) @ torch.ones(5, 3)) @ torch.ones(3, 7), 5),
    "with a bias": (lambda: F.linear(torch.ones(4, 6), torch.ones(2, 6), torch.ones(2)), 6),
    "with a vector": (lambda: torch.ones(4, 6) @ torch.ones(6), 6),
    "added to": (lambda: torch.addmv(torch.ones(4), torch.ones(4, 6), torch.ones(6)), 6),
    "of vectors": (lambda: torch.ones(6) @ torch.ones(6), 6),
    "convolution": (lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)), 27),
    "mean of columns": (lambda: torch.ones(20, 5).mean(0) + torch.ones(3, 5), 20),
    "softmax": (lambda: torch.ones(2, 50).softmax(1), 50),
    "as long as any": (lambda: torch.linalg.vector_norm(torch.ones(1 << 19)), 1 << 18),
    "no sum": (lambda: torch.ones(9).exp()[2], 0),
    "squares": (lambda: F.mse_loss(torch.ones(4, 6), torch.zeros(4, 6)), 24),
    "squares apart": (lambda: F.mse_loss(torch.ones(4), torch.zeros(4), reduction="none"), 1),
    "Huber": (lambda: F.huber_loss(torch.ones(4, 6), torch.zeros(4, 6)), 24),
    "smooth": (lambda: F.smooth_l1_loss(torch.ones(4, 6), torch.zeros(4, 6)), 24),
    "entropy": (lambda: F.binary_cross_entropy(torch.ones(24), torch.ones(24)), 24),
    "of a batch": (lambda: F.batch_norm(torch.ones(4, 3, 5), None, None, training=True), 20),
    "known": (lambda: F.batch_norm(torch.ones(4, 3, 5), torch.ones(3), torch.ones(3)), 1),
    "of an instance": (lambda: F.instance_norm(torch.ones(4, 3, 5, 6)), 30),
    "of a group": (lambda: F.group_norm(torch.ones(4, 6, 5, 7), 2), 3 * 35),
    "of a layer": (lambda: F.layer_norm(torch.ones(4, 6, 5), (6, 5)), 30),
    "a window": (lambda: F.avg_pool2d(torch.ones(1, 1, 9, 9), 3, 1), 9),
    "a long window": (lambda: F.avg_pool1d(torch.ones(1, 1, 9), 4, 1), 4),
    "distances": (lambda: torch.cdist(torch.ones(30, 7), torch.ones(40, 7)), 7),
    "attention": (
        lambda: F.scaled_dot_product_attention(
            torch.ones(1, 1, 3, 4), torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4)
        ),
        9,
    ),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_depth_is_the_longest_sum(name: str) -> None:
    run, depth = DEPTHS[name]
    with Depth() as found, torch.no_grad():
        run()
    assert found.most == depth


@pytest.mark.parametrize(
    ("run", "skips"),
    [
        (lambda: torch.ones(2, 5) @ torch.ones(5, 3), False),
        (lambda: torch.diag(torch.ones(5)) @ torch.ones(5, 3), True),
        (lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)), True),
        (lambda: torch.ones(5) * torch.tensor([True, False, True, True, False]), True),
        (lambda: torch.ones(5) * F.relu(torch.zeros(5)), False),
    ],
)
def test_products_with_zero_may_be_left_out(run: Callable[[], object], skips: bool) -> None:
    with Depth() as found:
        run()
    assert found.skips_zeros is skips
