"""The operator graph of a problem: its forward pass recorded on the `meta` device.

It is recorded at the level of torch functions: what the code calls, not what that decomposes into.

No kernel runs and no memory is allocated: `meta` tensors have shapes and dtypes, no values. About
5 ms a problem. Tracing executes the problem's code, so it belongs into a sandboxed child.

What it does not see: control flow that depends on values (it raises TraceError), a write to a
tensor through which an older view is read afterwards, work done in NumPy, and algebraic rewrites
that `operator_names` does not list.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from runtime.operator_attributes import REVERSED, Attributes, attributes_of, tensors_in
from runtime.operator_names import (
    CONSTANTS,
    LAYOUT,
    NOT_OPERATORS,
    OPTIONAL_TENSOR,
    RECURRENT,
    VALUE_CHECKED,
    call_name,
    operators_of,
)

ARGUMENT = -1
"""Input index of a tensor that forward was called with."""
PARAMETER = -2
"""Input index of a parameter, a buffer or any other tensor not made by an operator of the forward
pass.
"""

_NEUTRAL = {"mul": 1, "div": 1, "add": 0, "sub": 0, "pow": 1}


class TraceError(Exception):
    """The forward pass cannot be recorded without values; says which call and why."""


@dataclass(frozen=True, kw_only=True)
class OperatorNode:
    """One operator of the graph, in the order of execution.

    `call` is the operation as it was called and `part` the place of `operator` in its expansion:
    a biased linear gives (call linear, part 0, matmul) and (linear, 1, add). `inputs` are indices
    of earlier nodes, or ARGUMENT or PARAMETER. `shape` and `dtype` are those of the call's first
    output; `used` says which of several outputs are needed. `neutral` marks a constant no-op: x *
    1, x + 0, x / 1, x ** 1.
    """

    operator: str
    call: str
    part: int
    attributes: Attributes
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    used: tuple[int, ...]
    neutral: bool


def trace_operators(namespace: types.ModuleType) -> list[OperatorNode]:
    """Record the operators between the inputs and the outputs of a problem.

    Args:
        namespace: an executed module in KernelBench form (`Model`, `get_inputs`,
            `get_init_inputs`).

    Returns:
        The nodes the outputs depend on, in the order of execution.

    Raises:
        TraceError: the forward pass needs a value (`.item()`, a branch on a tensor) or fails on
            meta tensors.
        Exception: whatever building the model or its inputs raises.
    """
    model, inputs = _on_meta(namespace)
    recorder = _Recorder(list(tensors_in(inputs)))
    with torch.no_grad(), torch.device("meta"), recorder:
        try:
            outputs = model(*inputs)
        except Exception as error:
            raise TraceError(
                f"forward failed on meta tensors after {recorder.last_call or 'no call'}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return recorder.reachable(outputs)


def preload() -> None:
    """Make PyTorch import what it needs for meta tensors: half a second, once, in a warm parent.

    Without it every forked child pays for it at its first trace.
    """
    with torch.no_grad(), torch.device("meta"):
        tensor = torch.empty(2, 2)
        torch.softmax(tensor * 2.0 @ tensor, dim=1)


def declared_operators(nodes: list[OperatorNode]) -> tuple[str, ...]:
    """The call names in order (`linear`, not `matmul` `add`): what a problem's `ops` must equal."""
    return tuple(node.call for node in nodes if node.part == 0)


def _on_meta(namespace: types.ModuleType) -> tuple[torch.nn.Module, list[Any]]:
    """Model in eval mode and inputs, built on meta; on CPU and moved when that needs values."""
    try:
        with torch.device("meta"):
            model = namespace.Model(*namespace.get_init_inputs())
            inputs = namespace.get_inputs()
    except Exception:  # such as .item() in a constructor: needs real values, so build for real
        with torch.device("cpu"):
            model = namespace.Model(*namespace.get_init_inputs())
            inputs = namespace.get_inputs()
    return model.eval().to("meta"), tree_map(_to_meta, inputs)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


@dataclass
class _Call:
    """A recorded call before expansion; `sources` are (call index or negative, output index)."""

    name: str
    operators: tuple[str, ...]
    attributes: Attributes
    sources: list[tuple[int, int]]
    shape: tuple[int, ...]
    dtype: str
    num_outputs: int
    neutral: bool
    used: set[int] = field(default_factory=set)


class _Recorder(TorchFunctionMode):
    """Sees every torch call of the forward pass, but not what a torch function calls itself."""

    def __init__(self, arguments: list[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.last_call = ""
        self._alive: list[torch.Tensor] = list(arguments)  # so that no id is used twice
        self._source = {id(tensor): (ARGUMENT, 0) for tensor in arguments}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        spelling = getattr(func, "__name__", str(func))
        if spelling == "__get__":
            spelling = str(getattr(getattr(func, "__self__", None), "__name__", spelling))
        self.last_call = spelling
        if any(not tensor.is_meta for tensor in tensors_in((args, kwargs))):
            args, kwargs = tree_map(_to_meta, args), tree_map(_to_meta, kwargs)
        name = call_name(spelling)
        result = _run(name, func, args, kwargs)
        if spelling == "__iter__":  # `a, b = x`: hand out tensors that are recorded as outputs
            result = list(result)
        written = args[0] if spelling == "__setitem__" else None
        outputs = list(tensors_in(result if written is None else written))
        if outputs and name not in CONSTANTS:
            self._record(name, spelling, func, args, kwargs, outputs)
        return iter(result) if spelling == "__iter__" else result

    def _record(
        self,
        name: str,
        spelling: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
    ) -> None:
        inputs = list(tensors_in((args, kwargs)))
        sources = [self._source_of(tensor) for tensor in inputs]
        name = _specific(name, inputs, outputs)
        if inputs and _passes_through(name, inputs, outputs, sources):
            self._produce(outputs, [sources[0]] * len(outputs))
            return
        if name == "view" and sources[0][0] >= 0 and self.calls[sources[0][0]].name == "view":
            sources = self.calls[sources[0][0]].sources  # a view of a view is one view
        first = outputs[0]
        base = first._base if inputs and first is inputs[0] else None
        if base is not None:  # a view was written to: what it looks into changed as well
            sources.append(self._source_of(base))
            outputs = [*outputs, base]
        position, keyword, _ = OPTIONAL_TENSOR.get(name, (99, "", ""))
        given = kwargs.get(keyword, args[position] if len(args) > position else None)
        operators = operators_of(
            name, optional=given is not None, reduction=kwargs.get("reduction", "mean")
        )
        call = _Call(
            name=name,
            operators=operators,
            attributes=attributes_of(name, func, args, kwargs, first),
            sources=sources,
            shape=tuple(first.shape),
            dtype=str(first.dtype).removeprefix("torch."),
            num_outputs=len(outputs),
            neutral=_is_neutral(name, spelling, args),
        )
        self.calls.append(call)
        self._produce(outputs, [(len(self.calls) - 1, i) for i in range(len(outputs))])

    def _source_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._source.get(id(tensor), (PARAMETER, 0))

    def _produce(self, tensors: list[torch.Tensor], sources: list[tuple[int, int]]) -> None:
        for tensor, source in zip(tensors, sources, strict=True):
            self._alive.append(tensor)
            self._source[id(tensor)] = source

    def reachable(self, outputs: Any) -> list[OperatorNode]:
        """Nodes of the calls that `outputs` depend on, composites expanded."""
        pending = [self._source_of(tensor) for tensor in tensors_in(outputs)]
        needed: set[int] = set()
        while pending:
            index, output = pending.pop()
            if index < 0:
                continue
            self.calls[index].used.add(output)
            if index not in needed:
                needed.add(index)
                pending += self.calls[index].sources
        nodes: list[OperatorNode] = []
        last: dict[int, int] = {}  # call -> node that makes its outputs
        for index in sorted(needed):
            nodes += _expand(self.calls[index], last, len(nodes))
            last[index] = len(nodes) - 1
        return nodes


def _expand(call: _Call, last: dict[int, int], start: int) -> list[OperatorNode]:
    """The nodes of one call. All carry the shape of its output; inputs and attributes are those
    of the call.
    """
    inputs = tuple(last.get(index, index) for index, _ in call.sources)
    rank = tuple(pair for pair in call.attributes if pair[0] in ("rank", "dtype"))
    return [
        OperatorNode(
            operator=operator,
            call=call.name,
            part=part,
            attributes=call.attributes if part == 0 else rank,
            inputs=inputs if part == 0 else (start + part - 1,),
            shape=call.shape,
            dtype=call.dtype,
            used=tuple(sorted(call.used)) if call.num_outputs > 1 else (0,),
            neutral=call.neutral,
        )
        for part, operator in enumerate(call.operators)
    ]


def _passes_through(
    name: str,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    sources: list[tuple[int, int]],
) -> bool:
    if name in NOT_OPERATORS:
        return True
    if name not in LAYOUT or len(outputs) != 1:
        return False
    same = inputs[0].shape == outputs[0].shape and inputs[0].stride() == outputs[0].stride()
    return same or sources[0][0] == PARAMETER


def _specific(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    """Split names that mean different operations by what they are given."""
    if name in ("max", "min") and len(inputs) > 1:
        return name + "imum"
    if name == "getitem":
        if len(inputs) > 1:
            return "index"
        return "view" if inputs[0].numel() == outputs[0].numel() else "slice"  # x[None]
    return "index_put" if name == "setitem" else name


def _is_neutral(name: str, spelling: str, args: tuple[Any, ...]) -> bool:
    if name not in _NEUTRAL or spelling in REVERSED or len(args) < 2:
        return False
    left, right = args[0], args[1]
    return (
        isinstance(left, torch.Tensor) and type(right) in (int, float) and right == _NEUTRAL[name]
    )


def _run(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func`, or make empty outputs of the right shape where it does not work on meta."""
    if name in RECURRENT:
        return _recurrent(args)
    if name in VALUE_CHECKED:
        whole = kwargs.get("reduction", "mean") == "none"
        return torch.empty_like(args[0]) if whole else args[0].new_empty(())
    return func(*args, **kwargs)


def _recurrent(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Empty outputs of an LSTM, GRU or RNN: on meta, PyTorch would decompose it step by step, for
    seconds.

    Shapes as in torch.nn.LSTM: out (..., directions * hidden), states as given.
    """
    packed = not isinstance(
        args[3], bool
    )  # then (data, batch_sizes, state, weights, has_biases ...)
    data, states = args[0], list(tensors_in(args[2] if packed else args[1]))
    bidirectional = args[8] if packed else args[7]
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    output = data.new_empty((*data.shape[:-1], features))
    return (output, *(torch.empty_like(tensor) for tensor in states))
