"""Parameters of a solution under names of its own: which is which of the problem's.

KernelBench never loads a state dict. It constructs both models from one seed and relies on both
drawing the same, whatever they call it. A solution written for it need not have the problem's
names, and cannot be given the problem's parameters by name. So both are constructed from one seed
here too, each in its own process, and what holds the same values is the same. From then on new
values go by that map.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SHOWN = 5
"""Tensors of each side that an error names."""


class OtherNames(RuntimeError):
    """A model has parameters or buffers under other names than those it is to be given."""


class NoCounterpart(ValueError):
    """A tensor of the solution is none of the problem's."""


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A tensor of a model."""

    names: tuple[str, ...]
    """Several where the model has it more than once."""
    value: torch.Tensor
    parameter: bool

    def __str__(self) -> str:
        kind = str(self.value.dtype).removeprefix("torch.")
        return f"{self.names[0]} ({kind} {list(self.value.shape)})"


def load(
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    names: Mapping[str, str] | None = None,
) -> None:
    """Load a state dict, as strictly as torch does. With `names` what is not in them stays as it
    was constructed.

    Raises OtherNames where it is the names that do not fit, and what torch raises for the rest. It
    is tried first, since a model may take other names than it has by a method of its own.
    """
    if names is not None:
        kept = {own: value for own, value in model.state_dict().items() if own not in names}
        weights = {**renamed(weights, names), **kept}
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        if set(model.state_dict()) == set(weights):
            raise
        raise OtherNames(str(error)) from error


def renamed(
    weights: Mapping[str, torch.Tensor], names: Mapping[str, str] | None
) -> Mapping[str, torch.Tensor]:
    """The problem's tensors under the solution's names; `names` as `match_names` gives them, None
    where they are the same."""
    return weights if names is None else {own: weights[name] for own, name in names.items()}


def match_names(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """The problem's name for every name of the solution.

    `own`, `wanted`: state dicts of the solution's and the problem's model as their constructors
    left them under one seed, with `keep_vars`, so that parameters can be told from buffers.

    Counterparts have the same shape, dtype and bits, or they are the only ones left of their shape.
    What the solution has no tensor for may be something it does not need, such as a count of
    batches, and what is one value only, or nothing, may be its own: the checks on its outputs
    decide. Raises NoCounterpart.
    """
    mine = _tensors(own)
    theirs = [_held((n,), wanted) for n, value in wanted.items() if isinstance(value, torch.Tensor)]
    found: dict[str, str] = {}
    for group in _groups(mine):
        equal = [held for held in theirs if _equal(group[0].value, held.value)]
        for held, name in _paired(group, equal):
            found |= dict.fromkeys(held.names, name)
    for held, name in _last_of_their_shape(_left(mine, found), _left(theirs, found.values())):
        found |= dict.fromkeys(held.names, name)
    lost = [held for held in _left(mine, found) if not _constant(held.value)]
    if lost:
        raise NoCounterpart(
            "expected the parameters and buffers of ModelNew to have the names they have in Model, "
            "or the same values when both are constructed from one seed; got "
            f"{_listed(lost)}, of Model there is left {_listed(_left(theirs, found.values()))}; "
            "name them as Model does, or construct them as Model does and in the same order"
        )
    return found


def _tensors(state: Mapping[str, Any]) -> list[_Held]:
    """The tensors of a state dict in its order. One that it has under several names comes once, as
    it has one counterpart."""
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            names.setdefault(place if value.numel() else name, []).append(name)
    return [_held(tuple(same), state) for same in names.values()]


def _held(names: tuple[str, ...], state: Mapping[str, Any]) -> _Held:
    parameter = any(isinstance(state[name], torch.nn.Parameter) for name in names)
    return _Held(names=names, value=state[names[0]], parameter=parameter)


def _groups(tensors: Sequence[_Held]) -> list[list[_Held]]:
    """Each with those that are equal to it."""
    groups: list[list[_Held]] = []
    for held in tensors:
        for group in groups:
            if _equal(group[0].value, held.value):
                group.append(held)
                break
        else:
            groups.append([held])
    return groups


def _paired(mine: Sequence[_Held], theirs: Sequence[_Held]) -> list[tuple[_Held, str]]:
    """Counterparts among tensors that are all equal, such as the ones and zeros of norms.

    First those whose names agree but for dots, or in their last part; then parameters take
    parameters and buffers take buffers, in the order of definition, or regardless of that where
    there are too few of a kind, since a solution may keep parameters as buffers. Each is taken
    once, but for copies: values that were drawn, not set, tell what they are a copy of.
    """
    taken: dict[str, str] = {}
    for part in (_without_dots, _last_part):
        for held in _left(mine, taken):
            names = {part(name) for name in held.names}
            same = [t for t in _left(theirs, taken.values()) if part(t.names[0]) in names]
            if same:
                taken[held.names[0]] = same[0].names[0]
    rest, left = _left(mine, taken), _left(theirs, taken.values())
    kinds = [[held for held in rest if held.parameter is kind] for kind in (True, False)]
    kinds_left = [[held for held in left if held.parameter is kind] for kind in (True, False)]
    if any(len(ours) > len(others) for ours, others in zip(kinds, kinds_left, strict=True)):
        kinds, kinds_left = [rest], [left]
    for ours, others in zip(kinds, kinds_left, strict=True):
        taken |= {o.names[0]: t.names[0] for o, t in zip(ours, others, strict=False)}
    if theirs and not _constant(theirs[0].value):
        taken |= {held.names[0]: theirs[0].names[0] for held in _left(mine, taken)}
    return [(held, taken[held.names[0]]) for held in mine if held.names[0] in taken]


def _last_of_their_shape(
    mine: Sequence[_Held], theirs: Sequence[_Held]
) -> Iterator[tuple[_Held, str]]:
    """Pairs of which each side has one: a solution may draw a parameter a little otherwise."""
    for held in mine:
        alike = [t for t in theirs if _alike(held.value, t.value)]
        if len(alike) == 1 and sum(_alike(held.value, other.value) for other in mine) == 1:
            yield held, alike[0].names[0]


def _left(tensors: Sequence[_Held], taken: Collection[str]) -> list[_Held]:
    return [held for held in tensors if held.names[0] not in taken]


def _without_dots(name: str) -> str:
    return name.replace(".", "_")


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """In every bit, NaN and the sign of zero included."""
    return _alike(one, two) and torch.equal(_bytes(one), _bytes(two))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _constant(value: torch.Tensor) -> bool:
    """Whether it holds one value only, which says nothing about where it comes from."""
    return value.numel() == 0 or bool((value == value.reshape(-1)[0]).all())


def _listed(tensors: Sequence[_Held]) -> str:
    more = [f"{len(tensors) - SHOWN} more"] if len(tensors) > SHOWN else []
    return ", ".join([*map(str, tensors[:SHOWN]), *more]) or "nothing"
