# ruff: noqa: E501, SIM905 - a table of cases reads better whole
"""Small models, one or more for each operator family, and the way from a problem's text to a
running solution."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

from kernel_agent.expert.aten import trace_aten
from kernel_agent.expert.grouping import optimized_plan
from kernel_agent.expert.lowering import lower
from kernel_agent.expert.params import PLAIN, Params
from kernel_agent.expert.plan import Plan, reference_plan
from kernel_agent.expert.solution import solution_files
from runtime import cabi
from schemas.codec import content_id
from schemas.records import Target

PLANNERS = {"reference": reference_plan, "optimized": optimized_plan}
GXX = (
    "g++ -std=c++17 -O1 -march=native -fopenmp -fno-math-errno -fno-trapping-math -shared -fPIC"
).split()

# name: (forward body, input expressions, constructor lines); {dt} is ", dtype=torch.bfloat16" or nothing
CASES: dict[str, tuple[str, list[str], str]] = {
    "chain": ("return torch.tanh(F.gelu(x) * y + 0.5).relu()", ["r(7, 33)", "r(33)"], ""),
    "functions": ("return torch.sin(x) + torch.expm1(x) + torch.atan(x) * torch.sigmoid(x)", ["r(3, 50)"], ""),
    "nan": ("return torch.clamp(torch.sqrt(x), 0.1, 1.0) + torch.relu(torch.log(x))", ["r(5, 40)"], ""),
    "pow": ("return (x.abs() + 1) ** 1.5 + x**3 + torch.rsqrt(x * x + 1)", ["r(4, 17)"], ""),
    "masks": ("return torch.where((x > 0) & (y < 0.5), x, y).masked_fill(x.abs() > 1.5, -2.0)", ["r(9, 9)", "r(9, 9)"], ""),
    "two_outputs": ("return x.exp().sum(-1), x * 2", ["r(6, 40)"], ""),
    "same_output": ("y = x + 1\nreturn y, y, x", ["r(6, 7)"], ""),
    "sum": ("return x.sum()", ["r(37, 91)"], ""),
    "mean_middle": ("return x.mean(1, keepdim=True) * x", ["r(3, 19, 23)"], ""),
    "amax_amin": ("return x.amax((0, 2)) - x.amin((0, 2))", ["r(3, 19, 23)"], ""),
    "argmax": ("return x.argmax(1), x.max(-1)[1]", ["r(5, 70, 3)"], ""),
    "prod_any": ("return x.prod(-1) * (x > 1.9).any(-1)", ["r(11, 9)"], ""),
    "std": ("return x.std(0), x.var((1, 2), unbiased=False)", ["r(6, 5, 30)"], ""),
    "softmax": ("return F.softmax(x, -1)", ["r(5, 77)"], ""),
    "softmax_column": ("return F.log_softmax(x, 1) + x", ["r(3, 20, 35)"], ""),
    "logsumexp": ("return torch.logsumexp(x, (1, 2))", ["r(3, 20, 35)"], ""),
    "layer_norm": ("return F.gelu(self.n(x)) + x", ["r(4, 3, 60)"], "self.n = nn.LayerNorm(60{dt})"),
    "group_norm": ("return self.n(x).tanh()", ["r(2, 6, 5, 7)"], "self.n = nn.GroupNorm(3, 6{dt})"),
    "batch_norm": ("return self.n(x)", ["r(2, 6, 5, 7)"], "self.n = nn.BatchNorm2d(6{dt})"),
    "rms_norm": ("return self.n(x)", ["r(5, 48)"], "self.n = nn.RMSNorm(48{dt})"),
    "l2_norm": ("return F.normalize(x, dim=1) * x.norm(p=1)", ["r(4, 9, 8)"], ""),
    "linear": ("return F.relu(self.f(x))", ["r(5, 3, 20)"], "self.f = nn.Linear(20, 33{dt})"),
    "matmul": ("return x @ y.transpose(1, 2) * 0.5", ["r(2, 9, 16)", "r(2, 21, 16)"], ""),
    "einsum": ("return torch.einsum('bij,bkj->bik', x, x).softmax(-1)", ["r(2, 9, 16)"], ""),
    "conv1d": ("return self.c(x)", ["r(2, 4, 30)"], "self.c = nn.Conv1d(4, 6, 5, padding=2, dilation=2{dt})"),
    "conv2d": ("return self.c(x).relu() + 1", ["r(2, 4, 9, 11)"], "self.c = nn.Conv2d(4, 6, 3, 2, 1, groups=2{dt})"),
    "conv3d": ("return self.c(x)", ["r(1, 2, 5, 6, 7)"], "self.c = nn.Conv3d(2, 3, 3, bias=False{dt})"),
    "conv_transpose": (
        "return self.c(x)",
        ["r(2, 4, 6, 5)"],
        "self.c = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2{dt})",
    ),
    "max_pool": ("return F.max_pool2d(x, 3, 2, 1)", ["r(2, 3, 11, 9)"], ""),
    "avg_pool": ("return F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)", ["r(2, 3, 11, 9)"], ""),
    "adaptive_pool": ("return F.adaptive_avg_pool2d(x, (3, 4)) + F.adaptive_max_pool2d(x, (3, 4))", ["r(2, 3, 11, 10)"], ""),
    "cross_entropy": ("return F.cross_entropy(x, y)", ["r(12, 9)", "torch.randint(0, 9, (12,))"], ""),
    "losses": ("return F.huber_loss(x, y) + F.mse_loss(x, y) + F.smooth_l1_loss(x, y)", ["r(13, 7)", "r(13, 7)"], ""),
    "kl_div": ("return F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction='batchmean')", ["r(8, 20)", "r(8, 20)"], ""),
    "cumsum": ("return x.cumsum(1) + x.cumsum(-1)", ["r(3, 70, 5)"], ""),
    "cummax": ("return x.cummax(-1)[0] * x.cumprod(0)", ["r(3, 80)"], ""),
    "gather": ("return x.gather(1, y).exp()", ["r(6, 8)", "torch.randint(0, 8, (6, 5))"], ""),
    "embedding": ("return self.e(x).sum(1)", ["torch.randint(0, 11, (4, 6))"], "self.e = nn.Embedding(11, 8{dt})"),
    "index_add": ("return x.index_add(0, y, x[:4])", ["r(9, 5)", "torch.randint(0, 9, (4,))"], ""),
    "scatter_add": ("return x.scatter_add(1, y, x)", ["r(6, 8)", "torch.randint(0, 8, (6, 8))"], ""),
    "views": ("return x.transpose(1, 2)[:, ::2].flip(0).reshape(-1, 9).roll(1, 0) * 2", ["r(4, 9, 6)"], ""),
    "cat_pad": ("return F.pad(torch.cat([x, x * 2], 1), (1, 2, 0, 1), value=0.5)", ["r(3, 4, 5)"], ""),
    "reflect": ("return F.pad(x, (2, 1, 1, 2), mode='reflect')", ["r(1, 2, 6, 7)"], ""),
    "shuffle": ("return F.pixel_shuffle(x, 2).exp()", ["r(2, 8, 3, 4)"], ""),
    "interpolate": ("return F.interpolate(x, scale_factor=2, mode='bilinear')", ["r(1, 2, 5, 6)"], ""),
    "attention": ("return F.scaled_dot_product_attention(x, y, y)", ["r(2, 2, 9, 16)", "r(2, 2, 12, 16)"], ""),
    "set_item": ("y = torch.zeros_like(x)\ny[:, 1:] = x[:, :-1]\nreturn y", ["r(4, 6)"], ""),
    "split_sum": ("return (x.abs() + 0.1).log().mean(), x.amax((0, 2, 3))", ["r(64, 3, 40, 40)"], ""),
}  # fmt: skip
FP32_ONLY = {
    "embedding",
    "interpolate",
    "scatter_add",
    "index_add",
    "pow",
    "cummax",
    "split_sum",
    "attention",
}


def problem(name: str, dtype: str = "float32") -> str:
    """The text of a case in KernelBench form."""
    body, inputs, init = CASES[name]
    more = "" if dtype == "float32" else f", dtype=torch.{dtype}"
    inputs = [
        text.replace("r(", "torch.randn(", 1).replace(")", more + ")", 1)
        if text[:2] == "r("
        else text
        for text in inputs
    ]
    lines = ["import torch", "import torch.nn as nn", "import torch.nn.functional as F", "", ""]
    lines += ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += ["        " + line for line in init.replace("{dt}", more).split("\n") if line]
    lines += ["", f"    def forward(self, {', '.join('xyz'[: len(inputs)])}):"]
    lines += ["        " + line for line in body.split("\n")]
    lines += ["", "", "def get_inputs():", f"    return [{', '.join(inputs)}]", ""]
    lines += ["", "def get_init_inputs():", "    return []", ""]
    return "\n".join(lines)


def namespace(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def plan_of(code: str, kind: str) -> Plan:
    return PLANNERS[kind](lower(trace_aten(namespace(code))))


def run_cpu(code: str, kind: str, folder: Path, params: Params = PLAIN) -> float:
    """Build and run the solution; the worst output error in units of what is allowed: 4 times
    eager's own error against fp64, and never below 16 units in the last place of the output's
    scale (the one number of a sum can be right by luck). NaN must stand at the same places."""
    files = solution_files(code, plan_of(code, kind), Target.CPU, params)
    # A name of its own: a library that is loaded already would be found again under the same path.
    source = folder / f"{content_id(files['kernels/kernels.cpp'])}.cpp"
    library = source.with_suffix(".so")
    source.write_text(files["kernels/kernels.cpp"])
    done = subprocess.run(
        [*GXX, source, "-o", library, "-lmvec", "-lm"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:2000]
    cabi.bind(str(library))
    sys.modules["cabi"] = types.ModuleType("cabi")
    sys.modules["cabi"].load = cabi.load  # type: ignore[attr-defined]
    names, new = namespace(code), namespace(files["model_new.py"])
    torch.manual_seed(0)
    model = names["Model"](*names["get_init_inputs"]()).eval()
    inputs = names["get_inputs"]()
    ours = new["ModelNew"](*names["get_init_inputs"]()).eval()
    ours.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        eager, got = _listed(model(*inputs)), _listed(ours(*inputs))
        exact = _listed(
            copy.deepcopy(model).double()(
                *[x.double() if x.is_floating_point() else x for x in inputs]
            )
        )
    assert len(eager) == len(got)
    return max(_error(*three) for three in zip(eager, got, exact, strict=True))


def _listed(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, list | tuple) else [out]


def _error(eager: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> float:
    assert got.shape == eager.shape and got.dtype == eager.dtype
    if not eager.is_floating_point():
        return 0.0 if torch.equal(eager, got) else float("inf")
    assert torch.equal(eager.isnan(), got.isnan())
    scale = float(exact.nan_to_num().abs().max()) + 1e-30
    own, ours = (float((x.double() - exact).nan_to_num().abs().max()) / scale for x in (eager, got))
    return ours / max(4 * own, 16 * torch.finfo(eager.dtype).eps)
