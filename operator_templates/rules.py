"""Which successions of operators make a problem worth solving.

Each rule answers with a reason, or None. `step_fault` looks at one operator as it is added;
`graph_fault` at the finished graph, where every operator, input and parameter must move the output.
Both read shapes, bounds, traits and lanes only. What they do not see: correlations inside a tensor
that neither traits nor independent lanes describe, and the rounding errors of a particular kernel.
"""

from __future__ import annotations

import math

from operator_templates.graph import Graph
from operator_templates.template import POSITIVE, UNIT, Domain, Template
from operator_templates.values import Call, Lanes, Trait, Value, distance, rms, std
from schemas.records import Precision

POSITIVE_BOUND = 0.05  # what "positive" means for logarithms, quotients and negative powers
LOWEST_SCALE, HIGHEST_SCALE = 0.05, 50.0  # of the output, root mean square
HIGHEST_INNER_SCALE = 1e4  # of every other tensor
HIGHEST_PEAK = 6.0  # largest lane over the root mean square; 8 is a single lane, a normal has 2.4

# An output whose elements differ by less than this share of their size is as good as constant, and
# an operator or input that moves the output by less is as good as absent. bf16 resolves 0.4 %; the
# margin is for what lanes miss.
LEAST_SPREAD = {Precision.FP32: 0.04, Precision.TF32: 0.05, Precision.BF16: 0.12}
LEAST_MOVE = {Precision.FP32: 0.05, Precision.TF32: 0.05, Precision.BF16: 0.10}

_SUPERSET = frozenset({Trait.SHIFTED, Trait.SCALED})


def domain_fault(value: Value, domain: Domain) -> str | None:
    """Whether a value may stand where a template wants `domain`."""
    if value.integer != domain.integer:
        return "an integer tensor and a real one cannot stand in for each other"
    if domain is POSITIVE and value.low < POSITIVE_BOUND:
        return "needs positive numbers"
    if domain is UNIT and value.low < 0:
        return "needs non-negative numbers"
    return None


def trait_fault(template: Template, call: Call) -> str | None:
    """Whether the operator is blind to what the operator before it did."""
    for trait, dims in template.blind(call):
        for held, held_dims in call.x.traits:
            if trait is not held:
                continue
            blind = dims <= held_dims if trait in _SUPERSET else held_dims <= dims
            if blind:
                return f"does not see that its input is {trait} along {sorted(held_dims)}"
    return None


def step_fault(template: Template, call: Call, out: Value) -> str | None:
    """Why an operator may not be applied to these inputs; None when it may."""
    if min(out.shape, default=0) < 1:
        return "empty output"
    if not all(map(math.isfinite, out.lanes)) or rms(out.lanes) > HIGHEST_INNER_SCALE:
        return "overflows"
    # Lanes reach 2.4 standard deviations, millions of elements 5.5, and an exponential feels it.
    largest = max(max(map(abs, value.lanes)) for value in call.inputs)
    if template.exponential and (largest > 5.0 or peak(call.x.lanes) > 3.5):
        return "an exponential of large numbers"
    if std(out.lanes) < 0.01 * max(rms(out.lanes), 1e-6):
        return "nearly constant"
    if out.shape == call.shape and distance(out.lanes, call.x.lanes) < 0.03:
        return "leaves its input as it is"
    return trait_fault(template, call)


def graph_fault(graph: Graph, precision: Precision) -> str | None:
    """Why a finished graph is no good problem; None when it is."""
    lanes = graph.output.lanes
    scale = rms(lanes)
    if not LOWEST_SCALE <= scale <= HIGHEST_SCALE:
        return "output too small" if scale < LOWEST_SCALE else "output too large"
    if std(lanes) < LEAST_SPREAD[precision] * scale:
        return "output nearly constant"
    if graph.output.numel < 256:
        return "output of a few elements"
    if peak(lanes) > HIGHEST_PEAK:
        return "output ruled by a few elements"
    if _mostly_one_number(graph.output):
        return "output mostly one number"
    for position, node in graph.nodes():
        if node.value.shape != graph.value(node.operands[0]).shape:
            continue  # nothing of the same shape could stand in for it
        if distance(graph.replay(without=position).lanes, lanes) < LEAST_MOVE[precision]:
            return f"{node.template.key} hardly moves the output"
    for position, source in graph.sources():
        if distance(graph.replay(redrawn=position).lanes, lanes) < LEAST_MOVE[precision]:
            return f"a {source.domain.name} input hardly moves the output"
    for position, node in graph.nodes():
        if not node.template.has_parameters:
            continue
        if distance(graph.replay(redrawn=position).lanes, lanes) < LEAST_MOVE[precision]:
            return f"the parameters of {node.template.key} hardly move the output"
    return None


def peak(lanes: Lanes) -> float:
    """How far the largest of the lanes stands out."""
    return max(map(abs, lanes)) / max(rms(lanes), 1e-30)


def _mostly_one_number(value: Value) -> bool:
    """Saturated: over four fifths of the elements are the same, such as zeros after a mask."""
    most = max(value.lanes.count(v) for v in set(value.lanes))
    return most > 0.8 * len(value.lanes)
