"""Kernels for KernelBench's problems from any source: which of them are taken, in which order.

Each text once, and of a problem no more than `MOST`. First come those that leave no work to torch
as far as their text says, because the others are refused for that, rightly and without saying
much; of equals, those that are claimed to be faster. Levels take turns, so that a run that is cut
short has seen all of them.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.cuda_l1 import why_not
from benchmarks.published.records import (
    Published,
    PublishedError,
    needed_libraries,
    one_file,
    text_of,
)
from verification.workers.audit import FREE

MOST = 2
FUNCTIONS = ("F", "torch.nn.functional", "nn.functional")
FREE_METHODS = FREE | {"size", "numel", "stride", "dim", "cuda", "float", "type", "device", "nn"}
COMPUTING_METHODS = {
    "sum", "mean", "max", "min", "amax", "amin", "matmul", "mm", "bmm", "softmax", "sigmoid",
    "tanh", "relu", "norm", "var", "std", "prod", "exp", "log", "pow", "sqrt", "add", "mul", "div",
    "clamp", "argmax", "argmin", "cumsum", "logsumexp", "log_softmax",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A kernel and where it belongs: a level of KernelBench and a problem in it, by its name."""

    name: str
    level: int
    problem: str
    """As KernelBench calls the file: 7_Matmul_with_small_K_dimension_."""
    code: str
    problem_code: str
    claimed: float | None = None


def chosen(pairs: Iterable[Pair]) -> Iterator[Published]:
    """Those with a kernel of their own, as the module's text says."""
    texts: dict[str, Pair] = {}
    for pair in pairs:
        if "__global__" in pair.code:
            kept = texts.setdefault(pair.code, pair)
            texts[pair.code] = pair if kept.claimed is None else kept
    problems: dict[tuple[int, int, str], list[Pair]] = defaultdict(list)
    for pair in texts.values():
        number = int(pair.problem.partition("_")[0])
        problems[pair.level, number, pair.problem].append(pair)
    taken = [
        (bool(left_to_torch(pair.code)), at, rank, pair)
        for at, found in problems.items()
        for rank, pair in enumerate(sorted(found, key=_order)[:MOST])
    ]
    levels: dict[tuple[bool, int, int], list[Pair]] = defaultdict(list)
    for torch, (level, *_), rank, pair in sorted(taken, key=lambda item: item[:3]):
        levels[torch, rank, level].append(pair)
    for _, group in itertools.groupby(sorted(levels), key=lambda key: key[:2]):
        in_turns = itertools.zip_longest(*(levels[key] for key in group))
        yield from (_published(pair) for turn in in_turns for pair in turn if pair is not None)


def _order(pair: Pair) -> tuple[bool, float, str]:
    return bool(left_to_torch(pair.code)), -(pair.claimed or 0.0), pair.name


def _published(pair: Pair) -> Published:
    return Published(
        name=pair.name,
        problem_code=pair.problem_code,
        of=(pair.level, pair.problem),
        files=one_file(pair.code),
        why_not=why_not(pair.code),
        claimed=pair.claimed,
        libraries=needed_libraries(pair.problem_code),
    )


def left_to_torch(code: str) -> list[str]:
    """What `ModelNew` calls that computes outside its kernels; nothing where it cannot be read."""
    try:
        with warnings.catch_warnings():  # of its text's, such as invalid escape sequences
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return []
    (model, *_) = [
        *(node for node in tree.body if getattr(node, "name", "") == "ModelNew"),
        ast.ClassDef("ModelNew", [], [], [], []),
    ]
    modules = _modules(model)
    used = [node for node in getattr(model, "body", []) if getattr(node, "name", "") != "__init__"]
    names = [_called(call) for method in used for call in ast.walk(method)]
    return sorted({name for name in names if name and _computes(name, modules)})


def _modules(model: ast.AST) -> set[str]:
    """Attributes that hold modules of torch."""
    found = set()
    for node in ast.walk(model):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            of = ast.unparse(node.value.func)
            if re.match(r"(torch\.)?nn\.(?!Parameter|init|Module\b)", of):
                found |= {ast.unparse(target) for target in node.targets}
    return found


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    return "@" if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) else ""


def _computes(name: str, modules: set[str]) -> bool:
    owner, _, method = name.rpartition(".")
    if name == "@" or name in modules or owner in FUNCTIONS:
        return True
    if owner == "torch":
        return method not in FREE_METHODS
    return bool(owner) and owner not in ("self", "math") and method in COMPUTING_METHODS


def with_problems_of(root: str, published: Iterable[Published]) -> list[Published]:
    """The same kernels for the problems of another copy of KernelBench: another version has other
    sizes, and a few other problems. Raises PublishedError."""
    folder = Path(root).expanduser() / "KernelBench"
    if not folder.is_dir():
        raise PublishedError(f"expected --problems_dir to be a copy of KernelBench, got {root!r}")
    made = []
    for one in published:
        if one.of is None:
            raise PublishedError(f"{one.name}: its suite does not say which problem it is for")
        level, name = one.of
        file = folder / f"level{level}" / f"{name}.py"
        if file.is_file():
            asked = text_of(file)
            one = replace(one, problem_code=asked, libraries=needed_libraries(asked))
        else:
            one = replace(one, why_not=f"there is no problem {name} in that version")
        made.append(one)
    return made
