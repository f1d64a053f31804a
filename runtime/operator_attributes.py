"""Bucketed attributes of one call: what makes it another kernel to write, without its sizes.

Two calls of one operator with equal attributes are the same task at other sizes. Kept apart:
which dimensions (counted from the end), rank, groups (1, grouped, depthwise), stride / padding /
dilation classes, pointwise kernels, scalar, row or other broadcast operands, skinny matmuls,
dtypes other than float32, modes and flags. Not kept: sizes, epsilons, constants other than 0, 1
and -1.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Attributes = tuple[tuple[str, str], ...]

_POSITIONS: dict[str, str] = {  # argument names of functions written in C++, which do not tell
    "softmax": "input dim",
    "log_softmax": "input dim",
    "sum": "input dim keepdim",
    "mean": "input dim keepdim",
    "prod": "input dim keepdim",
    "max": "input dim keepdim",
    "min": "input dim keepdim",
    "argmax": "input dim keepdim",
    "argmin": "input dim keepdim",
    "logsumexp": "input dim keepdim",
    "var": "input dim unbiased keepdim",
    "std": "input dim unbiased keepdim",
    "any": "input dim keepdim",
    "all": "input dim keepdim",
    "norm": "input p dim keepdim",
    "cumsum": "input dim",
    "cumprod": "input dim",
    "flip": "input dim",
    "cat": "tensors dim",
    "stack": "tensors dim",
    "split": "input sections dim",
    "gather": "input dim index",
    "index_select": "input dim index",
    "topk": "input k dim largest",
    "sort": "input dim descending",
    "gelu": "input approximate",
    "softplus": "input beta threshold",
    "leaky_relu": "input negative_slope",
    "clamp": "input min max",
    "pow": "input exponent",
    "add": "input other alpha",
    "sub": "input other alpha",
    "mul": "input other",
    "div": "input other rounding_mode",
    "conv1d": "input weight bias stride padding dilation groups",
    "conv2d": "input weight bias stride padding dilation groups",
    "conv3d": "input weight bias stride padding dilation groups",
    "conv_transpose1d": "input weight bias stride padding output_padding groups dilation",
    "conv_transpose2d": "input weight bias stride padding output_padding groups dilation",
    "conv_transpose3d": "input weight bias stride padding output_padding groups dilation",
    "avg_pool1d": "input kernel_size stride padding ceil_mode count_include_pad",
    "avg_pool2d": "input kernel_size stride padding ceil_mode count_include_pad",
    "avg_pool3d": "input kernel_size stride padding ceil_mode count_include_pad",
}
_IGNORED = {"inplace", "out", "dtype", "device", "layout", "pin_memory", "memory_format"}
_IGNORED |= {"requires_grad", "generator", "training", "momentum", "eps", "_stacklevel"}
_IGNORED |= {"size_average", "reduce", "use_input_stats"}
_SILENT = {  # defaults of functions that do not tell theirs
    "approximate": "none",
    "padding": "0",
    "output_padding": "0",
    "dilation": "1",
    "count_include_pad": "true",
    "beta": "1",
    "threshold": "n",
    "negative_slope": "n",
}
REVERSED = frozenset({"__rsub__", "rsub", "__rdiv__", "__rtruediv__", "__rpow__"})
"""Functions whose first operand is the right one: 1 - x, 2 / x, 2 ** x."""
_DIMENSIONS = frozenset({"dim", "dims", "axis"})
_BROADCASTING = frozenset({"add", "sub", "mul", "div", "pow", "maximum", "minimum"})
_SIZES_ONLY = {"view", "transpose", "expand", "slice", "index", "lstm", "gru", "rnn_tanh"}
_SIZES_ONLY |= {"rnn_relu", "zeros", "ones", "full", "empty", "rand", "randn", "arange", "eye"}
"""Calls whose arguments are sizes, positions or weights: only rank and dtype are kept."""
_MATMULS = {"matmul": 0, "linear": 0, "addmm": 1, "addmv": 1, "baddbmm": 1, "addbmm": 1}
SKINNY = 16
"""A matmul dimension this many times smaller than the largest one is small: another kernel to
write.
"""


def attributes_of(
    call: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: torch.Tensor,
) -> Attributes:
    """Sorted (name, bucket) pairs of one call; `output` is its first output tensor."""
    tensors = list(tensors_in((args, kwargs)))
    rank = tensors[0].dim() if tensors else output.dim()
    found = {"rank": str(rank)}
    if output.dtype is not torch.float32:
        found["dtype"] = str(output.dtype).removeprefix("torch.")
    if getattr(function, "__name__", "") in REVERSED:
        found["reversed"] = "true"
    if call not in _SIZES_ONLY:
        named = _named(call, function, args, kwargs)
        found |= _buckets(named, rank)
        if call.startswith("conv") and len(tensors) > 1:
            found |= _convolution(tensors, named.get("groups", 1))
    if call in _BROADCASTING:
        found |= _operands(tensors, output)
    if call in _MATMULS:
        found |= _matmul(call, tensors, output)
    return tuple(sorted(found.items()))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...] | None:
    """(name, default) of a Python function; None for one that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return tuple((p.name, p.default) for p in parameters)


def _named(
    call: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by name, those that equal the function's known defaults left out."""
    known = _parameters(function)
    names = [name for name, _ in known] if known else _POSITIONS.get(call, "").split()
    defaults = dict(known or ())
    named = {
        names[i] if i < len(names) else f"argument{i}": value for i, value in enumerate(args)
    } | dict(kwargs)
    return {
        name: value
        for name, value in named.items()
        if not (
            name in defaults and type(value) is type(defaults[name]) and value == defaults[name]
        )
    }


def _buckets(named: Mapping[str, Any], rank: int) -> dict[str, str]:
    found = {}
    for name, value in named.items():
        if name in _IGNORED or value is None or next(tensors_in(value), None) is not None:
            continue
        if name in _DIMENSIONS:
            found["dim"] = _dimension(value, rank)
        else:
            found[name] = _bucket(value, exact=name == "exponent")
    return {
        name: bucket for name, bucket in found.items() if bucket and _SILENT.get(name) != bucket
    }


def _dimension(value: Any, rank: int) -> str:
    """Dimensions counted from the end, sorted: dim 1 of a matrix and dim -1 are the same."""
    dims = value if isinstance(value, list | tuple) else [value]
    if not all(type(dim) is int for dim in dims):
        return _bucket(value)
    return ",".join(
        str(dim - rank if dim >= 0 else dim) for dim in sorted(d % max(rank, 1) for d in dims)
    )


def _bucket(value: Any, *, exact: bool = False) -> str:
    if isinstance(value, bool):
        return "true" if value else ""
    if isinstance(value, int | float):
        if exact or value in (0, 1, -1) or math.isinf(value):
            return f"{float(value):g}"
        return "n"
    if isinstance(value, list | tuple):
        buckets = [_bucket(item) for item in value]
        return buckets[0] if len(set(buckets)) == 1 else "x".join(buckets)
    return value if isinstance(value, str) else type(value).__name__


def _operands(tensors: list[torch.Tensor], output: torch.Tensor) -> dict[str, str]:
    """How the operands of an elementwise call meet; equal shapes are the silent default."""
    if len(tensors) < 2:
        return {"operands": "scalar"}
    smaller = min(tensors[:2], key=lambda tensor: tensor.numel())
    if smaller.shape == output.shape:
        return {}
    if smaller.numel() == 1:
        return {"operands": "scalar"}
    last = smaller.dim() > 0 and smaller.shape[-1] == output.shape[-1]
    return {"operands": "row" if last else "column"}


def _matmul(call: str, tensors: list[torch.Tensor], output: torch.Tensor) -> dict[str, str]:
    first, second = tensors[_MATMULS[call] :][:2]
    batched = first.dim() > 2 and second.dim() > 2
    columns = 1 if second.dim() == 1 else output.shape[-1]
    rows = first.shape[-2] if batched else max(first.numel() // max(first.shape[-1], 1), 1)
    sizes = {"k": first.shape[-1], "m": rows, "n": columns}
    small = "".join(name for name, size in sizes.items() if size * SKINNY <= max(sizes.values()))
    return {"small": small} if small else {}


def _convolution(tensors: list[torch.Tensor], groups: Any) -> dict[str, str]:
    kernel = _bucket(tuple(tensors[1].shape[2:]))
    if not isinstance(groups, int) or groups == 1:
        return {"kernel": kernel, "groups": "1"}
    depthwise = groups == tensors[0].shape[1]
    return {"kernel": kernel, "groups": "depthwise" if depthwise else "grouped"}
