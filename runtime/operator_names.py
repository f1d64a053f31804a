"""The canonical spelling of PyTorch operators: one word per operation, whatever API it came
through.

Two tables, applied in this order:

    ALIASES     how a call is spelled -> its call name        mm, `@` -> matmul; .T -> transpose
    EXPANSIONS  a composite call      -> the operators in it  linear -> matmul add

`ops` of a problem are call names (`linear`, `silu`); signatures are made of operators (`matmul`,
`add`, ...), so that a composite and the same thing written out by hand read alike. A call in
neither table is its own name and operator. Not covered: algebraic rewrites the tables do not list
(softmax by exp and sum, `x * x` for `x ** 2`, einsum).
"""

from __future__ import annotations

_SPELLINGS: dict[str, str] = {
    "matmul": "mm bmm mv dot vdot chain_matmul linalg_matmul",
    "transpose": "T mT H mH t permute swapaxes swapdims movedim moveaxis adjoint",
    "view": "reshape flatten unflatten ravel squeeze unsqueeze view_as reshape_as atleast_2d",
    "expand": "expand_as broadcast_to",
    "repeat": "tile",
    "slice": "narrow select",
    "split": "chunk tensor_split split_with_sizes unbind iter",
    "cat": "concat concatenate hstack vstack dstack",
    "add": "iadd radd",
    "sub": "subtract rsub isub",
    "mul": "multiply rmul imul",
    "div": "divide true_divide truediv rdiv rtruediv itruediv idiv",
    "pow": "rpow ipow float_power",
    "floor_divide": "floordiv rfloordiv ifloordiv",
    "remainder": "mod rmod imod fmod",
    "neg": "negative",
    "abs": "absolute",
    "clamp": "clip clamp_min clamp_max",
    "max": "amax",
    "min": "amin",
    "norm": "linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm",
    "softmax": "special_softmax",
    "log_softmax": "special_log_softmax",
    "sigmoid": "expit special_expit",
    "logsigmoid": "log_sigmoid",
    "erf": "special_erf",
    "logsumexp": "special_logsumexp",
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "ne": "not_equal",
    "logical_and": "and bitwise_and",
    "logical_or": "or bitwise_or",
    "logical_not": "invert bitwise_not",
    "multi_head_attention": "multi_head_attention_forward",
    "zeros": "zeros_like new_zeros",
    "ones": "ones_like new_ones",
    "full": "full_like new_full",
    "empty": "empty_like new_empty",
    "rand": "rand_like",
    "randn": "randn_like",
}

ALIASES: dict[str, str] = {
    alias: name for name, aliases in _SPELLINGS.items() for alias in aliases.split()
}

EXPANSIONS: dict[str, tuple[str, ...]] = {
    "linear": ("matmul",),  # + add with a bias
    "addmm": ("matmul", "add"),
    "addmv": ("matmul", "add"),
    "baddbmm": ("matmul", "add"),
    "addbmm": ("matmul", "sum", "add"),
    "addcmul": ("mul", "add"),
    "addcdiv": ("div", "add"),
    "lerp": ("sub", "mul", "add"),
    "silu": ("sigmoid", "mul"),
    "mish": ("softplus", "tanh", "mul"),
    "softsign": ("abs", "add", "div"),
    "tanhshrink": ("tanh", "sub"),
    "glu": ("split", "sigmoid", "mul"),
    "softmin": ("neg", "softmax"),
    "hardtanh": ("clamp",),
    "relu6": ("clamp",),
    "square": ("pow",),
    "reciprocal": ("div",),
    "normalize": ("norm", "div"),
    "rms_norm": ("pow", "mean", "add", "sqrt", "div"),  # + mul with a weight
    "scaled_dot_product_attention": ("transpose", "matmul", "mul", "softmax", "matmul"),
    "mse_loss": ("sub", "pow"),  # + mean or sum, by `reduction`
    "l1_loss": ("sub", "abs"),  # + mean or sum
    "huber_loss": ("smooth_l1_loss",),
    "cross_entropy": ("log_softmax", "nll_loss"),
}

OPTIONAL_TENSOR: dict[str, tuple[int, str, str]] = {
    # call: (position of the argument, its keyword, the operator it adds when given)
    "linear": (2, "bias", "add"),
    "rms_norm": (2, "weight", "mul"),
}

REDUCED_LOSSES = frozenset({"mse_loss", "l1_loss"})

_MOVES = {"contiguous", "clone", "detach", "to", "cpu", "cuda", "data", "alias", "identity"}
_CASTS = {"float", "half", "double", "bfloat16", "type", "type_as"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"}
_DROPOUTS |= {"feature_dropout", "feature_alpha_dropout"}
NOT_OPERATORS = frozenset(_MOVES | _CASTS | _DROPOUTS | {"positive", "requires_grad"})
"""Calls whose result counts as their input: copies, moves, casts, and dropout (traced in eval
mode, so inactive).
"""

LAYOUT = frozenset({"view", "transpose", "expand", "slice"})
"""Calls that move no data of their own: skipped when the shape and strides stay, or on a bare
parameter.
"""

SPLITS = frozenset({"split", "hsplit", "vsplit", "dsplit", "meshgrid", "broadcast_tensors"})
"""Calls with several results that only move data."""

CONSTANTS = frozenset({"tensor", "as_tensor", "scalar_tensor", "from_numpy"})
"""Calls that turn Python numbers into a tensor: it counts as a parameter."""

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

VALUE_CHECKED = frozenset({"gaussian_nll_loss"})
"""Losses whose Python code looks at values before it computes: shaped by hand instead of run."""

_ADDED = {"mean": "mean", "sum": "sum"}


def call_name(spelling: str) -> str:
    """The call name of a function or method name: `relu_` -> relu, `__rsub__` -> sub, `mm` ->
    matmul.
    """
    name = spelling.strip("_")
    return ALIASES.get(name, name)


def operators_of(call: str, *, optional: bool = False, reduction: str = "mean") -> tuple[str, ...]:
    """The operators a call stands for.

    Args:
        call: a call name, such as "linear".
        optional: whether the optional tensor (bias of linear, weight of rms_norm) is given.
        reduction: "mean", "sum" or "none", for losses.
    """
    operators = EXPANSIONS.get(call, (call,))
    if optional and call in OPTIONAL_TENSOR:
        operators += (OPTIONAL_TENSOR[call][2],)
    if call in REDUCED_LOSSES and reduction in _ADDED:
        operators += (_ADDED[reduction],)
    return operators
