"""How many terms an element of a result is the sum of: it says how exact a plain sum can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Count = Callable[[tuple[Any, ...], torch.Tensor], int]
"""Of the arguments and the first tensor of the result."""
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution}
MOST = 1 << 18
"""Nobody adds up more than this one after the other."""
ZEROS_SHARE = 1 / 64


def _fewer(args: tuple[Any, ...], made: torch.Tensor) -> int:
    return int(args[0].numel()) // made.numel()


def _longest(args: tuple[Any, ...], made: torch.Tensor) -> int:
    return max(args[0].shape, default=1)


def _last(args: tuple[Any, ...], made: torch.Tensor) -> int:
    return int(args[0].shape[-1])


def _batch_norm(args: tuple[Any, ...], made: torch.Tensor) -> int:
    """With the statistics of a batch, or of an instance, which is a batch of one."""
    training = any(value is True for value in args)
    return int(args[0].numel()) // int(args[0].shape[1]) if training else 1


TERMS: dict[Any, Count] = {
    **dict.fromkeys(
        (
            aten.sum, aten.mean, aten.var, aten.var_mean, aten.std, aten.std_mean, aten.logsumexp,
            aten.linalg_vector_norm, aten.norm, aten.dot, aten.mse_loss, aten.smooth_l1_loss,
            aten.huber_loss, aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss, aten.nll_loss_forward, aten.nll_loss2d_forward,
            aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d,
        ),
        _fewer,
    ),
    **dict.fromkeys(
        (
            aten._softmax, aten._log_softmax, aten.cumsum, aten.logcumsumexp, aten.trace,
            aten._native_multi_head_attention, aten._transformer_encoder_layer_fwd,
        ),
        _longest,
    ),
    **dict.fromkeys(
        (
            aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm,
            aten.miopen_batch_norm,
        ),
        _batch_norm,
    ),
    **dict.fromkeys((aten.mv, aten._cdist_forward, aten._euclidean_dist), _last),
    **dict.fromkeys(
        (aten.avg_pool2d, aten.avg_pool3d), lambda args, made: math.prod(_listed(args[1]))
    ),
    aten.addmv: lambda args, made: int(args[1].shape[-1]),
    aten.native_layer_norm: lambda args, made: math.prod(args[1]),
    aten.native_group_norm: lambda args, made: int(args[0][0].numel()) // int(args[6]),
    aten._embedding_bag: lambda args, made: int(args[1].numel()) // made.shape[0],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda args, made: int(args[1].shape[-2]),
}  # fmt: skip
"""For what `torch.utils.flop_counter` does not know."""


class Depth(TorchDispatchMode):
    """Looks at what runs meanwhile.

    A product of n x k and k x m matrices has depth k: half its FLOPs by its elements, as
    `torch.utils.flop_counter` counts them. Not covered: what neither that nor TERMS knows, such as
    recurrent layers of cuDNN.
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
        elif packet in TERMS:
            terms = TERMS[packet](args, made)
        self.most = min(max(self.most, terms), MOST)
        return result


def _listed(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [int(value)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.numel())


def _many_zeros(value: torch.Tensor) -> bool:
    return int((value == 0).sum()) > ZEROS_SHARE * value.numel()
