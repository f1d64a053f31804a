"""Every template on its own: what it declares against what PyTorch does."""

from __future__ import annotations

import types
from random import Random

import pytest
import torch

from operator_templates.catalogue.registry import all_templates, families
from operator_templates.graph import Graph, Node, Source
from operator_templates.render import render
from operator_templates.rules import domain_fault
from operator_templates.template import INDEX, Template
from operator_templates.values import Call, Shape, mean, rms
from runtime.operator_names import call_name
from runtime.trace import declared_operators, trace_operators
from schemas.records import Precision, Target

SHAPES: dict[int, Shape] = {
    2: (32, 24),
    3: (4, 16, 24),
    4: (2, 16, 18, 32),
    5: (2, 8, 16, 16, 20),
}
KEYS = list(all_templates())


def alone(template: Template, rank: int) -> Graph:
    """A graph of one operator at a tiny shape."""
    shape = (2, 4, 32, 32) if template.family == "attention" else SHAPES[rank]
    rng = Random(f"{template.key}/{rank}")
    attributes = next(a for _ in range(100) if (a := template.draw(rng, shape)) is not None)
    main = Source(
        name="x",
        domain=template.domain,
        value=template.domain.value(shape, "x"),
        below=attributes.get("num_embeddings", 0),
    )
    call = Call(inputs=(main.value,), attributes=attributes, salt="only")
    others = [
        Source(
            name=o.name,
            domain=o.domain,
            value=o.domain.value(o.shape(call), o.name),
            below=o.below(call),
        )
        for o in template.operands
    ]
    call = Call(inputs=(main.value, *(o.value for o in others)), attributes=attributes, salt="only")
    node = Node(
        template=template,
        operands=tuple(range(len(others) + 1)),
        attributes=attributes,
        salt="only",
        value=template.output(call),
    )
    return Graph(entries=(main, *others, node))


def module_of(graph: Graph, precision: Precision = Precision.FP32) -> types.ModuleType:
    module = types.ModuleType("problem")
    exec(compile(render(graph, precision), "<problem>", "exec"), module.__dict__)
    return module


def run(module: types.ModuleType, device: str) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = module.Model(*module.get_init_inputs()).eval()
        out = model(*module.get_inputs())
    assert isinstance(out, torch.Tensor)
    return out


def cases() -> list[tuple[str, int]]:
    return [(key, rank) for key, template in all_templates().items() for rank in template.ranks]


def test_the_catalogue_is_wide_enough() -> None:
    assert len(all_templates()) >= 70
    assert len(families()) >= 12
    assert sum(len(templates) for templates in families().values()) == len(all_templates())


@pytest.mark.parametrize("key", KEYS)
def test_docs_are_one_line_and_operands_fit_their_domains(key: str) -> None:
    template = all_templates()[key]
    assert template.doc and "\n" not in template.doc
    assert domain_fault(template.domain.value((4,), "x"), template.domain) is None
    assert len({o.name for o in template.operands} | {"x"}) == template.arity


@pytest.mark.parametrize(("key", "rank"), cases())
def test_shape_rule_is_what_torch_computes(key: str, rank: int) -> None:
    graph = alone(all_templates()[key], rank)
    assert tuple(run(module_of(graph), "meta").shape) == graph.output.shape


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(("key", "rank"), cases())
def test_output_is_finite_bounded_and_not_constant(
    key: str, rank: int, precision: Precision
) -> None:
    template = all_templates()[key]
    if (Target.CPU, precision) in template.lacks:
        pytest.skip(f"{key} has no {precision} kernel on the CPU")
    graph = alone(template, rank)
    out = run(module_of(graph, precision), "cpu")
    assert out.dtype is (torch.bfloat16 if precision is Precision.BF16 else torch.float32)
    assert out.isfinite().all()
    assert out.float().std() > 0.003 * out.float().square().mean().sqrt()
    assert out.min() >= graph.output.low - 0.01


@pytest.mark.parametrize("key", KEYS)
def test_lanes_have_the_size_of_the_real_output(key: str) -> None:
    """Lanes are estimates, so the band is wide; a wrong power of the fan-in falls out of it."""
    template = all_templates()[key]
    graph = alone(template, template.ranks[-1])
    out = run(module_of(graph), "cpu")
    real = float(out.square().mean().sqrt())
    assert 0.5 < rms(graph.output.lanes) / real < 2.0
    assert abs(mean(graph.output.lanes) - float(out.mean())) < 0.6 * max(real, 1e-6)


@pytest.mark.parametrize("key", KEYS)
def test_declared_operators_are_the_traced_ones(key: str) -> None:
    template = all_templates()[key]
    traced = declared_operators(trace_operators(module_of(alone(template, template.ranks[0]))))
    assert traced == template.canonical


@pytest.mark.parametrize("key", KEYS)
def test_the_declared_name_spells_the_canonical_one(key: str) -> None:
    """nn.LayerNorm -> layer_norm: equal without case, underscores and the rank at the end."""
    template = all_templates()[key]
    (canonical,) = template.canonical
    last = template.name.rsplit(".", 1)[-1]
    if template.name.startswith("nn."):
        plain = last.lower()
        assert canonical.replace("_", "") in (plain, plain.rstrip("123d"))
    else:
        assert canonical == call_name(last)


def test_index_inputs_stay_inside_their_dimension() -> None:
    indexed = [t for t in all_templates().values() if any(o.domain is INDEX for o in t.operands)]
    for template in indexed:
        graph = alone(template, template.ranks[0])
        bounds = {s.name: s.below for _, s in graph.sources() if s.domain is INDEX}
        assert bounds and all(below >= 4 for below in bounds.values())
