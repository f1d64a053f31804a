"""How long eager is expected to take on a problem, and what is too large, too fast or too slow.

The rates are nominal and fixed, so that composition is the same everywhere; admission measures the
real time. They describe two CPU cores (traffic at 16 GB/s: half of it when every output is fresh
memory and costs page faults, several times it when memory is reused) and one H200 (4.26 TB/s read
plus write; 51, 400 and 790 TFLOP/s for fp32, TF32 and bf16 matrix products, of which eager reaches
about three fifths in the last two).
"""

from __future__ import annotations

from dataclasses import dataclass

from operator_templates.graph import Graph, Node
from schemas.records import Precision, Target


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a target does per second, and the limits that keep a plain one-thread-per-output kernel
    bearable.
    """

    bytes_per_s: float
    flops_per_s: dict[Precision, float]
    convolution_share: float  # of flops_per_s
    launch_ms: float
    max_numel: int
    max_flops: float
    band_ms: tuple[float, float]


RATES = {
    Target.CPU: Rates(
        bytes_per_s=16e9,
        flops_per_s={Precision.FP32: 120e9, Precision.BF16: 40e9},
        convolution_share=1.0,
        launch_ms=0.02,
        max_numel=8 << 20,
        max_flops=0.4e9,
        band_ms=(4.0, 12.0),
    ),
    Target.CUDA: Rates(
        bytes_per_s=4.26e12,
        flops_per_s={Precision.FP32: 51e12, Precision.TF32: 240e12, Precision.BF16: 470e12},
        convolution_share=0.5,
        launch_ms=0.005,
        max_numel=168 << 20,
        max_flops=0.2e12,
        band_ms=(1.2, 30.0),
    ),
}

BYTES = {Precision.FP32: 4, Precision.TF32: 4, Precision.BF16: 2}


def node_bytes(graph: Graph, node: Node, precision: Precision) -> int:
    """Bytes eager reads and writes for one operator, each tensor once."""
    size = BYTES[precision]
    values = [graph.value(o) for o in node.operands]
    return sum(v.numel * (8 if v.integer else size) for v in values) + node.value.numel * size


def node_ms(graph: Graph, node: Node, target: Target, precision: Precision) -> float:
    """Nominal eager time of one operator, in milliseconds."""
    rates, cost = RATES[target], node.template.cost
    flops = cost.flops(graph.call(node))
    share = rates.convolution_share if node.template.family == "convolution" else 1.0
    compute_s = flops / (rates.flops_per_s[precision] * share)
    moved_s = node_bytes(graph, node, precision) / rates.bytes_per_s
    if target is Target.CUDA:
        return rates.launch_ms + 1e3 * max(compute_s, moved_s * cost.passes)
    numel = max(node.value.numel, graph.value(node.operands[0]).numel)
    return rates.launch_ms + 1e3 * (compute_s + moved_s) + 1e-6 * cost.cpu_ns * numel


def predicted_ms(graph: Graph, target: Target, precision: Precision) -> float:
    """Nominal eager time of a problem, in milliseconds."""
    return sum(node_ms(graph, node, target, precision) for _, node in graph.nodes())


def total_flops(graph: Graph) -> int:
    return sum(node.template.cost.flops(graph.call(node)) for _, node in graph.nodes())


def size_fault(graph: Graph, target: Target, precision: Precision) -> str | None:
    """Why a graph is too large, too fast or too slow; None when it fits."""
    rates = RATES[target]
    if max(entry.value.numel for entry in graph.entries) > rates.max_numel:
        return "a tensor is too large"
    if total_flops(graph) > rates.max_flops:
        return "too many flops for a plain kernel"
    low, high = rates.band_ms
    ms = predicted_ms(graph, target, precision)
    if not low <= ms <= high:
        return "too fast" if ms < low else "too slow"
    return None
