"""Text in KernelBench form to a module. Runs foreign code: only inside a sandboxed child."""

from __future__ import annotations

import linecache
import sys
import types
from typing import Any

import torch

REQUIRED = ("Model", "get_inputs", "get_init_inputs")


def load_module(code: str, name: str = "problem") -> types.ModuleType:
    """Execute `code` as module `name`, with source lines kept for tracebacks and `inspect`.

    Raises whatever the code raises, and ValueError when a required name is missing.
    """
    filename = f"<{name}>"
    module = types.ModuleType(name)
    module.__file__ = filename
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    sys.modules[name] = module
    exec(compile(code, filename, "exec"), module.__dict__)
    missing = [wanted for wanted in REQUIRED if not hasattr(module, wanted)]
    if missing:
        raise ValueError(f"{name}: expected {', '.join(REQUIRED)}, got no {', '.join(missing)}")
    return module


def make_model(
    module: types.ModuleType, device: str, seed: int, redraw: bool = True
) -> torch.nn.Module:
    """The module's `Model` on `device` in eval mode, with parameters and buffers drawn from `seed`.

    Floating parameters and buffers are redrawn, so that a solution which assumes the usual initial
    ones and zeros is wrong: x -> x * (1 + u/4) with u in [0, 1), and constant tensors (norm scales,
    running statistics, zero biases) also get v/10, v in [0, 1). Variances stay positive under that.
    Without `redraw` they stay as the constructor leaves them.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = module.Model(*module.get_init_inputs()).eval()
    if not redraw:
        return model
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    for _, tensor in sorted(
        {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    ):
        if tensor.is_floating_point() and tensor.numel() > 0:
            _redraw(tensor.data, generator)
    return model


def _redraw(tensor: torch.Tensor, generator: torch.Generator) -> None:
    def uniform() -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, device=tensor.device)

    stretched = tensor.float() * (1 + uniform() / 4)
    constant = bool((tensor == tensor.flatten()[0]).all())
    tensor.copy_(stretched + uniform() / 10 if constant else stretched)


def make_inputs(module: types.ModuleType, device: str, seed: int) -> list[Any]:
    """`get_inputs()` under a seed, made on `device`."""
    torch.manual_seed(seed)
    with torch.device(device):
        return list(module.get_inputs())
