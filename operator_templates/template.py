"""What an operator template is: everything the composer and the renderer know about one operator.

Domain    a distribution of inputs, as source text and as lanes
Operand   a further tensor the operator needs, and where it may come from
Cost      what eager pays for it
Template  one operator, as data; the catalogue is a list of them
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from operator_templates import lanes
from operator_templates.lanes import Rule
from operator_templates.values import Call, Lanes, Shape, Trait, Traits, Value
from schemas.records import Precision, Target

Draw = Callable[[Random, Shape], "dict[str, Any] | None"]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A distribution of input tensors. `text` has the fields {shape}, {dtype} and, for integers,
    {below}.
    """

    name: str
    text: str
    lanes: Callable[[str], Lanes]
    low: float = -math.inf
    integer: bool = False

    def value(self, shape: Shape, salt: str) -> Value:
        sample = lanes.rounded(self.lanes(salt))
        return Value(shape=shape, lanes=sample, low=self.low, integer=self.integer)


REAL = Domain(name="real", text="torch.randn({shape}{dtype})", lanes=lanes.normal)
WIDE = Domain(
    name="wide",
    text="torch.randn({shape}{dtype}) * 1.5 + 0.5",
    lanes=lambda salt: tuple(1.5 * z + 0.5 for z in lanes.normal(salt)),
)
POSITIVE = Domain(
    name="positive",
    text="torch.rand({shape}{dtype}) + 0.5",
    lanes=lambda salt: tuple(u + 0.5 for u in lanes.uniform(salt)),
    low=0.5,
)
UNIT = Domain(name="unit", text="torch.rand({shape}{dtype})", lanes=lanes.uniform, low=0.0)
SIGN = Domain(
    name="sign",
    text="torch.sign(torch.randn({shape}{dtype}))",
    lanes=lambda salt: tuple(math.copysign(1.0, z) for z in lanes.normal(salt)),
)
INDEX = Domain(
    name="index",
    text="torch.randint(0, {below}, ({shape}))",
    lanes=lanes.uniform,
    low=0.0,
    integer=True,
)

MASK = Domain(
    name="mask", text="torch.rand({shape}) > 0.5", lanes=lanes.uniform, low=0.0, integer=True
)


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A further tensor. A joinable one may also be the output of an earlier operator of the same
    shape.
    """

    name: str
    domain: Domain = REAL
    shape: Callable[[Call], Shape] = lambda call: call.shape
    below: Callable[[Call], int] = lambda call: 0
    joinable: bool = False


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What eager pays, beyond reading every operand and writing the output once.

    `cpu_ns` is arithmetic time per element on two cores, `passes` how many times CUDA eager moves
    the bytes (unfused pieces, uncoalesced access), `flops` the multiply-adds times two of a matmul
    or convolution.
    """

    cpu_ns: float = 0.0
    passes: float = 1.0
    flops: Callable[[Call], int] = lambda call: 0


def same_shape(call: Call) -> Shape:
    return call.shape


def no_traits(call: Call) -> Traits:
    return frozenset()


def no_attributes(rng: Random, shape: Shape) -> dict[str, Any]:
    return {}


def unbounded(call: Call) -> float:
    return -math.inf


NO_CPU_BF16 = frozenset({(Target.CPU, Precision.BF16)})


@dataclass(frozen=True, kw_only=True)
class Template:
    """One operator.

    `forward` and `init` are source text with fields: {x} and the operands' names, {m} for the
    module or parameter made by `init`, {dtype} where a dtype goes, and attributes by name.
    Attributes used in `init` become constructor arguments of the problem; those used in `forward`
    are written out.
    """

    name: str  # as declared in a problem's `ops`
    family: str
    doc: str  # one line, for the problem's docstring
    canonical: tuple[str, ...]  # call names it leaves in a trace
    forward: str
    sample: Rule  # lanes of the output
    variant: str = ""  # tells templates of one name apart
    init: str = ""
    attribute: str = ""  # what the problem calls `init`'s result
    ranks: tuple[int, ...] = (2, 3, 4, 5)
    domain: Domain = REAL  # what the first operand must satisfy, or is drawn from
    operands: tuple[Operand, ...] = ()
    draw: Draw = no_attributes  # attributes for a shape; None when the shape does not suit
    shape: Callable[[Call], Shape] = same_shape
    low: Callable[[Call], float] = unbounded
    leaves: Callable[[Call], Traits] = no_traits  # traits of the output
    blind: Callable[[Call], Traits] = no_traits  # traits of the first operand that would vanish
    keeps: frozenset[Trait] = frozenset()  # traits that pass through
    cost: Cost = Cost()
    lacks: frozenset[tuple[Target, Precision]] = frozenset()  # no kernel in PyTorch
    exponential: bool = False  # grows exponentially: large or heavy-tailed inputs overflow
    dense: bool = False  # a matmul or convolution: TF32 changes it

    @property
    def key(self) -> str:
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def has_parameters(self) -> bool:
        return "{dtype}" in self.init

    @property
    def arity(self) -> int:
        return 1 + len(self.operands)

    def output(self, call: Call) -> Value:
        """The value this template makes of a call."""
        kept = {t for value in call.inputs for t in value.traits if t[0] in self.keeps}
        return Value(
            shape=self.shape(call),
            lanes=self.sample(call),
            low=self.low(call),
            traits=frozenset(kept) | self.leaves(call),
        )

    def but(self, **changes: Any) -> Template:
        """A sibling that differs in a few fields."""
        return replace(self, **changes)
