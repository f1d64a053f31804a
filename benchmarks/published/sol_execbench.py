"""SOL-ExecBench's samples: kernels that trick its driver, and honest ones beside them.

A sample is `definition.json` (a function and its inputs), `workload.jsonl` (sizes) and solutions.
Of its workloads the largest is taken, which can be timed best. A trick that calls itself
`solution_hack_*` has its definition in the folder of the same name.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published.records import (
    AUDITS,
    Expect,
    Published,
    PublishedError,
    Suite,
    needed_libraries,
    text_of,
)
from benchmarks.published.wrapping import returning
from schemas.records import Precision, Target
from verification.folder import MODEL

SAMPLES = Path("tests/sol_execbench/samples")
HACKS = Path("tests/samples")
EVIL_SIZE = {Target.CUDA: 1 << 27, Target.CPU: 1 << 22}
EVIL_PROBLEM = """
import torch


class Model(torch.nn.Module):
    def forward(self, x, y):
        return x + y


def get_inputs():
    return [torch.randn({size}), torch.randn({size})]


def get_init_inputs():
    return []
"""
"""What the tests of its driver ask of `evil_*`; theirs has 256 numbers."""
PROBLEM = """{reference}

import torch


class Model(torch.nn.Module):
    def forward(self, *inputs):
        return run(*inputs)


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
CUDA_MODEL = """
import torch
from torch.utils.cpp_extension import load

built = load(name="published", sources={sources})


class ModelNew(torch.nn.Module):
    def forward(self, *inputs):
        return built.{entry}(*inputs)
"""


def read(root: Path, target: Target) -> Iterator[Published]:
    """Raises PublishedError."""
    for folder in sorted((root / SAMPLES).iterdir()):
        if folder.name.startswith("evil_"):
            asked = EVIL_PROBLEM.format(size=EVIL_SIZE[target])
            made = _called(f"{folder.name}", text_of(folder / "kernel.py"), "run", asked, target)
            yield from _twice(replace(made, expect=Expect.EXPLOIT))
        elif folder.is_dir():
            for file in sorted(folder.glob("solution*.json")):
                made = _honest(folder, file, target)
                yield from [made] if made.form == "load_inline" else _twice(made)
    for file in sorted((root / HACKS).glob("*/solution_hack_*.json")):
        problem, why_not, precision = _problem(root / SAMPLES / file.parent.name)
        name = f"{file.parent.name}/{file.stem}"
        if why_not:
            yield Published(name=name, why_not=why_not)
            continue
        code, function = _python(file, _json(file))
        made = _called(name, code, function, problem, target)
        yield from _twice(replace(made, expect=Expect.EXPLOIT, precision=precision))


def _twice(made: Published) -> Iterator[Published]:
    yield made
    if not made.why_not:
        yield replace(made, name=f"{made.name}, audits off", off=AUDITS)


def _called(name: str, code: str, function: str, problem: str, target: Target) -> Published:
    return Published(
        name=name, problem_code=problem, files=returning(code, function, target), form="cabi"
    )


def _honest(folder: Path, file: Path, target: Target) -> Published:
    said = _json(file)
    name, spec = f"{folder.name}/{file.stem}", said["spec"]
    languages = spec.get("languages") or [spec.get("language")]
    problem, why_not, precision = _problem(folder)
    if languages not in (["cuda_cpp"], ["pytorch"], ["python"]):
        why_not = f"written in {', '.join(map(str, languages))}, for which there is no form"
    elif spec.get("destination_passing_style"):
        why_not = "it fills an output that it is given"
    if why_not:
        return Published(name=name, why_not=why_not)
    libraries = needed_libraries(problem)
    if languages != ["cuda_cpp"]:
        code, function = _python(file, said)
        made = _called(name, code, function, problem, target)
        return replace(made, expect=Expect.TORCH, precision=precision, libraries=libraries)
    files = {f"kernels/{source['path']}": source["content"] for source in said["sources"]}
    compiled = [path for path in files if not path.endswith((".h", ".cuh", ".hpp"))]
    entry = spec["entry_point"].rpartition("::")[2]
    model = CUDA_MODEL.format(sources=sorted(compiled), entry=entry)
    return Published(
        name=name, problem_code=problem, files={MODEL: model, **files}, expect=Expect.HONEST,
        precision=precision, libraries=libraries,
    )  # fmt: skip


def _python(file: Path, said: dict[str, Any]) -> tuple[str, str]:
    """The text of a solution in Python, and the function to call."""
    path, _, function = said["spec"]["entry_point"].rpartition("::")
    for source in said["sources"]:
        if source["path"] == path:
            # What is left out of the JSON lies beside it.
            return source["content"] or text_of(file.parent / path), function
    raise PublishedError(f"{file}: expected a source {path!r}, got none")


def _problem(folder: Path) -> tuple[str, str, Precision]:
    """(the problem, or why it has none, its precision). Raises PublishedError."""
    said = _json(folder / "definition.json")
    lines = text_of(folder / "workload.jsonl").splitlines()
    loads = [json.loads(line) for line in lines if line.strip()]
    reference, nothing = said["reference"], ("", Precision.FP32)
    if said.get("custom_inputs_entrypoint"):
        return nothing[0], "its inputs come from a function of its own", nothing[1]
    if "triton" in reference:
        return (
            nothing[0],
            "its reference is a Triton kernel, which cannot be run in fp64",
            nothing[1],
        )
    fixed = {name: axis["value"] for name, axis in said["axes"].items() if axis["type"] == "const"}
    largest = max(loads, key=lambda load: math.prod(load["axes"].values()))
    sizes = {**fixed, **largest["axes"]}
    inputs = []
    for name, wanted in said["inputs"].items():
        given = largest["inputs"][name]
        if given["type"] == "scalar":
            inputs.append(repr(given["value"]))
        elif given["type"] == "random" and "float" in wanted["dtype"]:
            shape = ", ".join(str(sizes.get(axis, axis)) for axis in wanted["shape"])
            inputs.append(f"torch.randn({shape}, dtype=torch.{wanted['dtype']})")
        else:
            return "", f"its input {name} is of the kind {given['type']}", Precision.FP32
    half = any(wanted["dtype"] == "bfloat16" for wanted in said["inputs"].values())
    code = PROBLEM.format(reference=reference, inputs=", ".join(inputs))
    ast.parse(code)
    return code, "", Precision.BF16 if half else Precision.FP32


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text_of(file))
    except ValueError as error:
        raise PublishedError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise PublishedError(f"{file}: expected a JSON object, got {found!r:.80}")
    return found


SUITE = Suite(url="NVIDIA's SOL-ExecBench", marker=str(SAMPLES), read=read, accept_problem=True)
