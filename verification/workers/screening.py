"""The admission rules that run inside the reference's process: is this a problem worth training on?

Each rule is a function of the loaded reference that returns None or (reason, detail). A rule
that asks "does the output move?" uses the verifier's own budget: a change that a verdict would
not see is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from runtime.operator_names import LAYOUT, NOT_OPERATORS, SPLITS, call_name
from runtime.problem_code import load_module, make_inputs
from runtime.trace import trace_operators
from schemas.codec import to_json
from schemas.records import AdmitReason
from verification.workers.correctness import FLOOR_ULPS, Expected, NotInFp64, compare, figures
from verification.workers.inputs import checksum, without_model

if TYPE_CHECKING:
    from verification.workers.reference import Reference

Finding = tuple[AdmitReason, str]
SAMPLE_SIZE = 1 << 16
MAX_EAGER_ERROR = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Eager's largest error against fp64, of the output's scale, beyond which nothing can be judged."""


def screen(reference: Reference, seed: int) -> dict[str, Any]:
    """Run every rule that needs neither compiler nor clock, in order of cost.

    Leaves what `compile` and `check_compiled` need with the reference. Returns {"reason", "detail",
    "seconds"} of the first rule that refuses (reason None when none does), and then the operator
    graph, the least bytes and the FLOPs. `seconds` is by rule.
    """
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def answer(found: Finding | None, **more: Any) -> dict[str, Any]:
        reason, detail = (str(found[0]), found[1]) if found else (None, "")
        return {"reason": reason, "detail": detail, "seconds": seconds, **more}

    inputs = make_inputs(reference.module, reference.device, seed)
    found = _usable(reference, inputs, seed) or _repeats(reference, inputs)
    if found is not None:
        return answer(found)
    try:
        _, expected = reference.expected_of(inputs)
    except NotInFp64 as error:
        return answer((AdmitReason.REFERENCE_INACCURATE, str(error)))
    found = _finite(expected) or _accurate(expected) or _varies(expected)
    if found is not None:
        return answer(found)
    sample = Sample(expected, seed)
    seconds["expected"] = time.perf_counter() - started
    for rule in RULES:
        started = time.perf_counter()
        found = rule(reference, inputs, sample, seed)
        seconds[rule.__name__.strip("_")] = time.perf_counter() - started
        if found is not None:
            return answer(found)
    reference.example, reference.sample = inputs, sample
    min_bytes = _min_bytes(reference, inputs, expected)
    sample.expected = []  # gigabytes, and the sample holds what is compared from here on
    return answer(
        None,
        nodes=to_json(trace_operators(reference.module)),
        min_bytes=min_bytes,
        flops=_flops(reference, inputs),
    )


def _usable(reference: Reference, inputs: list[Any], seed: int) -> Finding | None:
    """Whether solutions can be given inputs of their own, and other ones every time."""
    found = _unknown_dtype("input", inputs)
    if found is not None:
        return found
    for index, value in enumerate(inputs):
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)) and not (
            isinstance(value, torch.Tensor) and value.layout == torch.strided
        ):
            return AdmitReason.UNSUPPORTED, f"input {index}: expected a dense tensor or a number"
    try:
        apart = load_module(without_model(reference.code), "inputs_alone")
        same = checksum(make_inputs(apart, reference.device, seed)) == checksum(inputs)
    except torch.OutOfMemoryError:
        raise  # of others, perhaps, and asked again
    except Exception as error:
        return AdmitReason.UNSUPPORTED, f"get_inputs() needs the model's class: {error!s:.200}"
    return None if same else (AdmitReason.UNSUPPORTED, "get_inputs() asks the model's class")


def _unknown_dtype(kind: str, values: list[Any]) -> Finding | None:
    for index, value in enumerate(values):
        if _floating(value) and value.dtype not in FLOOR_ULPS:
            detail = f"{kind} {index}: {value.dtype} is neither drawn nor compared yet"
            return AdmitReason.UNSUPPORTED, detail
    return None


def _repeats(reference: Reference, inputs: list[Any]) -> Finding | None:
    before = checksum(inputs)
    _, first = reference.run(reference.model, inputs)
    if checksum(inputs) != before:
        return AdmitReason.NOT_REPEATABLE, "it changes its inputs"
    found = _unknown_dtype("output", first)
    if found is not None:
        return found
    if not _same(reference.run(reference.model, inputs)[1], [_itself(value) for value in first]):
        return AdmitReason.NOT_REPEATABLE, "the same inputs give another output"
    return None


def _finite(expected: list[Expected]) -> Finding | None:
    for index, output in enumerate(expected):
        if output.floating and not bool(torch.isfinite(output.eager).all()):
            return AdmitReason.NOT_FINITE, f"output {index} has NaN or infinity on natural inputs"
    return None


def _accurate(expected: list[Expected]) -> Finding | None:
    for index, output in enumerate(expected):
        if output.floating:
            error, _ = figures([output.eager], output.exact)[0]
            if error > MAX_EAGER_ERROR.get(output.eager.dtype, 1e-6):
                return (
                    AdmitReason.REFERENCE_INACCURATE,
                    f"output {index}: eager is {error:.3g} off fp64",
                )
    return None


def _varies(expected: list[Expected]) -> Finding | None:
    for index, output in enumerate(expected):
        value = output.exact
        if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            return AdmitReason.CONSTANT_OUTPUT, f"output {index} holds a single value"
    return None


def _fresh_inputs(
    reference: Reference, inputs: list[Any], sample: Sample, seed: int
) -> Finding | None:
    if not any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in inputs):
        return AdmitReason.FIXED_INPUTS, "no input is drawn"
    other = make_inputs(reference.module, reference.device, seed + 1)
    for index, (one, two) in enumerate(zip(inputs, other, strict=True)):
        if isinstance(one, torch.Tensor) and one.numel() > 1 and torch.equal(one, two):
            return AdmitReason.FIXED_INPUTS, f"input {index} does not depend on the seed"
    return None


def _trivial(reference: Reference, inputs: list[Any], sample: Sample, seed: int) -> Finding | None:
    others = make_inputs(reference.module, reference.device, seed + 1)
    _, elsewhere = reference.run(reference.model, others)
    for name, answer in _trivial_answers(inputs, sample.expected, elsewhere):
        if sample.same(answer) and _same(answer, sample.expected):
            return AdmitReason.TRIVIAL_ANSWER, f"{name} would pass"
    return None


def _trivial_answers(
    inputs: list[Any], expected: list[Expected], elsewhere: list[torch.Tensor]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """`elsewhere`: the outputs for other inputs. One number is its own mean, and one row the first
    of all: there the answer to other inputs is what says nothing."""
    eager = [output.eager for output in expected]
    pairs = list(zip(eager, elsewhere, strict=True))
    yield "zeros", [torch.zeros_like(e) for e in eager]
    yield "ones", [torch.ones_like(e) for e in eager]
    means = [_wide(e if e.numel() > 1 else other).mean().item() for e, other in pairs]
    yield "the mean", [torch.full_like(e, m) for e, m in zip(eager, means, strict=True)]
    yield (
        "the first row",
        [e[:1].expand_as(e) if e.dim() and len(e) > 1 else other for e, other in pairs],
    )
    for index, value in enumerate(inputs):
        if all(isinstance(value, torch.Tensor) and value.shape == e.shape for e in eager):
            yield f"input {index}", [value.to(e.dtype) for e in eager]


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_complex() else value.double()


def _moves_with_inputs(
    reference: Reference, inputs: list[Any], sample: Sample, seed: int
) -> Finding | None:
    other = make_inputs(reference.module, reference.device, seed + 1)
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            continue  # the same for every seed
        changed = [*inputs[:index], other[index], *inputs[index + 1 :]]
        if sample.same(reference.run(reference.model, changed)[1]):
            return AdmitReason.INSENSITIVE_INPUT, f"input {index} does not matter"
    return None


def _moves_with_parameters(
    reference: Reference, inputs: list[Any], sample: Sample, seed: int
) -> Finding | None:
    tensors = {**dict(reference.model.named_parameters()), **dict(reference.model.named_buffers())}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        kept = tensor.data.clone()
        generator = torch.Generator(device=tensor.device).manual_seed(seed)
        noise = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        scale = kept.float().abs().mean() + 0.1
        tensor.data.copy_(kept.float() + scale * noise)
        moved = not sample.same(reference.run(reference.model, inputs)[1])
        tensor.data.copy_(kept)
        if not moved:
            return AdmitReason.INSENSITIVE_PARAMETER, f"{name} does not matter"
    return None


def _moves_with_operators(
    reference: Reference, inputs: list[Any], sample: Sample, seed: int
) -> Finding | None:
    counter = _Ablation(None)
    with counter:
        reference.run(reference.model, inputs)
    for index, name in enumerate(counter.names):
        try:
            with _Ablation(index):
                outputs = reference.run(reference.model, inputs)[1]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue  # the rest of the graph cannot even run without it: it matters
        if sample.same(outputs):
            return AdmitReason.INSENSITIVE_OPERATOR, f"{name} (call {index}) can be left out"
    return None


class _Ablation(TorchFunctionMode):
    """Leaves out one call: each floating-point tensor of its result becomes the first fitting
    argument, or its own mean, and a single number zero.

    Tensors in lists and named tuples count like any other. Calls that only move data (views,
    casts, splits) are not counted. Not covered: integer results, such as the indices of a sort,
    stay as they are.
    """

    def __init__(self, drop: int | None) -> None:
        super().__init__()
        self.names: list[str] = []
        self._drop = drop

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = call_name(getattr(func, "__name__", ""))
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        counted = (
            given
            and any(_floating(value) for value in tree_leaves(result))
            and name not in LAYOUT | NOT_OPERATORS | SPLITS
            and not name.startswith("get")
        )
        if not counted:
            return result
        self.names.append(name)
        if len(self.names) - 1 != self._drop:
            return result
        return tree_map(lambda v: self._without(v, given) if _floating(v) else v, result)

    @staticmethod
    def _without(result: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        for value in given:
            if value.shape == result.shape:
                return value.to(result.dtype)
        mean = result.double().mean().item() if result.numel() > 1 else 0.0
        return torch.full_like(result, mean)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def check_compiled(reference: Reference) -> dict[str, Any]:
    """The compiled baseline's first run: does it agree with eager? {"same": bool}

    The caller holds the device alone, because Inductor times its configurations in this run.
    """
    inputs, sample = reference.example, reference.sample
    reference.example = reference.sample = None
    if inputs is None or sample is None:
        raise RuntimeError("screen comes first")
    return {"same": sample.same(reference.run(reference.compiled, inputs)[1])}


RULES: tuple[Callable[..., Finding | None], ...] = (
    _fresh_inputs,
    _trivial,
    _moves_with_inputs,
    _moves_with_parameters,
    _moves_with_operators,
)


class Sample:
    """Up to SAMPLE_SIZE elements of each output, on which "the same" and "moved" are decided.

    A change of one element in ten thousand escapes it with a probability of 0.1 %.
    """

    def __init__(self, expected: list[Expected], seed: int) -> None:
        self.expected = expected
        self._shapes = [output.eager.shape for output in expected]
        self._picks = [_pick(output.eager, seed) for output in expected]
        self._wanted = [
            Expected(eager=e.eager.reshape(-1)[pick], exact=e.exact.reshape(-1)[pick])
            for e, pick in zip(expected, self._picks, strict=True)
        ]

    def same(self, outputs: list[torch.Tensor]) -> bool:
        if [o.shape for o in outputs] != self._shapes:
            return False
        picked = [o.reshape(-1)[pick] for o, pick in zip(outputs, self._picks, strict=True)]
        return _same(picked, self._wanted)


def _pick(output: torch.Tensor, seed: int) -> torch.Tensor:
    count = output.numel()
    if count <= SAMPLE_SIZE:
        return torch.arange(count, device=output.device)
    generator = torch.Generator(device=output.device).manual_seed(seed)
    return torch.randint(0, count, (SAMPLE_SIZE,), generator=generator, device=output.device)


def _itself(value: torch.Tensor) -> Expected:
    """What repeating `value` is held to: a few units in the last place, for atomics' sake."""
    return Expected(eager=value, exact=value.double() if value.is_floating_point() else value)


def _same(outputs: list[torch.Tensor], expected: list[Expected]) -> bool:
    return len(outputs) == len(expected) and all(
        compare(value, wanted).passed for value, wanted in zip(outputs, expected, strict=True)
    )


def _min_bytes(reference: Reference, inputs: list[Any], expected: list[Expected]) -> int:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    tensors += [*reference.model.parameters(), *(output.eager for output in expected)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flops(reference: Reference, inputs: list[Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        reference.run(reference.model, inputs)
    return int(counter.get_total_flops())


SCREENS: dict[str, Callable[..., Any]] = {"screen": screen, "check_compiled": check_compiled}
