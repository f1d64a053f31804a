# ruff: noqa: SIM905 - a word list reads better whole
"""Trace a problem to a flat graph of ATen operators, as plain JSON values.

    {"placeholders": [{"name", "kind": input|parameter|buffer, "source": position or FQN,
                       "title", "contiguous", "shape", "dtype"}],
     "nodes":        [{"name", "op", "args", "kwargs", "shape", "dtype", "constant"?}],
     "outputs":      {"form": tensor|tuple|list, "names": [...]}}

An argument that is a tensor is {"ref": name}, a dtype is {"dtype": name}; everything else is a
JSON value, with {"float": "inf"} for floats JSON cannot hold. Tensors are fake (no memory is
touched) and sizes are concrete. Runs the problem's own code, so callers run it in a sandboxed
child; only this file of the package imports torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

MAX_CONSTANT = 64
"""Literal tensors in a forward are carried by value up to this many elements."""

# Taken apart on top of the core set, so that what remains is pointwise, reductions, views and
# a few specials.
DECOMPOSE = """
_softmax _log_softmax native_layer_norm native_group_norm native_batch_norm
_native_batch_norm_legit _native_batch_norm_legit_no_training instance_norm rms_norm
_fused_rms_norm _safe_softmax gelu silu mish hardswish hardsigmoid hardtanh softplus elu celu selu
leaky_relu log_sigmoid_forward threshold softshrink hardshrink rrelu prelu relu6 glu softsign
_prelu_kernel var std var_mean std_mean addmm addmv baddbmm addbmm addr addcmul addcdiv lerp
logsumexp special_logsumexp mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits nll_loss_forward nll_loss2d_forward soft_margin_loss
margin_ranking_loss kl_div hinge_embedding_loss cosine_embedding_loss
multilabel_margin_loss_forward multi_margin_loss triplet_margin_loss frac square rsub clamp_min
clamp_max nan_to_num logaddexp logaddexp2 xlogy heaviside sinc linalg_vector_norm norm dist
aminmax fill masked_fill roll tril triu trace pixel_shuffle pixel_unshuffle channel_shuffle
unfold_copy im2col take index_add index_copy linspace arange zeros ones zeros_like ones_like
full_like new_zeros new_ones new_full new_empty upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d
reflection_pad3d replication_pad3d _upsample_nearest_exact2d reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d stack hstack vstack t std_mean count_nonzero special_entr
special_log_ndtr special_xlog1py logit isin deg2rad rad2deg sgn
""".split()


def trace_aten(namespace: Mapping[str, Any] | ModuleType) -> dict[str, Any]:
    """The ATen graph of `Model(*get_init_inputs()).eval()(*get_inputs())` under no_grad, as JSON
    values."""
    names = vars(namespace) if isinstance(namespace, ModuleType) else namespace
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = names["Model"](*names["get_init_inputs"]()).eval()
        inputs = list(names["get_inputs"]())
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        form: list[str] = []

        def forward(ps: dict[str, Any], bs: dict[str, Any], *xs: Any) -> Any:
            out = torch.func.functional_call(model, {**ps, **bs}, xs)
            form.append(_form(out))
            return list(out) if isinstance(out, list | tuple) else [out]

        # Without mutations every name stands for one value.
        pure = torch.func.functionalize(forward, remove="mutations")
        graph = make_fx(pure, decomposition_table=_table())(parameters, buffers, *inputs)
    origins = [("parameter", fqn) for fqn in parameters] + [("buffer", fqn) for fqn in buffers]
    origins += [("input", position) for position in range(len(inputs))]
    arguments = list(inspect.signature(model.forward).parameters)
    return _serialise(graph, origins, arguments, form[-1])


def _form(out: Any) -> str:
    if isinstance(out, torch.Tensor):
        return "tensor"
    if isinstance(out, list | tuple) and all(isinstance(item, torch.Tensor) for item in out):
        return "list" if isinstance(out, list) else "tuple"
    raise TypeError(f"forward must return a tensor or a flat tuple of tensors, got {type(out)}")


def _table() -> dict[Any, Any]:
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in DECOMPOSE if hasattr(aten, name)]
    extra: dict[Any, Any] = {}
    for packet in packets:  # one by one: a name without a decomposition is simply left whole
        try:
            extra.update(get_decompositions([packet]))
        except RuntimeError:
            continue
    return {**core_aten_decompositions(), **extra}


def _serialise(
    graph: Any, origins: list[tuple[str, Any]], arguments: list[str], form: str
) -> dict[str, Any]:
    graph.graph.eliminate_dead_code()
    placeholders: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    outputs: list[str] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            kind, source = origins[len(placeholders)]
            value = node.meta.get("val")
            known = kind == "input" and source < len(arguments)
            entry = {
                "name": node.name,
                "kind": kind,
                "source": source,
                "title": arguments[source] if known else str(source),
                "contiguous": isinstance(value, torch.Tensor) and value.is_contiguous(),
                **_meta(value),
            }
            placeholders.append(entry)
        elif node.op == "output":
            outputs = [arg.name for arg in node.args[0]]
        elif node.op == "get_attr":
            nodes.append(_constant(node, getattr(graph, node.target)))
        else:
            entry = {
                "name": node.name,
                "op": _op_name(node.target),
                "args": _encode(node.args),
                "kwargs": _encode(node.kwargs),
                **_meta(node.meta.get("val")),
            }
            nodes.append(entry)
    return {
        "placeholders": placeholders,
        "nodes": nodes,
        "outputs": {"form": form, "names": outputs},
    }


def _constant(node: Any, value: torch.Tensor) -> dict[str, Any]:
    literal = getattr(value, "constant", None)
    literal = value if literal is None else literal
    entry = {"name": node.name, "op": "constant", "args": [], "kwargs": {}, **_meta(value)}
    if value.numel() <= MAX_CONSTANT and type(literal) is torch.Tensor:
        entry["constant"] = _encode(literal.reshape(-1).tolist())
    return entry


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        overload = "" if target._overloadname == "default" else "." + target._overloadname
        return f"{name}{overload}" if namespace == "aten" else f"{namespace}::{name}{overload}"
    return getattr(target, "__name__", str(target))


def _meta(value: Any) -> dict[str, Any]:
    """shape and dtype of a tensor, lists of them for several results, None where there is no
    tensor."""
    if isinstance(value, torch.Tensor):
        return {"shape": [int(n) for n in value.shape], "dtype": str(value.dtype)[6:]}
    if isinstance(value, list | tuple):
        parts = [_meta(item) for item in value]
        return {"shape": [p["shape"] for p in parts], "dtype": [p["dtype"] for p in parts]}
    return {"shape": None, "dtype": None}


def _encode(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)[6:]}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)  # device, layout, memory format: no effect on what is computed
