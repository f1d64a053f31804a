"""How many terms an element of a result is the sum of: it says how exact a plain sum can be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
REDUCTIONS = {
    aten.sum, aten.mean, aten.var, aten.var_mean, aten.std, aten.std_mean, aten.logsumexp,
    aten.linalg_vector_norm, aten.norm,
}  # fmt: skip
"""Each element of the result is of as many elements of the input as there are more of these."""
ALONG_A_DIMENSION = {
    aten._softmax, aten._log_softmax, aten.cumsum, aten.logcumsumexp, aten.native_layer_norm,
    aten.native_group_norm,
}  # fmt: skip
"""As many as the longest dimension has, at most but for normalisations."""
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution}
MOST = 1 << 18
"""Nobody adds up more than this one after the other."""
ZEROS_SHARE = 1 / 64


class Depth(TorchDispatchMode):
    """Looks at what runs meanwhile.

    A product of n x k and k x m matrices has depth k: half its FLOPs by its elements, as
    `torch.utils.flop_counter` counts them. Not covered: what neither that nor the sets above know,
    such as recurrent layers of cuDNN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """The most terms that are added up for one element."""
        self.skips_zeros = False
        """Whether something may leave out a product with zero, which is NaN for NaN: a convolution
        by another algorithm, a product with a mask or with a matrix that has many zeros."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        given, made = list(_tensors((args, kwargs))), next(_tensors(result), None)
        if not given or made is None:
            return result
        terms = 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            terms = math.ceil(flops / 2 / made.numel())
            self.skips_zeros |= packet in CONVOLUTIONS or any(map(_many_zeros, given))
        elif packet is aten.mul:
            self.skips_zeros |= any(value.dtype == torch.bool for value in given)
        elif packet in REDUCTIONS:
            terms = given[0].numel() // made.numel()
        elif packet in ALONG_A_DIMENSION:
            terms = max(given[0].shape, default=1)
        self.most = min(max(self.most, terms), MOST)
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.numel())


def _many_zeros(value: torch.Tensor) -> bool:
    return int((value == 0).sum()) > ZEROS_SHARE * value.numel()
