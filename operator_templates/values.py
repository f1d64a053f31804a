"""What is known about a tensor before it exists.

    Value   one edge of a problem's graph: shape, lower bound, traits, and a small sample of its
            numbers
    Trait   a structural fact that later operators may be blind to (zero mean over some dims, rows
            that sum to one ...)
    Call    one application of an operator: its input values and its attributes

The sample ("lanes") is 64 numbers drawn from the distribution of the tensor's elements. Pointwise
operators map it lane by lane, so lane i of every value of a graph belongs together and correlations
(x + f(x)) are kept. Sign, range, scale, saturation and near-constancy are all read off the lanes; a
ReLU that changes nothing is one that leaves them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Shape = tuple[int, ...]
Lanes = tuple[float, ...]
Attributes = Mapping[str, Any]


class Trait(StrEnum):
    """Structural facts, each about a set of dims."""

    CENTRED = "centred"  # the mean over these dims is zero
    SIMPLEX = "simplex"  # non-negative, and the sum over these dims is one
    SHIFTED = "shifted"  # the last additive term is the same along these dims
    SCALED = "scaled"  # the last factor is the same along these dims
    MOVED = "moved"  # the last operator only changed the order along these dims


Traits = frozenset[tuple[Trait, frozenset[int]]]

EQUIVARIANT = frozenset({Trait.SHIFTED, Trait.SCALED})
"""What survives an operator that commutes with shifts and positive factors: pooling, running
maxima, copies. Kept too often rather than too seldom: a false refusal costs one draw.
"""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One tensor of a problem. `low` is a bound every element respects; lanes cannot prove one."""

    shape: Shape
    lanes: Lanes
    low: float = -math.inf
    traits: Traits = frozenset()
    integer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One application of a template: what its rules see. `salt` names the call's own random
    numbers.
    """

    inputs: tuple[Value, ...]
    attributes: Attributes = field(default_factory=dict)
    salt: str = ""

    @property
    def x(self) -> Value:
        """The first operand."""
        return self.inputs[0]

    @property
    def shape(self) -> Shape:
        """The shape of the first operand."""
        return self.inputs[0].shape

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    @property
    def dim(self) -> int:
        """Attribute `dim`, counted from the front."""
        return int(self.attributes["dim"]) % len(self.shape)

    def all_dims(self, *, but: int | None = None) -> frozenset[int]:
        """Every dim of the first operand, except `but` (which may be negative)."""
        rank = len(self.shape)
        return frozenset(range(rank)) - (frozenset() if but is None else {but % rank})


def mean(lanes: Lanes) -> float:
    return math.fsum(lanes) / len(lanes)


def rms(lanes: Lanes) -> float:
    return math.sqrt(math.fsum(v * v for v in lanes) / len(lanes))


def std(lanes: Lanes) -> float:
    centre = mean(lanes)
    return rms(tuple(v - centre for v in lanes))


def log_mean_exp(x: Sequence[float]) -> float:
    """log(mean(exp(x))), without overflow."""
    top = max(x)
    return top + math.log(math.fsum(math.exp(v - top) for v in x) / len(x))


def distance(a: Lanes, b: Lanes) -> float:
    """Root mean square difference, lane by lane, relative to the scale of `b`."""
    return rms(tuple(u - v for u, v in zip(a, b, strict=True))) / max(rms(b), 1e-30)
