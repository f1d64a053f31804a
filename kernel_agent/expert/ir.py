"""What a kernel computes: typed expressions, and values defined by what one of their elements is.

    Expr     a node of an expression DAG (equal nodes are one object): load, const, index, local,
             or an operation
    Value    a tensor: name, shape, dtype
      Source   a model input, parameter or buffer
      Map      every element is an expression of elements of other values (pointwise operators and
               views)
      Reduce   every element combines a body over some dimensions of a domain (sums, norms, matmul,
               conv, pooling)
      Scan     every element combines a body over the positions up to its own, along one dimension
    Graph    sources, outputs
    Builder  turns an element into an Expr, loading what is stored and expanding the rest in place

Expression types are what the arithmetic is done in: float (also for bfloat16 tensors), double,
int, bool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kernel_agent.expert.index import Bound, Index, Var, bound, lift, linearize, substitute

COMPUTE = {
    "float32": "float",
    "bfloat16": "float",
    "float64": "double",
    "int64": "int",
    "int32": "int",
    "int16": "int",
    "int8": "int",
    "uint8": "int",
    "bool": "bool",
}
ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
RANK = ("bool", "int", "float", "double")


class Unsupported(Exception):
    """The expert cannot handle this problem; the message names the operator and what about it."""


class NotFusable(Exception):
    """A group of values cannot share one kernel; the planner tries another grouping."""


@dataclass(frozen=True, eq=False)
class Expr:
    """One operation. `attr`: (buffer, Index, bounds, value out of bounds) of a load, the value of
    a const, the Index of an index, the name of a local, (low, high) of an inside test."""

    op: str
    args: tuple[Expr, ...]
    type: str
    attr: Any
    variables: frozenset[Var]


_interned: weakref.WeakValueDictionary[Any, Expr] = weakref.WeakValueDictionary()


def expr(op: str, args: Sequence[Expr] = (), type: str = "float", attr: Any = None) -> Expr:
    """The one Expr of this description."""
    if op == "index" and not attr.terms:
        return const(attr.const, "int")
    key = (op, tuple(args), type, _Exact(attr) if op == "const" else attr)
    found = _interned.get(key)
    if found is None:
        variables = frozenset().union(*(a.variables for a in args))
        if op == "index":
            variables |= attr.variables
        elif op == "load":
            variables |= attr[1].variables
            variables = variables.union(*(b.index.variables for b in attr[2]))
        found = Expr(op, tuple(args), type, attr, variables)
        _interned[key] = found
    return found


@dataclass(frozen=True)
class _Exact:
    """A constant as a dictionary key: 0.0 and -0.0 differ, and NaN equals itself."""

    text: str

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "text", repr(value))


def const(value: float | int | bool, type: str) -> Expr:
    cast: dict[str, Callable[[Any], Any]] = {"int": int, "bool": bool}
    return expr("const", (), type, cast.get(type, float)(value))


def index_value(index: Index) -> Expr:
    """An index as an integer value."""
    return expr("index", (), "int", index)


def cast(e: Expr, type: str) -> Expr:
    if e.type == type:
        return e
    return const(e.attr, type) if e.op == "const" else expr("cast", (e,), type)


def rewrite(e: Expr, replace: dict[Var, Index], memo: dict[Expr, Expr]) -> Expr:
    """The expression with its loop variables replaced."""
    if e in memo or not e.variables & replace.keys():
        return memo.get(e, e)

    def sub(index: Index) -> Index:
        return substitute(index, replace, lambda v: rewrite(v, replace, memo))

    attr = e.attr
    if e.op == "index":
        out = index_value(sub(attr))
    elif e.op == "load":
        bounds = tuple(p for b in attr[2] for p in bound(sub(b.index), b.low, b.high))
        out = expr("load", (), e.type, (attr[0], sub(attr[1]), bounds, attr[3]))
    else:
        out = expr(e.op, [rewrite(a, replace, memo) for a in e.args], e.type, attr)
    memo[e] = out
    return out


def walk(roots: Sequence[Expr]) -> Iterator[Expr]:
    """Every node once, arguments before their users; values inside indirect indices are
    included."""
    seen: set[Expr] = set()

    def visit(e: Expr) -> Iterator[Expr]:
        if e in seen:
            return
        seen.add(e)
        for part in (*e.args, *_inside(e)):
            yield from visit(part)
        yield e

    for root in roots:
        yield from visit(root)


def _inside(e: Expr) -> Iterator[Expr]:
    if e.op == "index":
        yield from indirect_values(e.attr)
    elif e.op == "load":
        yield from indirect_values(e.attr[1])
        for b in e.attr[2]:
            yield from indirect_values(b.index)


def indirect_values(index: Index) -> Iterator[Expr]:
    for atom, _ in index.terms:
        if hasattr(atom, "value"):
            yield atom.value
        elif hasattr(atom, "num"):
            yield from indirect_values(atom.num)


@dataclass(eq=False)
class Value:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> str:
        return COMPUTE[self.dtype]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return ()


@dataclass(eq=False)
class Source(Value):
    kind: str  # input | parameter | buffer
    source: int | str  # position or fully qualified name
    contiguous: bool = True


Body = Callable[["Builder", tuple[Index, ...]], Expr]


@dataclass(eq=False)
class Map(Value):
    body: Body
    operands: tuple[Value, ...]
    op: str
    view: bool = False  # moves elements, computes nothing

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.operands


@dataclass(eq=False)
class Reduce(Value):
    """`shape` is the domain without the reduced dims; `body` takes an index of the whole domain."""

    kind: str  # sum | prod | max | min | any | all | argmax | argmin
    domain: tuple[int, ...]
    dims: tuple[int, ...]
    body: Body
    operands: tuple[Value, ...]
    op: str
    reuse: bool = False  # reads each input element many times (matmul, conv, overlapping windows)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.operands


@dataclass(eq=False)
class Scan(Value):
    kind: str  # sum | prod | max | min | logaddexp
    dim: int
    body: Body
    operands: tuple[Value, ...]
    op: str

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.operands


@dataclass
class Graph:
    sources: list[Source]
    outputs: list[Value]
    form: str  # tensor | tuple | list

    def values(self) -> list[Value]:
        """Every value the outputs need, operands first."""
        order: list[Value] = []
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            if value in seen:
                return
            seen.add(value)
            for operand in value.inputs:
                visit(operand)
            order.append(value)

        for output in self.outputs:
            visit(output)
        return order


@dataclass
class Builder:
    """Evaluates elements. `stored` says which values a kernel may load; `local` may answer first,
    with a value the kernel already holds (None: it does not)."""

    stored: Callable[[Value], bool]
    local: Callable[[Value, tuple[Index, ...]], Expr | None] = lambda value, index: None
    mask: tuple[Bound, ...] = ()
    memo: dict[Any, Expr] = field(default_factory=dict)

    def load(self, value: Value, index: Sequence[Index | int]) -> Expr:
        place = tuple(lift(i) for i in index)
        key = (value, place, self.mask)
        if key not in self.memo:
            self.memo[key] = self._load(value, place)
        return self.memo[key]

    def _load(self, value: Value, place: tuple[Index, ...]) -> Expr:
        held = self.local(value, place)
        if held is not None:
            return held
        if isinstance(value, Source) or self.stored(value):
            flat = linearize(place, value.shape)
            return expr("load", (), value.type, (value.name, flat, self.mask, 0))
        if isinstance(value, Map):
            return cast(value.body(self, place), value.type)
        raise NotFusable(f"{value.name} has to be stored before it is read")

    @contextmanager
    def within(self, bounds: Sequence[Bound]) -> Iterator[None]:
        """Loads happen only where the bounds hold, and give 0 elsewhere."""
        before, self.mask = self.mask, (*self.mask, *(b for b in bounds if b not in self.mask))
        yield
        self.mask = before

    def where(self, bounds: Sequence[Bound], inside: Callable[[], Expr], outside: Expr) -> Expr:
        """`inside()` where all bounds hold, `outside` elsewhere."""
        if not bounds:
            return inside()
        with self.within(bounds):
            value = inside()
        whole = (*self.mask, *bounds)
        if (
            value.op == "load"
            and value.attr[2] == whole
            and outside.op == "const"
            and not self.mask
        ):
            return expr("load", (), value.type, (*value.attr[:3], cast(outside, value.type).attr))
        out = value
        for b in reversed(bounds):
            test = expr("inside", (index_value(b.index),), "bool", (b.low, b.high))
            out = expr("where", (test, out, cast(outside, value.type)), value.type)
        return out
