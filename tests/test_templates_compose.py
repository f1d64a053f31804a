"""Composition: determinism, the declared distribution, sizes, rules that keep operators alive."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from operator_templates.catalogue.registry import all_templates, families
from operator_templates.compose import (
    DEFAULT,
    ComposeError,
    Mix,
    compose,
    compose_graph,
    plan,
    weighted,
)
from operator_templates.graph import Graph, Node, Source
from operator_templates.rules import graph_fault, step_fault
from operator_templates.shapes import LAYOUTS
from operator_templates.sizes import RATES, predicted_ms, total_flops
from operator_templates.template import POSITIVE, REAL, UNIT, WIDE, Domain
from operator_templates.values import Call, Shape
from runtime.trace import declared_operators, trace_operators
from schemas.codec import content_id
from schemas.records import Precision, Problem, Target

COUNT = 300
CANONICAL = {template.name: template.canonical for template in all_templates().values()}


@functools.cache
def problems(target: Target) -> tuple[Problem, ...]:
    found = []
    for index in range(COUNT):
        try:
            found.append(compose(1, index, target))
        except ComposeError as error:
            assert error.reason
    return tuple(found)


def graphs(target: Target, precision: Precision, count: int) -> list[Graph]:
    found = []
    for index in range(count):
        rng = Random(f"graphs/{index}")
        try:
            found.append(compose_graph(rng, 1 + index % 5, target, precision, DEFAULT[target]))
        except ComposeError:
            continue
    assert len(found) > count / 2
    return found


@pytest.mark.parametrize("target", list(Target))
def test_problems_are_distinct_and_varied(target: Target) -> None:
    made = problems(target)
    assert len(made) >= 0.85 * COUNT
    # Few single operators last a millisecond on a GPU, so two indices may draw the same one there.
    assert len({p.problem_id for p in made}) >= (0.95 if target is Target.CUDA else 1) * len(made)
    assert len({op for p in made for op in p.ops}) >= 60
    assert len({family for p in made for family in p.families}) >= 10
    assert all(p.problem_id == content_id(p.code) for p in made)
    assert all(p.data_source == f"torch#{len(p.ops)}" for p in made)


def test_op_counts_and_precisions_follow_the_mix() -> None:
    """On the CPU nothing is rejected: shares differ by sampling only, 4 standard deviations."""
    made = problems(Target.CPU)
    mix = DEFAULT[Target.CPU]
    expected = {str(k): w / sum(mix.num_ops.values()) for k, w in mix.num_ops.items()}
    expected |= {str(k): w / sum(mix.precisions.values()) for k, w in mix.precisions.items()}
    seen = Counter(name for p in made for name in (str(len(p.ops)), str(p.precision)))
    for name, share in expected.items():
        slack = 4 * (share * (1 - share) / len(made)) ** 0.5
        assert abs(seen[name] / len(made) - share) < slack, (name, seen)


@pytest.mark.parametrize("target", list(Target))
def test_texts_parse_and_say_their_precision(target: Target) -> None:
    for problem in problems(target):
        tree = ast.parse(problem.code)
        names = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        assert names == {"Model", "get_inputs", "get_init_inputs"}
        assert (ast.get_docstring(tree) or "").endswith(f"precision: {problem.precision}")
        assert ("torch.bfloat16" in problem.code) == (problem.precision is Precision.BF16)
        assert problem.code.isascii() and "cuda" not in problem.code
        assert max(map(len, problem.code.splitlines())) <= 100


@pytest.mark.parametrize("target", list(Target))
def test_declared_ops_are_the_traced_ones(target: Target) -> None:
    for problem in problems(target)[:60]:
        module = types.ModuleType("problem")
        exec(compile(problem.code, "<problem>", "exec"), module.__dict__)
        declared = tuple(name for op in problem.ops for name in CANONICAL[op])
        assert declared_operators(trace_operators(module)) == declared, problem.code


def test_tf32_only_with_a_dense_operator_and_none_on_cpu_in_bf16() -> None:
    dense = {t.name for t in all_templates().values() if t.dense}
    for problem in problems(Target.CUDA):
        assert problem.precision is not Precision.TF32 or dense & set(problem.ops)
    for problem in problems(Target.CPU):
        assert problem.precision is not Precision.TF32
        assert problem.precision is not Precision.BF16 or not dense & set(problem.ops)


@pytest.mark.parametrize(
    ("target", "precision"),
    [(Target.CPU, Precision.FP32), (Target.CUDA, Precision.TF32), (Target.CUDA, Precision.BF16)],
)
def test_sizes_stay_inside_the_limits(target: Target, precision: Precision) -> None:
    rates = RATES[target]
    for graph in graphs(target, precision, 15):
        assert rates.band_ms[0] <= predicted_ms(graph, target, precision) <= rates.band_ms[1]
        assert max(entry.value.numel for entry in graph.entries) <= rates.max_numel
        assert total_flops(graph) <= rates.max_flops


def test_shape_tables_have_odd_sizes_and_respect_the_cap() -> None:
    for layout in LAYOUTS:
        for target, shapes in layout.shapes.items():
            assert len(set(shapes)) == len(shapes)
            assert all(len(shape) == len(layout.dims) for shape in shapes)
            assert any(n & (n - 1) for shape in shapes for n in shape)
            sizes = [functools.reduce(lambda a, b: a * b, shape) for shape in shapes]
            assert max(sizes) <= RATES[target].max_numel


FROZEN = {
    (Target.CPU, 0): "a175d4c6bc0b8da6",
    (Target.CPU, 1): "9f169cb0d493c811",
    (Target.CPU, 2): "50ee402a90741bb0",
    (Target.CUDA, 0): "e2fcea64dc794793",
    (Target.CUDA, 1): "57abdac916e18459",
    (Target.CUDA, 2): "83de00fabfd550ea",
}


def test_frozen_ids() -> None:
    """Ids of a few problems. Other ids mean other problems: published sets cannot be remade."""
    assert {(t, i): compose(1, i, t).problem_id for t, i in FROZEN} == FROZEN


@pytest.mark.parametrize("hash_seed", ["0", "1234"])
def test_bytes_do_not_depend_on_the_process(hash_seed: str) -> None:
    program = (
        "from operator_templates.compose import compose; from schemas.records import Target\n"
        "print(*[compose(1, i, t).problem_id for t in Target for i in range(3)])"
    )
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [FROZEN[t, i] for t in Target for i in range(3)]


def test_a_mix_restricts_what_is_composed() -> None:
    mix = Mix(
        num_ops={2: 1.0},
        precisions={Precision.FP32: 1.0},
        structures={"chain": 1.0},
        families={"activation": 1.0, "norm": 1.0},
    )
    for index in range(5):
        problem = compose(1, index, Target.CPU, mix)
        assert len(problem.ops) == 2 and set(problem.families) <= {"activation", "norm"}
        assert problem == compose(1, index, Target.CPU, mix)


def test_an_impossible_mix_raises_with_the_reason() -> None:
    mix = replace(DEFAULT[Target.CPU], families={"matmul": 1.0}, precisions={Precision.BF16: 1.0})
    with pytest.raises(ComposeError, match="no family"):
        compose(0, 0, Target.CPU, mix)


def test_weighted_rejects_weights_without_a_positive_one() -> None:
    with pytest.raises(ValueError, match="not all be zero"):
        weighted(Random(0), {"a": 0.0})


@pytest.mark.parametrize("structure", ["chain", "residual", "gate", "join"])
@pytest.mark.parametrize("num_ops", [3, 4, 5])
def test_every_step_of_a_plan_is_used(structure: str, num_ops: int) -> None:
    for draw in range(20):
        steps = plan(Random(f"{structure}/{draw}"), num_ops, {structure: 1.0})
        read = {r for s in steps for r in (s.reads, s.joins) if r is not None}
        assert set(range(num_ops - 1)) <= read and len(steps) == num_ops
        assert (structure == "chain") == all(s.joins is None for s in steps)


def chain(
    *keys: str, shape: Shape = (512, 64), domain: Domain = REAL, **attributes: object
) -> str | None:
    """The fault of a chain of operators, None when the rules accept it."""
    graph = Graph(entries=(Source(name="x", domain=domain, value=domain.value(shape, "x")),))
    for number, key in enumerate(keys):
        template = all_templates()[key]
        here = graph.output.shape
        drawn = template.draw(Random(key), here)
        assert drawn is not None, key
        drawn |= {k: v for k, v in attributes.items() if k in drawn}
        call = Call(inputs=(graph.output,), attributes=drawn, salt=f"step{number}")
        value = template.output(call)
        fault = step_fault(template, call, value)
        if fault:
            return fault
        position = len(graph.entries) - 1
        node = Node(
            template=template,
            operands=(position,),
            attributes=drawn,
            salt=call.salt,
            value=value,
        )
        graph, _ = graph.with_entry(node)
    return graph_fault(graph, Precision.FP32)


LAST = {"dim": -1, "dims": (-1,), "keepdim": False}


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        (("nn.Softmax", "nn.ReLU"), {"domain": WIDE}),  # a ReLU of non-negative numbers
        (("torch.abs", "F.leaky_relu"), {}),
        (("torch.neg", "torch.abs"), {}),  # the sign is lost again
        (("torch.softmax", "torch.sum"), {"domain": WIDE, **LAST}),  # rows sum to one
        (("F.layer_norm", "torch.mean"), LAST),  # rows have zero mean
        (("F.layer_norm", "F.layer_norm"), {}),  # the second one finds nothing to do
        (("torch.add:scalar", "F.layer_norm"), {}),  # the shift is taken out again
        (("torch.flip", "torch.amax"), {**LAST, "dim": 1}),  # a maximum does not see the order
        (("torch.exp", "torch.exp", "torch.exp"), {}),  # overflows
        (  # a gain per channel passes the minimum and is then divided out of every row
            ("nn.BatchNorm1d", "torch.cummin", "F.layer_norm"),
            {"shape": (8, 16, 64), "domain": WIDE, "dim": 2},
        ),
        (("torch.softmax",), {"shape": (64, 128), "domain": UNIT}),  # all answers near 1/128
        (("torch.mean",), {"shape": (512, 4096), "domain": POSITIVE}),  # concentrates at 1
        (("torch.sigmoid", "torch.sigmoid", "torch.sigmoid"), {}),  # settles at one value
    ],
)
def test_futile_successions_are_refused(keys: tuple[str, ...], options: dict[str, object]) -> None:
    assert chain(*keys, **options) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        (("torch.abs", "torch.log1p"), {}),
        (("nn.ReLU", "torch.sum"), LAST),
        (("nn.LayerNorm", "nn.ReLU"), {"domain": WIDE}),
        (("torch.flip", "torch.cumsum"), {"dim": 1}),
        (("torch.softmax",), {"shape": (4096, 8), "domain": WIDE}),
        (("nn.Linear", "nn.GELU"), {}),
        (("torch.mean",), LAST),
    ],
)
def test_their_sound_twins_are_accepted(keys: tuple[str, ...], options: dict[str, object]) -> None:
    assert chain(*keys, **options) is None  # type: ignore[arg-type]


def test_an_instance_norm_takes_a_convolution_bias_out() -> None:
    conv, norm = all_templates()["nn.Conv2d"], all_templates()["F.instance_norm"]
    shape = (2, 8, 20, 20)
    drawn = conv.draw(Random(1), shape)
    assert drawn is not None
    out = conv.output(Call(inputs=(REAL.value(shape, "x"),), attributes=drawn, salt="a"))
    call = Call(inputs=(out,), attributes={"num_features": out.shape[1], "eps": 1e-5}, salt="b")
    assert "shifted" in (step_fault(norm, call, norm.output(call)) or "")


def test_family_weights_name_existing_families() -> None:
    for mix in DEFAULT.values():
        assert set(mix.families) == set(families())
