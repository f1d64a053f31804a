"""From a seed and an index to a problem: draw a plan, fill it with operators, keep what the rules
allow.

    plan    which step reads which (chain, residual, gate, two inputs joined)
    build   a template, attributes and further inputs for every step
    check   sizes and rules on the whole graph; otherwise draw again

The number of operators and the precision are drawn once, before anything can be rejected, so their
distribution is the declared one.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from operator_templates.catalogue.registry import all_templates, families
from operator_templates.graph import Graph, Node, Source
from operator_templates.render import render
from operator_templates.rules import domain_fault, graph_fault, step_fault
from operator_templates.shapes import LAYOUTS, Layout
from operator_templates.sizes import size_fault
from operator_templates.template import REAL, WIDE, Operand, Template
from operator_templates.values import Call, Shape
from schemas.codec import content_id
from schemas.records import Precision, Problem, Target

MAX_DRAWS = 200  # whole graphs per problem
MAX_STEP_DRAWS = 24  # templates per step
MAX_SCRIPT_DRAWS = 4  # attributes per step, its template given

INPUT = -1  # a step that reads the problem's main input
FRESH = -2  # a step that reads a second input of the same shape

# Families that only make sense on channels-first layouts, and those that only do elsewhere.
SPATIAL = frozenset({"convolution", "pooling", "resize"})
NOT_SPATIAL = frozenset({"matmul", "attention"})
DENSE = ("matmul", "convolution", "attention")


class ComposeError(Exception):
    """No problem came out of this index. `reason` is the most frequent obstacle."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Refused(Exception):
    """One draw did not work out."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The declared distribution of problems, as relative weights."""

    num_ops: Mapping[int, float] = field(
        default_factory=lambda: {1: 10, 2: 30, 3: 30, 4: 20, 5: 10}
    )
    precisions: Mapping[Precision, float] = field(default_factory=dict)
    structures: Mapping[str, float] = field(
        default_factory=lambda: {"chain": 45, "residual": 25, "gate": 15, "join": 15}
    )
    families: Mapping[str, float] = field(
        default_factory=lambda: {
            "elementwise": 16, "activation": 15, "reduction": 11, "norm": 12, "softmax": 5,
            "matmul": 13,
            "convolution": 16, "pooling": 10, "loss": 6, "scan": 4, "indexing": 5, "shape": 6,
            "resize": 5,
            "attention": 4,
        }
    )  # fmt: skip


DEFAULT = {
    Target.CUDA: Mix(precisions={Precision.BF16: 40, Precision.TF32: 20, Precision.FP32: 40}),
    Target.CPU: Mix(precisions={Precision.FP32: 80, Precision.BF16: 20}),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A place for one operator. References are earlier steps, INPUT or FRESH.

    `joins` is a second value this step must combine with the first; `like` one whose shape its
    output must have.
    """

    reads: int
    joins: int | None = None
    like: int | None = None
    prefer: str = ""


Key = TypeVar("Key")


def weighted(rng: Random, weights: Mapping[Key, float]) -> Key:
    """A key drawn by its weight. Raises ValueError when no weight is positive."""
    total = sum(weights.values())
    if total <= 0:
        raise ValueError(f"weights must not all be zero, got {dict(weights)}")
    point = rng.random() * total
    for key, weight in weights.items():
        point -= weight
        if point < 0:
            return key
    return key


def compose(seed: int, index: int, target: Target, mix: Mix | None = None) -> Problem:
    """Problem number `index` of the set that `seed` names, for `target`.

    A pure function: equal arguments give equal bytes on any machine.

    Raises:
        ComposeError: none of a bounded number of draws gave a problem that the rules allow.
    """
    mix = mix or DEFAULT[target]
    rng = Random(f"{seed}/{index}/{target}")
    num_ops = weighted(rng, mix.num_ops)
    precision = weighted(rng, mix.precisions)
    graph = compose_graph(rng, num_ops, target, precision, mix)
    code = render(graph, precision)
    nodes = [node for _, node in graph.nodes()]
    return Problem(
        problem_id=content_id(code),
        code=code,
        ops=tuple(node.template.name for node in nodes),
        data_source=f"torch#{num_ops}",
        families=tuple(node.template.family for node in nodes),
        target=target,
        precision=precision,
        seed=seed,
        index=index,
    )


def compose_graph(
    rng: Random, num_ops: int, target: Target, precision: Precision, mix: Mix
) -> Graph:
    """The graph behind `compose`. Raises ComposeError."""
    obstacles: Counter[str] = Counter()
    for _ in range(MAX_DRAWS):
        draft = _Draft.drawn(rng, num_ops, target, precision, mix)
        graph, fault = _fitted(rng, draft)
        if graph is not None:
            return graph
        obstacles[fault] += 1
    reason, count = min(obstacles.items(), key=lambda item: (-item[1], item[0]))
    raise ComposeError(f"{num_ops} ops in {precision}: {reason} ({count} of {MAX_DRAWS} draws)")


def _fitted(rng: Random, draft: _Draft) -> tuple[Graph | None, str]:
    """A graph of the draft at a shape of its layout's table that fits the band, or the last
    obstacle.

    The first shape decides the operators; others are tried with the same ones, larger or smaller as
    needed.
    """
    shapes = list(draft.layout.shapes[draft.target])
    script: list[Template] = []
    fault = ""
    while shapes:
        base = rng.choice(shapes)
        shapes.remove(base)
        try:
            graph = _Builder(rng, draft, base, script).build()
        except _Refused as refused:
            fault = str(refused)
            if not script:
                break
            continue
        fault = size_fault(graph, draft.target, draft.precision) or ""
        if not fault:
            fault = graph_fault(graph, draft.precision) or ""
            return (None, fault) if fault else (graph, "")
        script = [node.template for _, node in graph.nodes()]
        larger = fault == "too fast"
        shapes = [s for s in shapes if (math.prod(s) > math.prod(base)) == larger]
    return None, fault


def plan(rng: Random, num_ops: int, structures: Mapping[str, float]) -> list[Step]:
    """The wiring of `num_ops` steps: a chain with at most one residual, gate or join in it."""
    least = {"chain": 1, "residual": 2, "gate": 3, "join": 3}
    kind = weighted(rng, {k: w if num_ops >= least[k] else 0.0 for k, w in structures.items()})
    steps = [Step(reads=i - 1) for i in range(num_ops)]
    if kind == "residual":  # x + f(x): steps start .. end - 1 are f
        start = rng.randrange(num_ops - 1)
        end = rng.randrange(start + 1, min(num_ops, start + 4))
        for i in range(start, end):
            steps[i] = Step(reads=i - 1, like=start - 1)
        steps[end] = Step(
            reads=end - 1,
            joins=start - 1,
            prefer=rng.choice(("torch.add", "torch.add", "torch.mul")),
        )
    elif kind == "gate":  # f(x) * g(x)
        start = rng.randrange(num_ops - 2)
        steps[start + 1] = Step(reads=start - 1, like=start)
        steps[start + 2] = Step(reads=start, joins=start + 1, prefer="torch.mul")
    elif kind == "join":  # f(x) and g(y)
        steps[1] = Step(reads=FRESH, like=0)
        steps[2] = Step(reads=0, joins=1)
    return steps


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """What is drawn before any operator: the wiring and the layout of the main input."""

    steps: tuple[Step, ...]
    layout: Layout
    dense_step: int | None  # the step that must be a matmul or convolution
    target: Target
    precision: Precision
    mix: Mix

    @staticmethod
    def drawn(rng: Random, num_ops: int, target: Target, precision: Precision, mix: Mix) -> _Draft:
        steps = plan(rng, num_ops, mix.structures)
        layout = weighted(rng, {i: layout.weight for i, layout in enumerate(LAYOUTS)})
        # TF32 is only a class of its own where a matmul or convolution is.
        plain = [i for i, step in enumerate(steps) if step.joins is None]
        dense = rng.choice(plain) if precision is Precision.TF32 else None
        return _Draft(
            steps=tuple(steps),
            layout=LAYOUTS[layout],
            dense_step=dense,
            target=target,
            precision=precision,
            mix=mix,
        )


class _Builder:
    """One attempt to fill a draft. Raises _Refused when a step finds no operator.

    With a script, the operators are given and only their attributes are drawn.
    """

    def __init__(self, rng: Random, draft: _Draft, base: Shape, script: list[Template]) -> None:
        self.rng, self.draft, self.base, self.script = rng, draft, base, script
        self.graph = Graph()
        self.made: dict[int, int] = {}  # step, INPUT or FRESH -> position in the graph

    def build(self) -> Graph:
        for number, step in enumerate(self.draft.steps):
            self._fill(number, step)
        return self.graph

    def _fill(self, number: int, step: Step) -> None:
        for _ in range(MAX_SCRIPT_DRAWS if self.script else MAX_STEP_DRAWS):
            template = self.script[number] if self.script else self._template(number, step)
            if template is not None and self._apply(template, number, step):
                return
        raise _Refused(f"no operator for step {number + 1} of {len(self.draft.steps)}")

    def _template(self, number: int, step: Step) -> Template | None:
        """A template by family weight, or None when the one drawn cannot stand here."""
        if step.joins is not None:
            if step.prefer and self.rng.random() < 0.7:
                return all_templates()[step.prefer]
            return self.rng.choice([t for t in all_templates().values() if joinable(t) is not None])
        draft = self.draft
        rank = len(self._shape(step.reads))
        spatial = draft.layout.spatial if rank == len(draft.layout.dims) else rank > 3
        unsuited = NOT_SPATIAL if spatial else SPATIAL
        dense_only = number == draft.dense_step
        fitting = suited(rank, draft.target, draft.precision)
        weights = {
            family: draft.mix.families.get(family, 0.0)
            for family in fitting
            if family not in unsuited and (family in DENSE or not dense_only)
        }
        if not any(weights.values()):
            raise _Refused("the mix has no family that fits")
        return self.rng.choice(fitting[weighted(self.rng, weights)])

    def _shape(self, reference: int) -> Shape:
        return self.graph.value(self.made[reference]).shape if reference in self.made else self.base

    def _apply(self, template: Template, number: int, step: Step) -> bool:
        """Add the operator and the inputs it needs, unless a rule forbids it."""
        rng, shape = self.rng, self._shape(step.reads)
        attributes = template.draw(rng, shape) if len(shape) in template.ranks else None
        if attributes is None:
            return False
        graph, first = self._first(self.graph, template, attributes, step.reads)
        positions, salt = [first], f"step{number}"
        call = Call(inputs=(graph.value(first),), attributes=attributes, salt=salt)
        if domain_fault(call.x, template.domain):
            return False
        join = joinable(template) if step.joins is not None else None
        for operand in template.operands:
            if operand is join:
                assert step.joins is not None
                graph, at = self._joined(graph, step.joins)
                value = graph.value(at)
                if value.shape != operand.shape(call) or domain_fault(value, operand.domain):
                    return False
            else:
                graph, at = self._input(graph, operand, call)
            positions.append(at)
        call = Call(
            inputs=tuple(graph.value(p) for p in positions), attributes=attributes, salt=salt
        )
        value = template.output(call)
        if step.like is not None and value.shape != self._shape(step.like):
            return False
        if step_fault(template, call, value):
            return False
        node = Node(
            template=template,
            operands=tuple(positions),
            attributes=attributes,
            salt=salt,
            value=value,
        )
        self.graph, self.made[number] = graph.with_entry(node)
        self.made[step.reads] = first
        return True

    def _first(
        self, graph: Graph, template: Template, attributes: Mapping[str, object], reads: int
    ) -> tuple[Graph, int]:
        """The first operand: an earlier value, or an input drawn from a distribution the template
        can take.
        """
        if reads in self.made:
            return graph, self.made[reads]
        domain = template.domain
        if domain in (REAL, WIDE):
            domain = self.rng.choice((REAL, REAL, WIDE) if domain is REAL else (WIDE,))
        name = "y" if reads == FRESH else "x"
        below = attributes.get("num_embeddings", 0)
        assert isinstance(below, int)
        return graph.with_entry(
            Source(name=name, domain=domain, value=domain.value(self.base, name), below=below)
        )

    def _joined(self, graph: Graph, reference: int) -> tuple[Graph, int]:
        if reference not in self.made:
            raise _Refused("joins a value that is not there")
        return graph, self.made[reference]

    def _input(self, graph: Graph, operand: Operand, call: Call) -> tuple[Graph, int]:
        """A further input of the problem, under a name not taken yet."""
        taken = {source.name for _, source in graph.sources()}
        name, suffix = operand.name, 2
        while name in taken:
            name, suffix = f"{operand.name}_{suffix}", suffix + 1
        value = operand.domain.value(operand.shape(call), f"{call.salt}/{name}")
        source = Source(name=name, domain=operand.domain, value=value, below=operand.below(call))
        return graph.with_entry(source)


@functools.cache
def suited(rank: int, target: Target, precision: Precision) -> dict[str, tuple[Template, ...]]:
    """The templates of each family that take tensors of a rank and have kernels for the class.

    In bf16 on the CPU matmuls and convolutions are left out: their kernels depend on the machine.
    """
    without_dense = target is Target.CPU and precision is Precision.BF16
    fitting = {
        family: tuple(
            t
            for t in templates
            if rank in t.ranks
            and (target, precision) not in t.lacks
            and not (t.dense and without_dense)
        )
        for family, templates in families().items()
    }
    return {family: fits for family, fits in fitting.items() if fits}


def joinable(template: Template) -> Operand | None:
    """The operand that may be the output of an earlier operator, if there is one."""
    return next((o for o in template.operands if o.joinable), None)
