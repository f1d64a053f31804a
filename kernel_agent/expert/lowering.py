"""The traced ATen graph (plain JSON) to an ir.Graph: one rule per operator, looked up by name.

A rule is a function (node, *args, **kwargs) -> Value, or a list of values for several results. To
teach the expert an operator, write a rule in the lower_* file of its family. An operator without a
rule raises Unsupported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kernel_agent.expert.index import Index, lift
from kernel_agent.expert.ir import (
    COMPUTE,
    Builder,
    Expr,
    Graph,
    Map,
    Source,
    Unsupported,
    Value,
    cast,
    const,
)
from kernel_agent.expert.printer import RESERVED

FAMILIES = ("lower_pointwise", "lower_views", "lower_reduce", "lower_windows", "lower_indexing")

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


@dataclass(frozen=True)
class Node:
    """One traced operator: its unique name, and the shape and dtype of its result (lists for
    several results)."""

    name: str
    op: str
    shape: Any
    dtype: Any

    @property
    def type(self) -> str:
        return COMPUTE[self.dtype]

    def unsupported(self, why: str) -> Unsupported:
        return Unsupported(f"{self.op}: {why}")


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def lower(traced: dict[str, Any]) -> Graph:
    """The values of a traced graph. Raises Unsupported naming the first operator there is no rule
    for."""
    for family in FAMILIES:
        import_module(f"kernel_agent.expert.{family}")
    values: dict[str, Any] = {}
    sources: list[Source] = []
    for entry in traced["placeholders"]:
        if entry["shape"] is None:
            raise Unsupported(f"forward takes tensors only; input {entry['source']} is none")
        source = Source(
            name=_source_name(entry["title"], [s.name for s in sources]),
            shape=tuple(entry["shape"]),
            dtype=_known(entry["dtype"], "input"),
            kind=entry["kind"],
            source=entry["source"],
            contiguous=entry["contiguous"],
        )
        sources.append(source)
        values[entry["name"]] = source
    for position, entry in enumerate(traced["nodes"]):
        values[entry["name"]] = _lower_node(entry, position, values)
    outputs = [values[name] for name in traced["outputs"]["names"]]
    if any(0 in value.shape for value in outputs):
        raise Unsupported("an output has no elements")
    return Graph(sources, outputs, traced["outputs"]["form"])


def _source_name(title: str, taken: list[str]) -> str:
    """A C identifier for an input or parameter that no generated name can equal (those end in
    _<number>)."""
    name = re.sub(r"\W+", "_", title).strip("_") or "x"
    name = f"p_{name}" if name[0].isdigit() else name
    if name in RESERVED or re.search(r"_v?\d+$", name) or name.startswith(("row_", "fused_")):
        name += "_in"
    while name in taken:
        name += "_"
    return name


def _lower_node(entry: dict[str, Any], position: int, values: dict[str, Any]) -> Any:
    op = entry["op"]
    args = _decode(entry["args"], values)
    kwargs = {key: _decode(value, values) for key, value in entry["kwargs"].items()}
    if op == "getitem":
        return args[0][args[1]]
    if (
        op not in RULES and "_." in f"{op}."
    ):  # mutations left by a decomposition, of values it alone uses
        name, _, overload = op.partition(".")
        op = name.rstrip("_") + (f".{overload}" if overload else "")
    if op not in RULES:
        raise Unsupported(f"{op}: no rule for this operator")
    word = op.split("::")[-1].split(".")[0].strip("_")
    node = Node(f"{word}_{position}", op, _tuples(entry["shape"]), entry["dtype"])
    if op == "constant":
        return RULES[op](node, entry.get("constant"))
    for name in node.dtype if isinstance(node.dtype, list) else [node.dtype]:
        _known(name, op)
    return RULES[op](node, *args, **kwargs)


def _known(dtype: str, where: str) -> str:
    if dtype not in COMPUTE:
        raise Unsupported(f"{where}: dtype {dtype}")
    return dtype


def _tuples(shape: Any) -> Any:
    return tuple(_tuples(part) for part in shape) if isinstance(shape, list) else shape


def _decode(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, values) for item in value]
    if not isinstance(value, dict):
        return value
    if "ref" in value:
        return values[value["ref"]]
    if "float" in value:
        return float(value["float"])
    return value["dtype"]


def operand_index(index: Sequence[Index], shape: Sequence[int]) -> list[Index]:
    """The index of an operand that is broadcast to the result indexed by `index`."""
    tail = index[len(index) - len(shape) :]
    return [lift(0) if size == 1 else i for i, size in zip(tail, shape, strict=True)]


def as_expr(b: Builder, x: Any, index: Sequence[Index], type: str) -> Expr:
    """An operand (tensor or Python number) at a broadcast index, in the given expression type."""
    if isinstance(x, Value):
        return cast(b.load(x, operand_index(index, x.shape)), type)
    return const(x, type)


def tensors(*parts: Any) -> tuple[Value, ...]:
    return tuple(part for part in parts if isinstance(part, Value))


def pointwise(
    node: Node, function: Callable[..., Expr], *operands: Any, type: str | None = None
) -> Map:
    """A Map whose element is `function` of its operands' elements, in `type` (default: the
    result's type)."""
    work = type or node.type

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return function(*(as_expr(b, x, index, work) for x in operands))

    return Map(node.name, node.shape, node.dtype, body, tensors(*operands), node.op)


def view(node: Node, x: Value, place: Callable[[tuple[Index, ...]], Sequence[Index | int]]) -> Map:
    """A Map that only moves elements: `place` gives the operand's index for an index of the
    result."""

    def body(b: Builder, index: tuple[Index, ...]) -> Expr:
        return b.load(x, list(place(index)))

    return Map(node.name, node.shape, node.dtype, body, (x,), node.op, view=True)


def normal_dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def normal_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims as sorted non-negative numbers; none given means all."""
    if dims is None or dims == []:
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(normal_dim(d, rank) for d in listed)) if rank else ()


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)
