"""Which kernels a problem becomes. No target in here: printers turn a Plan into C++ or CUDA.

reference_plan   every operator that computes something gets its own kernel and its own buffer
grouping.optimized_plan   as few kernels and passes over memory as can be proved right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_agent.expert.build import build_loops, build_scan
from kernel_agent.expert.ir import ITEMSIZE, Graph, Map, Scan, Source, Value
from kernel_agent.expert.kernels import Kernel, LoopKernel, reads, writes
from kernel_agent.expert.lowering import numel


@dataclass(frozen=True)
class Plan:
    """Kernels in launch order, and every buffer they name. `outputs` are buffer names."""

    kind: str  # reference | optimized
    sources: tuple[Source, ...]
    buffers: dict[str, Value]
    kernels: tuple[Kernel, ...]
    outputs: tuple[str, ...]
    form: str

    @property
    def bytes_moved(self) -> int:
        """Bytes the kernels read and write when each touches each of its buffers once."""
        return sum(_bytes(self.buffers[b]) for k in self.kernels for b in (*reads(k), *writes(k)))

    @property
    def least_bytes(self) -> int:
        """Bytes of the sources that are read and of the outputs, once each."""
        used = {b for k in self.kernels for b in reads(k)}
        names = {s.name for s in self.sources if s.name in used} | set(self.outputs)
        return sum(_bytes(self.buffers[name]) for name in names)

    def describe(self) -> list[str]:
        """Short notes that are true of this plan: its kernels, what they walk, the bytes they
        move."""
        notes = [
            f"{len(self.kernels)} kernel(s), {self.bytes_moved / 1e6:.2f} MB moved; "
            f"the problem itself needs {self.least_bytes / 1e6:.2f} MB (each input and output once)"
        ]
        for k in self.kernels:
            if isinstance(k, LoopKernel):
                loops = f"{_sizes(k.outer)} parallel steps"
                walks = sum(p.walks for p in k.passes)
                if k.row:
                    loops += f", {walks} pass(es) over rows of {_sizes(k.row)}"
            else:
                loops = f"an ordered walk over {k.dim.size} for {_sizes(k.outer)} lines"
            notes.append(f"{k.name}: {loops}; reads {', '.join(reads(k)) or 'nothing'}")
        return notes


def _sizes(loops: Sequence[object]) -> str:
    return " x ".join(str(getattr(v, "size", "")) for v in loops) or "1"


def _bytes(value: Value) -> int:
    return numel(value.shape) * ITEMSIZE[value.dtype]


def separate_outputs(graph: Graph) -> Graph:
    """A graph whose outputs are distinct computed values: an output that is an input, or given
    twice, is copied."""
    outputs: list[Value] = []
    for position, value in enumerate(graph.outputs):
        if isinstance(value, Source) or value in outputs:
            outputs.append(_copy_of(value, f"output_{position}"))
        else:
            outputs.append(value)
    return replace(graph, outputs=outputs)


def _copy_of(value: Value, name: str) -> Map:
    return Map(
        name, value.shape, value.dtype, lambda b, index: b.load(value, index), (value,), "copy"
    )


def reference_plan(graph: Graph) -> Plan:
    """One plain kernel per operator that computes something; views are index arithmetic in their
    readers."""
    graph = separate_outputs(graph)
    values = [v for v in graph.values() if not isinstance(v, Source)]
    stored = {v for v in values if not (isinstance(v, Map) and v.view) or v in graph.outputs}
    kernels: list[Kernel] = []
    for value in values:
        if value not in stored:
            continue
        others = stored - {value}
        name = kernel_name([value], len(kernels))
        kernel: Kernel
        if isinstance(value, Scan):
            kernel = build_scan(name, value, [], lambda v: True, others.__contains__)
        else:
            kernel = build_loops(name, [value], lambda v: True, others.__contains__)
        kernel.comment = [f"{_word(value)}: {_what(value)}"]
        kernels.append(kernel)
    return make_plan("reference", graph, [*graph.sources, *stored], kernels)


def make_plan(kind: str, graph: Graph, stored: Sequence[Value], kernels: Sequence[Kernel]) -> Plan:
    buffers = {v.name: v for v in stored}
    outputs = tuple(v.name for v in graph.outputs)
    return Plan(kind, tuple(graph.sources), buffers, tuple(kernels), outputs, graph.form)


def kernel_name(members: Sequence[Value], position: int) -> str:
    """fused_<up to four distinct words>_<position>, or <word>_kernel_<position> for one value."""
    words = list(dict.fromkeys(_word(v) for v in members))
    if len(words) == 1:
        return f"{words[0]}_kernel_{position}"
    if len(words) > 4:
        words = [*words[:3], words[-1]]
    return f"fused_{'_'.join(words)}_{position}"


def _word(value: Value) -> str:
    op = getattr(value, "op", "copy").split("::")[-1].split(".")[0].strip("_")
    return {"max_pool2d_with_indices": "max_pool2d", "convolution": "conv"}.get(op, op)


def _what(value: Value) -> str:
    shape = "x".join(map(str, value.shape)) or "a scalar"
    return f"writes {value.name} ({shape}, {value.dtype})"
