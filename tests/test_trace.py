"""The operator graph: canonical names whatever the API, and only what the outputs depend on."""

import pytest
import torch

from runtime.problem_code import load_module
from runtime.trace import (
    ARGUMENT,
    PARAMETER,
    OperatorNode,
    TraceError,
    declared_operators,
    trace_operators,
)
from schemas.codec import to_json


def trace(
    forward: str, init: str = "", inputs: str = "torch.rand(4, 8)", arguments: str = "x"
) -> list[OperatorNode]:
    code = f"""
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init or "pass"}

    def forward(self, {arguments}):
        {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
    return trace_operators(load_module(code, "traced"))


def names(nodes: list[OperatorNode]) -> list[str]:
    return [node.operator for node in nodes]


SPELLINGS = [
    ("torch.relu(x)", "relu"),
    ("F.relu(x)", "relu"),
    ("x.relu()", "relu"),
    ("F.relu(x, inplace=True)", "relu"),
    ("x.clone().relu_()", "relu"),
    ("nn.ReLU()(x)", "relu"),
    ("nn.ReLU(inplace=True)(x)", "relu"),
    ("x @ x.T", "transpose matmul"),
    ("torch.mm(x, x.t())", "transpose matmul"),
    ("torch.matmul(x, x.transpose(0, 1))", "transpose matmul"),
    ("torch.bmm(x[None], x.mT[None])", "view transpose view matmul"),
    ("x.permute(1, 0)", "transpose"),
    ("x + 1", "add"),
    ("1 + x", "add"),
    ("torch.add(x, x)", "add"),
    ("1 - x", "sub"),
    ("torch.sub(x, 2)", "sub"),
    ("3 * x", "mul"),
    ("1 / x", "div"),
    ("torch.true_divide(x, 3)", "div"),
    ("x ** 2", "pow"),
    ("torch.square(x)", "pow"),
    ("2 ** x", "pow"),
    ("F.silu(x)", "sigmoid mul"),
    ("nn.SiLU()(x)", "sigmoid mul"),
    ("x * torch.sigmoid(x)", "sigmoid mul"),
    ("F.mish(x)", "softplus tanh mul"),
    ("x * torch.tanh(F.softplus(x))", "softplus tanh mul"),
    ("x / (1 + x.abs())", "abs add div"),
    ("F.softsign(x)", "abs add div"),
    ("torch.addmm(x @ x.T, x, x.T)", "transpose matmul transpose matmul add"),
    ("F.softmax(x, dim=-1)", "softmax"),
    ("nn.Softmax(1)(x)", "softmax"),
    ("x.softmax(1)", "softmax"),
    ("F.mse_loss(x, x + 1)", "add sub pow mean"),
    ("x.amax(1)", "max"),
    ("torch.max(x, dim=1)[0]", "max"),
    ("torch.max(x, x + 1)", "add maximum"),
    ("x.clamp_min(0.5)", "clamp"),
    ("F.hardtanh(x)", "clamp"),
    ("x.flatten()", "view"),
    ("x.reshape(2, 16)", "view"),
    ("x.view(2, 2, 8).view(32)", "view"),
    ("F.dropout(x, 0.5, training=self.training).exp()", "exp"),
    ("x.contiguous().to(torch.float32).detach().exp()", "exp"),
    ("x.view(4, 8).exp()", "exp"),
    ("torch.cat([a.exp() for a in x.chunk(2)])", "split exp exp cat"),
    ("torch.linalg.vector_norm(x)", "norm"),
    ("x[:, :4]", "slice"),
    ("torch.hstack([x, x])", "cat"),
    ("torch.tensor(2.0) * x", "mul"),
]


@pytest.mark.parametrize(("expression", "expected"), SPELLINGS)
def test_spellings_have_one_canonical_name(expression: str, expected: str) -> None:
    assert names(trace(f"return {expression}")) == expected.split()


def test_linear_is_matmul_and_add_but_one_declared_operator() -> None:
    nodes = trace("return torch.relu(self.fc(x))", init="self.fc = nn.Linear(8, 3)")
    assert names(nodes) == ["matmul", "add", "relu"]
    assert declared_operators(nodes) == ("linear", "relu")
    assert nodes[0].inputs == (ARGUMENT, PARAMETER, PARAMETER)
    assert [node.inputs for node in nodes[1:]] == [(0,), (1,)]
    assert nodes[-1].shape == (4, 3) and nodes[-1].dtype == "float32"


def test_linear_by_hand_reads_like_linear() -> None:
    parameters = "self.w, self.b = nn.Parameter(torch.rand(3, 8)), nn.Parameter(torch.rand(3))"
    assert names(trace("return x @ self.w.t() + self.b", init=parameters)) == ["matmul", "add"]


def test_only_operators_that_reach_an_output_are_kept() -> None:
    assert names(trace("y = torch.exp(x); return torch.tanh(x)")) == ["tanh"]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        ("y = x.exp(); y += 1; return y", "exp add"),
        ("y = x.exp(); y[0] = 1.0; return y", "exp index_put"),
        ("y = x.exp(); y[:, :2].mul_(3); return y", "exp slice mul"),
        ("y = x.exp(); F.relu(y[:, :2], inplace=True); return y", "exp slice relu"),
        ("a, b = x.exp(); return a, b", None),
        ("a, b, c, d = x.exp(); return a * b", "exp split mul"),
    ],
)
def test_writes_in_place_and_unpacking_stay_in_the_graph(
    forward: str, expected: str | None
) -> None:
    if expected is None:
        with pytest.raises(TraceError, match="unpack"):
            trace(forward)
    else:
        assert names(trace(forward)) == expected.split()


@pytest.mark.parametrize(
    ("expression", "neutral"),
    [
        ("x * 1", True),
        ("x * 1.0", True),
        ("x + 0", True),
        ("x / 1", True),
        ("x ** 1", True),
        ("x * 2", False),
        ("0 - x", False),
        ("1 / x", False),
        ("x - 1", False),
    ],
)
def test_constant_no_ops_are_marked(expression: str, neutral: bool) -> None:
    (node,) = trace(f"return {expression}")
    assert node.neutral is neutral


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_one_operator_with_true_shapes(kind: str) -> None:
    init = f"self.r = nn.{kind}(8, 5, num_layers=2, batch_first=True, bidirectional=True)"
    nodes = trace("return self.r(x)[0]", init=init, inputs="torch.rand(3, 7, 8)")
    real = getattr(torch.nn, kind)(8, 5, 2, batch_first=True, bidirectional=True)
    assert nodes[-1].shape == tuple(real(torch.rand(3, 7, 8))[0].shape)
    assert nodes[-1].operator in {"lstm", "gru", "rnn_tanh"}
    assert nodes[-1].used == (0,)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_loss_that_checks_values_has_its_true_shape(reduction: str) -> None:
    (node,) = trace(f"return F.gaussian_nll_loss(x, x, x, reduction={reduction!r})")
    x = torch.ones(4, 8)
    real = torch.nn.functional.gaussian_nll_loss(x, x, x, reduction=reduction)
    assert (node.operator, node.shape) == ("gaussian_nll_loss", tuple(real.shape))


def test_which_output_of_several_is_used() -> None:
    init = "self.r = nn.LSTM(8, 5, batch_first=True)"
    used = [
        trace(f"return self.r(x)[1][{i}]", init=init, inputs="torch.rand(3, 7, 8)")[-1].used
        for i in (0, 1)
    ]
    assert used == [(1,), (2,)]


@pytest.mark.parametrize(
    "forward", ["return x * x.sum().item()", "return x if x.sum() > 0 else -x"]
)
def test_values_are_refused_with_the_call_that_wanted_them(forward: str) -> None:
    with pytest.raises(TraceError, match="forward failed on meta tensors after"):
        trace(forward)


def test_a_constructor_that_needs_values_is_built_for_real() -> None:
    nodes = trace("return x * self.s", init="self.s = torch.linspace(0, 1, 3)[1].item()")
    assert names(nodes) == ["mul"]


def test_nodes_are_plain_json() -> None:
    nodes = trace("return self.c(x)", "self.c = nn.Conv2d(3, 6, 3)", "torch.rand(1, 3, 9, 9)")
    assert to_json(nodes)[0]["shape"] == [1, 6, 7, 7]


ATTRIBUTES = [
    # same task: other spelling or other sizes
    ("x.softmax(1)", "torch.softmax(x, dim=-1)", True),
    ("F.gelu(x)", "nn.GELU()(x)", True),
    ("x.mean(1)", "torch.mean(x, dim=-1, keepdim=False)", True),
    ("F.leaky_relu(x)", "nn.LeakyReLU(0.01)(x)", True),
    ("x * 3.5", "torch.mul(x, 7)", True),
    ("nn.Linear(8, 4)(x)", "nn.Linear(8, 6)(x)", True),
    # another kernel to write
    ("x.softmax(0)", "x.softmax(1)", False),
    ("x.mean(1)", "x.mean(1, keepdim=True)", False),
    ("x - 1", "1 - x", False),
    ("x ** 2", "x ** 3", False),
    ("x + x[0]", "x + x[:, :1]", False),
    ("x.exp()", "x[None].exp()", False),
    ("x.exp()", "x.to(torch.bfloat16).exp()", False),
    ("x @ torch.rand(8, 4)", "x @ torch.rand(8, 400)", False),
]


@pytest.mark.parametrize(("left", "right", "same"), ATTRIBUTES)
def test_attributes_tell_tasks_apart_and_sizes_not(left: str, right: str, same: bool) -> None:
    first, second = (trace(f"return {text}")[-1] for text in (left, right))
    assert (first.attributes == second.attributes) is same


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("nn.Conv2d(4, 8, 3)", {"groups": "1", "kernel": "n"}),
        ("nn.Conv2d(4, 8, 1)", {"groups": "1", "kernel": "1"}),
        ("nn.Conv2d(4, 4, 3, groups=4)", {"groups": "depthwise", "kernel": "n"}),
        ("nn.Conv2d(4, 8, 3, groups=2)", {"groups": "grouped", "kernel": "n"}),
    ],
)
def test_convolution_classes(layer: str, expected: dict[str, str]) -> None:
    (node,) = trace("return self.c(x)", f"self.c = {layer}", "torch.rand(1, 4, 9, 9)")
    assert expected.items() <= dict(node.attributes).items()
