"""Integer index expressions over bounded variables, simplified as they are built.

    Var        a loop variable with values 0 .. size-1
    Div, Mod   floor division and remainder of an Index by a positive constant
    Indirect   an integer that a kernel reads from memory (gather, embedding), with values 0 ..
               size-1
    Index      constant + sum of coefficient * atom: what loads and stores are addressed with
    Bound      low <= index < high: when a load is inside its tensor

Simplification rests on ranges: a reshape turns i*W + j into i*W + j, not into divisions, because j
< W is known. Division is floor division, as in Python; printed C code divides only where the value
is not negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Var:
    name: str
    size: int


@dataclass(frozen=True)
class Div:
    num: Index
    den: int


@dataclass(frozen=True)
class Mod:
    num: Index
    den: int


@dataclass(frozen=True)
class Indirect:
    value: Any  # an integer ir.Expr
    size: int


Atom = Var | Div | Mod | Indirect


@dataclass(frozen=True)
class Index:
    """const + sum(coefficient * atom), atoms distinct, coefficients not zero, in a fixed order."""

    terms: tuple[tuple[Atom, int], ...]
    const: int

    def __add__(self, other: Index | int) -> Index:
        other = lift(other)
        return _sum([*self.terms, *other.terms], self.const + other.const)

    def __sub__(self, other: Index | int) -> Index:
        return self + lift(other) * -1

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index((), 0)
        return Index(tuple((a, c * factor) for a, c in self.terms), self.const * factor)

    def __floordiv__(self, den: int) -> Index:
        return _floordiv(self, den)

    def __mod__(self, den: int) -> Index:
        return _mod(self, den)

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value, both inclusive (not always attained)."""
        low = high = self.const
        for atom, c in self.terms:
            a, b = _atom_bounds(atom)
            low, high = low + min(c * a, c * b), high + max(c * a, c * b)
        return low, high

    @cached_property
    def variables(self) -> frozenset[Var]:
        found: set[Var] = set()
        for atom, _ in self.terms:
            if isinstance(atom, Var):
                found.add(atom)
            elif isinstance(atom, Div | Mod):
                found |= atom.num.variables
            else:
                found |= atom.value.variables
        return frozenset(found)

    def coefficient(self, var: Var) -> int:
        return next((c for atom, c in self.terms if atom == var), 0)


@dataclass(frozen=True)
class Bound:
    index: Index
    low: int
    high: int


def lift(value: Index | int) -> Index:
    return value if isinstance(value, Index) else Index((), value)


def var(name: str, size: int) -> Index:
    """A loop variable as an index; a loop of one step is the constant 0."""
    return Index(((Var(name, size), 1),), 0) if size > 1 else Index((), 0)


def bound(index: Index, low: int, high: int) -> tuple[Bound, ...]:
    """The condition low <= index < high; empty when its range already proves it."""
    least, greatest = index.bounds
    return () if least >= low and greatest < high else (Bound(index, low, high),)


def linearize(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """The position of `index` in a contiguous tensor of `shape`."""
    flat = lift(0)
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat


def delinearize(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The inverse of `linearize`."""
    out: list[Index] = []
    stride = math.prod(shape)
    for size in shape:
        stride //= max(size, 1)
        out.append((flat // max(stride, 1)) % size if size > 1 else lift(0))
    return tuple(out)


def substitute(index: Index, replace: dict[Var, Index], value: Callable[[Any], Any]) -> Index:
    """`index` with variables replaced; `value` does the same for the value inside an Indirect."""
    out = lift(index.const)
    for atom, c in index.terms:
        if isinstance(atom, Var):
            part = replace.get(atom, Index(((atom, 1),), 0))
        elif isinstance(atom, Div):
            part = substitute(atom.num, replace, value) // atom.den
        elif isinstance(atom, Mod):
            part = substitute(atom.num, replace, value) % atom.den
        else:
            part = Index(((Indirect(value(atom.value), atom.size), 1),), 0)
        out = out + part * c
    return out


def evaluate(index: Index, values: dict[Var, int]) -> int:
    """The number an index stands for; for tests and for checks of a plan. No Indirect inside."""
    total = index.const
    for atom, c in index.terms:
        if isinstance(atom, Var):
            total += c * values[atom]
        elif isinstance(atom, Div):
            total += c * (evaluate(atom.num, values) // atom.den)
        elif isinstance(atom, Mod):
            total += c * (evaluate(atom.num, values) % atom.den)
        else:
            raise TypeError("an indirect index has no value without its tensor")
    return total


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Var | Indirect):
        return 0, atom.size - 1
    low, high = atom.num.bounds
    if isinstance(atom, Div):
        return low // atom.den, high // atom.den
    return 0, min(atom.den - 1, high) if low >= 0 else atom.den - 1


def _sum(terms: list[tuple[Atom, int]], const: int) -> Index:
    merged: dict[Atom, int] = {}
    for atom, c in terms:
        merged[atom] = merged.get(atom, 0) + c
    out = Index(tuple(sorted(((a, c) for a, c in merged.items() if c), key=_order)), const)
    return _recombine(out)


def _order(term: tuple[Atom, int]) -> tuple[int, str]:
    return -abs(term[1]), repr(term[0])


def _recombine(index: Index) -> Index:
    """c*d * (x // d) + c * (x % d) is c * x."""
    coefficients = dict(index.terms)
    for atom, c in index.terms:
        if not isinstance(atom, Mod):
            continue
        num = atom.num
        quotient = num // atom.den
        if len(quotient.terms) == 1 and not quotient.const:
            other, k = quotient.terms[0]
            if coefficients.get(other) == c * atom.den * k or (
                k == 1 and coefficients.get(other) == c * atom.den
            ):
                rest = [(a, x) for a, x in index.terms if a not in (atom, other)]
                return _sum([*rest, *(num * c).terms], index.const + num.const * c)
    return index


def _split(index: Index, den: int) -> tuple[Index, Index]:
    """index = den * whole + rest, taking into `whole` every term whose coefficient den divides."""
    whole = tuple((a, c // den) for a, c in index.terms if c % den == 0)
    rest = tuple((a, c) for a, c in index.terms if c % den)
    return Index(whole, index.const // den), Index(rest, index.const % den)


def _coarse(rest: Index, den: int) -> tuple[Index, Index, int] | None:
    """rest = step * coarse + fine with 0 <= fine < step and step a divisor of den, if there is
    such a step."""
    for step in sorted({math.gcd(den, c) for _, c in rest.terms}, reverse=True):
        if step == 1:
            return None
        fine = Index(tuple((a, c) for a, c in rest.terms if c % step), rest.const % step)
        low, high = fine.bounds
        if fine.terms and low >= 0 and high < step:
            coarse = tuple((a, c // step) for a, c in rest.terms if c % step == 0)
            return Index(coarse, rest.const // step), fine, step
    return None


def _floordiv(index: Index, den: int) -> Index:
    if den == 1:
        return index
    whole, rest = _split(index, den)
    low, high = rest.bounds
    if low // den == high // den:
        return whole + low // den
    common = math.gcd(den, *(c for _, c in rest.terms))
    if common > 1:  # floor((g*a + b) / (g*d)) with 0 <= b < g is floor(a / d)
        scaled = Index(tuple((a, c // common) for a, c in rest.terms), rest.const // common)
        return whole + _floordiv(scaled, den // common)
    parts = _coarse(rest, den)
    if parts is not None:
        return whole + _floordiv(parts[0], den // parts[2])
    if len(rest.terms) == 1 and not rest.const and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Div):
            return whole + _floordiv(atom.num, atom.den * den)
    return whole + Index(((Div(rest, den), 1),), 0)


def _mod(index: Index, den: int) -> Index:
    if den == 1:
        return lift(0)
    _, rest = _split(index, den)
    low, high = rest.bounds
    if low // den == high // den:
        return rest - (low // den) * den
    parts = _coarse(rest, den)
    if parts is not None:
        return _mod(parts[0], den // parts[2]) * parts[2] + parts[1]
    if len(rest.terms) == 1 and not rest.const and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Mod) and atom.den % den == 0:
            return _mod(atom.num, den)
    common = math.gcd(den, *(c for _, c in rest.terms))
    if common > 1 and rest.const % common == 0:  # (g*a) mod (g*d) = g * (a mod d)
        scaled = Index(tuple((a, c // common) for a, c in rest.terms), rest.const // common)
        return _mod(scaled, den // common) * common
    return Index(((Mod(rest, den), 1),), 0)
