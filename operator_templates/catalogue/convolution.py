"""Convolutions of one to three dims: dense, pointwise, depthwise, grouped, dilated, strided,
transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from operator_templates.lanes import weighted
from operator_templates.template import Cost, Template
from operator_templates.values import Call, Shape, Trait, Traits

CHANNELS = (8, 12, 16, 24, 32, 48, 64, 96, 128)


def conv_shape(call: Call) -> Shape:
    k, s, p, d = (call[n] for n in ("kernel_size", "stride", "padding", "dilation"))
    spatial = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n in call.shape[2:])
    return (call.shape[0], call["out_channels"], *spatial)


def transposed_shape(call: Call) -> Shape:
    k, s, p = (call[n] for n in ("kernel_size", "stride", "padding"))
    return (
        call.shape[0],
        call["out_channels"],
        *((n - 1) * s - 2 * p + k for n in call.shape[2:]),
    )


def taps(call: Call) -> int:
    return int(call["kernel_size"]) ** (len(call.shape) - 2)


def fan_in(call: Call) -> int:
    return taps(call) * call.shape[1] // int(call["groups"])


def conv_flops(call: Call) -> int:
    return 2 * math.prod(conv_shape(call)) * fan_in(call)


def transposed_fan_in(call: Call) -> int:
    """Terms per output element: a stride of s reaches one in s positions along each dim."""
    return max(1, fan_in(call) // int(call["stride"]) ** (len(call.shape) - 2))


def output_fan(call: Call) -> int:
    """What PyTorch initialises a transposed convolution by: the fan of the output channels."""
    return taps(call) * int(call["out_channels"])


def transposed_flops(call: Call) -> int:
    return 2 * math.prod(transposed_shape(call)) * transposed_fan_in(call)


def bias_trait(call: Call) -> Traits:
    return frozenset({(Trait.SHIFTED, call.all_dims(but=1))})


def drawn(
    kernels: tuple[int, ...],
    *,
    strides: tuple[int, ...] = (1,),
    dilations: tuple[int, ...] = (1,),
    groups: str = "one",
) -> Callable[[Random, Shape], dict[str, Any] | None]:
    """Attributes of a convolution. `groups` is one, some (2 to 8) or depthwise."""

    def draw(rng: Random, shape: Shape) -> dict[str, Any] | None:
        kernel, dilation = rng.choice(kernels), rng.choice(dilations)
        stride = rng.choice(strides)
        channels = shape[1]
        out = rng.choice([*CHANNELS, channels, channels])
        divisors = [g for g in (2, 4, 8) if channels % g == 0 and channels > g]
        count = {"one": 1, "depthwise": channels}.get(groups) or rng.choice(divisors or [0])
        if min(shape[2:]) < 2 * dilation * kernel or channels < 3 or channels > 512 or not count:
            return None
        if count > 1:
            out = channels if groups == "depthwise" else count * max(1, out // count)
        padding = rng.choice((0, dilation * (kernel - 1) // 2, dilation * (kernel - 1) // 2))
        return {
            "in_channels": channels,
            "out_channels": out,
            "kernel_size": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": count,
        }

    return draw


def conv(
    rank: int, arguments: str, doc: str, draw: Any, *, variant: str = "", **more: Any
) -> Template:
    """`nn.Conv{rank}d`, with keyword arguments named in `arguments`."""
    sizes = "{in_channels}, {out_channels}, {kernel_size}"
    keywords = "".join(f", {name}={{{name}}}" for name in arguments.split())
    fields: dict[str, Any] = {
        "canonical": (f"conv{rank}d",),
        "init": f"nn.Conv{rank}d({sizes}{keywords}{{dtype}})",
        "shape": conv_shape,
        "sample": weighted(fan_in, bias=True),
        "cost": Cost(flops=conv_flops, passes=2.0),
    }
    return Template(
        name=f"nn.Conv{rank}d",
        variant=variant,
        family="convolution",
        doc=doc,
        attribute="conv",
        forward="{m}({x})",
        ranks=(rank + 2,),
        draw=draw,
        leaves=bias_trait,
        dense=True,
        **(fields | more),
    )


def transposed(rank: int) -> Template:
    name = f"nn.ConvTranspose{rank}d"
    sizes = "{in_channels}, {out_channels}, {kernel_size}, stride={stride}, padding={padding}"
    return conv(
        rank,
        "",
        f"a transposed {rank}-d convolution",
        drawn((2, 3, 4), strides=(1, 2)),
        shape=transposed_shape,
        sample=weighted(transposed_fan_in, bias=True, weight_fan=output_fan),
        canonical=(f"conv_transpose{rank}d",),
        cost=Cost(flops=transposed_flops, passes=6.0),
        init=f"{name}({sizes}{{dtype}})",
    ).but(name=name)


TEMPLATES: list[Template] = [
    conv(1, "padding dilation", "a 1-d convolution", drawn((3, 5, 7), dilations=(1, 2))),
    conv(
        1,
        "padding groups",
        "a depthwise 1-d convolution",
        drawn((3, 5, 7, 9), groups="depthwise"),
        variant="depthwise",
        cost=Cost(flops=conv_flops, passes=4.0, cpu_ns=1.0),
    ),
    conv(2, "padding", "a 2-d convolution", drawn((3, 5))),
    conv(2, "", "a pointwise convolution", drawn((1,)), variant="pointwise"),
    conv(
        2,
        "stride padding",
        "a strided 2-d convolution",
        drawn((3, 5), strides=(2, 3)),
        variant="strided",
    ),
    conv(
        2,
        "padding dilation",
        "a dilated 2-d convolution",
        drawn((3,), dilations=(2, 3)),
        variant="dilated",
    ),
    conv(
        2,
        "padding groups",
        "a grouped 2-d convolution",
        drawn((3, 5), groups="some"),
        variant="grouped",
        cost=Cost(flops=conv_flops, passes=4.0),
    ),
    conv(
        2,
        "padding groups",
        "a depthwise 2-d convolution",
        drawn((3, 5, 7), groups="depthwise"),
        variant="depthwise",
        cost=Cost(flops=conv_flops, passes=6.0, cpu_ns=1.0),
    ),
    conv(3, "padding", "a 3-d convolution", drawn((3,)), cost=Cost(flops=conv_flops, passes=4.0)),
    conv(
        3,
        "padding groups",
        "a depthwise 3-d convolution",
        drawn((3,), groups="depthwise"),
        variant="depthwise",
        cost=Cost(flops=conv_flops, passes=10.0, cpu_ns=3.0),
    ),
    transposed(1),
    transposed(2),
    transposed(3),
]
