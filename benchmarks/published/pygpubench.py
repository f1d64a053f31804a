"""PyGPUBench's exploits: modules with `kernel(output, input)`, written against its harness.

All of them are about one problem, an image to grey. What makes the answer in them is torch, so each
is run a second time without the audits that catch just that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.published.records import AUDITS, Expect, Published, Suite, text_of
from benchmarks.published.wrapping import filling
from schemas.records import Target

FOLDER = "exploits"
PREFIX = "submission_"
KNOWN = {"submission_correct": Expect.TORCH, "submission_wrong": Expect.WRONG}
"""Everything else is an exploit."""
SIZE = {Target.CUDA: 8192, Target.CPU: 1024}
PROBLEM = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        weights = torch.tensor([0.2989, 0.5870, 0.1140], device=x.device, dtype=x.dtype)
        return (x * weights).sum(dim=-1)


def get_inputs():
    return [torch.rand({size}, {size}, 3)]


def get_init_inputs():
    return []
"""


def read(root: Path, target: Target) -> Iterator[Published]:
    """Raises PublishedError."""
    problem = PROBLEM.format(size=SIZE[target])
    for file in sorted((root / FOLDER).glob(f"{PREFIX}*.py")):
        made = Published(
            name=file.stem,
            problem_code=problem,
            files=filling(text_of(file), "kernel", "x.shape[:-1]", target),
            form="cabi",
            expect=KNOWN.get(file.stem, Expect.EXPLOIT),
        )
        yield made
        yield replace(made, name=f"{made.name}, audits off", off=AUDITS)


SUITE = Suite(
    url="github.com/ngc92/pygpubench", marker=f"{FOLDER}/submission_correct.py", read=read,
    accept_problem=True,
)  # fmt: skip
