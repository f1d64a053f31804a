"""Tensors with guard bands: a kernel that writes past the end of one shows.

What lies in the bands is checked in the process that made them, so a hostile kernel could mend
them; a faulty one does not. Not covered: writes that jump over a band of BAND_BYTES.
"""

from __future__ import annotations

import torch

BAND_BYTES = 4096
CANARY, POISON = 0xA5, 0xFF
"""POISON is a NaN in every floating type."""


class Bands:
    """The guard bands of one call."""

    def __init__(self) -> None:
        self._edges: list[torch.Tensor] = []

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """The same values in memory with bands. What is not contiguous stays where it is."""
        if not value.is_contiguous() or value.numel() == 0:
            return value
        return self._make(value).copy_(value)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Memory with bands for a tensor of this shape, dtype and layout, full of POISON."""
        if not like.is_contiguous() or like.numel() == 0:
            return like
        return self._make(like)

    def _make(self, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        raw = torch.empty(size + 2 * BAND_BYTES, dtype=torch.uint8, device=like.device)
        raw.fill_(POISON)
        for edge in (raw[:BAND_BYTES], raw[BAND_BYTES + size :]):
            self._edges.append(edge.fill_(CANARY))
        return raw[BAND_BYTES : BAND_BYTES + size].view(like.dtype).view(like.shape)

    def kept(self) -> bool:
        """Whether every band holds what it held. Asks the device once."""
        if not self._edges:
            return True
        return bool(torch.stack([(edge == CANARY).all() for edge in self._edges]).all())
