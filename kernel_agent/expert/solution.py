"""A plan as the files of a solution: model_new.py and kernels/kernels.{cpp,cu}."""

from __future__ import annotations

import ast
import re

from kernel_agent.expert.ir import Source, Unsupported, Value
from kernel_agent.expert.kernels import reads, writes
from kernel_agent.expert.params import PLAIN, Params
from kernel_agent.expert.plan import Plan
from kernel_agent.expert.print_cpp import print_cpp
from kernel_agent.expert.print_cuda import print_cuda
from schemas.records import Solution, Target


def solution(code: str, plan: Plan, target: Target, params: Params = PLAIN) -> Solution:
    """The solution of the problem `code` that runs `plan` on `target`."""
    return Solution.of(solution_files(code, plan, target, params))


def solution_files(code: str, plan: Plan, target: Target, params: Params = PLAIN) -> dict[str, str]:
    if target is Target.CPU:
        return {
            "model_new.py": model_new(code, plan),
            "kernels/kernels.cpp": print_cpp(plan, params),
        }
    return {"model_new.py": model_new(code, plan), "kernels/kernels.cu": print_cuda(plan, params)}


def model_new(code: str, plan: Plan) -> str:
    """model_new.py: the problem's own constructor, and a forward that only allocates and
    launches."""
    kept = constructor(code)
    lines = ['"""' + _title(plan) + '"""', "", "import cabi"]
    lines += [
        line for line in ("import torch", "import torch.nn as nn") if line not in kept.imports
    ]
    lines += [*kept.imports, "", "lib = cabi.load()", ""]
    for part in kept.definitions:
        lines += [part, ""]
    lines += ["", f"class ModelNew({kept.base}):"]
    for part in kept.members:
        lines += [part, ""]
    lines += ["    def forward(self, " + ", ".join(_arguments(code)) + "):"]
    lines += ["        " + line for line in _forward(code, plan)]
    return "\n".join(lines) + "\n"


def _title(plan: Plan) -> str:
    count = len(plan.kernels)
    plain = "one plain kernel per operator" if plan.kind == "reference" else "fused kernels"
    return (
        f"{plain[0].upper()}{plain[1:]}: {count} launch{'es' if count > 1 else ''} a forward pass."
    )


def _forward(code: str, plan: Plan) -> list[str]:
    names = _arguments(code)
    used = {b for k in plan.kernels for b in reads(k)}
    inputs = {s.name: names[int(s.source)] for s in plan.sources if s.kind == "input"}
    taken = {s.name for s in plan.sources if s.name in used}
    lines = []
    for s in plan.sources:
        if s.kind == "input" and s.name in taken:
            lines.append(f"{s.name} = {inputs[s.name]}.contiguous()")
    first = next(iter(inputs.values()), None)
    device = f"{first}.device" if first else "next(self.parameters()).device"
    made: set[str] = set()
    for k in plan.kernels:
        for b in writes(k):
            if b not in made:
                made.add(b)
                lines.append(f"{b} = {_allocate(plan.buffers[b], device)}")
        arguments = [_argument(plan.buffers[b]) for b in (*reads(k), *writes(k))]
        lines.append(f"lib.{k.name}({', '.join(arguments)})")
    result = ", ".join(plan.outputs)
    form = {"tensor": result, "list": f"[{result}]"}
    lines.append(
        "return " + form.get(plan.form, f"({result},)" if len(plan.outputs) == 1 else result)
    )
    return lines


def _allocate(value: Value, device: str) -> str:
    shape = ", ".join(map(str, value.shape)) + ("," if len(value.shape) == 1 else "")
    return f"torch.empty(({shape}), dtype=torch.{value.dtype}, device={device})"


def _argument(value: Value) -> str:
    if not isinstance(value, Source) or value.kind == "input":
        return value.name
    return attribute(str(value.source)) + ("" if value.contiguous else ".contiguous()")


def attribute(path: str) -> str:
    """layers.0.weight -> self.layers[0].weight"""
    out = "self"
    for part in path.split("."):
        if part.isdigit():
            out += f"[{part}]"
        elif part.isidentifier():
            out += f".{part}"
        else:
            raise Unsupported(f"a parameter called {path!r}")
    return out


class Kept:
    """What of the problem's text the solution needs: imports, definitions __init__ uses, the class
    without forward."""

    def __init__(
        self, imports: list[str], definitions: list[str], base: str, members: list[str]
    ) -> None:
        self.imports = imports
        self.definitions = definitions
        self.base = base
        self.members = members


def constructor(code: str) -> Kept:
    """Raises Unsupported when the text has no class Model."""
    tree = ast.parse(code)
    model = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Model"), None)
    if model is None:
        raise Unsupported("the problem's text defines no class Model")
    methods = {n.name: n for n in model.body if isinstance(n, ast.FunctionDef)}
    wanted, pending = set(), ["__init__"]
    while pending:  # __init__ and the methods it calls
        name = pending.pop()
        if name in methods and name not in wanted and name != "forward":
            wanted.add(name)
            pending += [n.attr for n in ast.walk(methods[name]) if isinstance(n, ast.Attribute)]
    nodes: list[ast.stmt] = [
        n
        for n in model.body
        if (isinstance(n, ast.FunctionDef) and n.name in wanted)
        or isinstance(n, ast.Assign | ast.AnnAssign)
    ]
    text = [_source(code, n) for n in nodes]
    members = [re.sub(r"\bModel\b", "ModelNew", part) for part in text]
    base = ", ".join(ast.unparse(b) for b in model.bases) or "nn.Module"
    used = {x.id for n in nodes for x in ast.walk(n) if isinstance(x, ast.Name)}
    used |= {x.id for b in model.bases for x in ast.walk(b) if isinstance(x, ast.Name)}
    definitions = _definitions(code, tree, used)
    imports = [
        ast.unparse(n)
        for n in tree.body
        if isinstance(n, ast.Import | ast.ImportFrom)
        and getattr(n, "module", "") != "__future__"
        and any((a.asname or a.name.split(".")[0]) in used for a in n.names)
    ]
    return Kept(imports, definitions, base, members)


def _definitions(code: str, tree: ast.Module, used: set[str]) -> list[str]:
    """Module-level assignments, functions and classes that the names in `used` need; extends
    `used`."""
    found: dict[int, str] = {}
    grew = True
    while grew:
        grew = False
        for position, n in enumerate(tree.body):
            names: set[str] = set()
            if isinstance(n, ast.Assign):
                names = {x.id for t in n.targets for x in ast.walk(t) if isinstance(x, ast.Name)}
            elif isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name != "Model":
                names = {n.name}
            if position not in found and names & used:
                found[position] = _source(code, n)
                used |= {x.id for x in ast.walk(n) if isinstance(x, ast.Name)}
                grew = True
    return [found[position] for position in sorted(found)]


def _source(code: str, node: ast.stmt) -> str:
    """The statement's own lines, docstrings included, with its decorators."""
    lines = code.splitlines()
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(lines[start - 1 : node.end_lineno])


def _arguments(code: str) -> list[str]:
    tree = ast.parse(code)
    model = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Model")
    forward = next(n for n in model.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    if forward.args.vararg or forward.args.kwonlyargs:
        raise Unsupported("forward takes other than plain positional arguments")
    return [a.arg for a in forward.args.args[1:]]
