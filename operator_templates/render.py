"""From a graph to source text in KernelBench form, the way an engineer would write it.

Deterministic: the text depends on the graph and the precision only. bf16 problems spell their dtype
out in inputs, parameters and modules; TF32 problems are fp32 texts whose docstring names the class.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field

from operator_templates.graph import Graph, Node, Source
from operator_templates.shapes import LAYOUTS
from operator_templates.template import INDEX
from operator_templates.values import Shape
from schemas.records import Precision

INDENT = "    "
WIDTH = 100
FURTHER_NAMES = ("hidden", "gate", "branch", "merged", "scores")
# Constructor arguments that are a size of the input, so that the text can name it once.
SIZE_ARGUMENTS = frozenset(
    ("in_features", "in_channels", "num_features", "num_channels", "normalized_shape")
)


@dataclass
class _Text:
    """The pieces of a problem, gathered node by node."""

    constants: dict[str, str] = field(default_factory=dict)  # module-level name -> literal
    arguments: dict[str, str] = field(default_factory=dict)  # constructor argument -> constant
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)


def render(graph: Graph, precision: Precision) -> str:
    """The module text of a problem: `Model`, `get_inputs`, `get_init_inputs`."""
    text = _Text()
    dtype = ", dtype=torch.bfloat16" if precision is Precision.BF16 else ""
    sources = [source for _, source in graph.sources()]
    _name_dims(sources[0].value.shape, graph, text)
    names = _variables(graph)
    nodes = list(graph.nodes())
    for position, node in nodes:
        expression = _expression(node, names, text, dtype)
        comment = f"  # ({_tuple_text(node.value.shape)})"
        target = "return" if position == nodes[-1][0] else f"{names[position]} ="
        fits = len(target + expression + comment) + 2 * len(INDENT) < WIDTH
        text.forward.append(f"{target} {expression}{comment if fits else ''}")
    return _module(graph, precision, text, dtype)


def _name_dims(shape: Shape, graph: Graph, text: _Text) -> None:
    """Constants for the dims of the main input, named by the layout whose table has the shape."""
    for layout in LAYOUTS:
        if any(shape in shapes for shapes in layout.shapes.values()):
            text.constants |= {name: str(n) for name, n in zip(layout.dims, shape, strict=True)}
            return
    generic = ("batch_size", "dim1", "dim2", "dim3", "dim4")
    text.constants |= {name: str(n) for name, n in zip(generic, shape, strict=False)}


def _variables(graph: Graph) -> dict[int, str]:
    """A local name for every entry: a chain reuses one name, a value that is read again later gets
    another.
    """
    names = {position: source.name for position, source in graph.sources()}
    spare = [name for name in FURTHER_NAMES if name not in names.values()]
    for position, node in graph.nodes():
        first = node.operands[0]
        read_later = any(user > position for user in graph.users(first))
        is_float = not graph.value(first).integer
        names[position] = names[first] if is_float and not read_later else spare.pop(0)
    return names


def _fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def _expression(node: Node, names: dict[int, str], text: _Text, dtype: str) -> str:
    """The right-hand side of one line of forward; adds to the constructor what it needs."""
    template = node.template
    values: dict[str, object] = {k: _literal(v) for k, v in node.attributes.items()}
    operands = ("x", *(operand.name for operand in template.operands))
    values |= dict(zip(operands, (names[p] for p in node.operands), strict=True))
    if template.init:
        attribute = _unused(
            template.attribute, [line.split(" = ")[0] for line in text.init], "self.{}"
        )
        passed = {
            name: _argument(name, node, text)
            for name in node.attributes
            if name in _fields(template.init)
        }
        text.init.append(
            f"self.{attribute} = {template.init.format(**values | passed, dtype=dtype)}"
        )
        values["m"] = f"self.{attribute}"
    return template.forward.format(**values)


def _unused(name: str, taken: list[str], form: str = "{}") -> str:
    """`name`, or `name_2`, `name_3` ... when taken."""
    suffix, candidate = 2, name
    while form.format(candidate) in taken:
        candidate, suffix = f"{name}_{suffix}", suffix + 1
    return candidate


def _argument(name: str, node: Node, text: _Text) -> str:
    """The constructor argument that carries an attribute."""
    literal = _literal(node.attributes[name])
    argument = _unused(name, list(text.arguments))
    sizes = (c for c in text.constants if text.constants[c] == literal and c != "batch_size")
    constant = next(sizes, None) if name in SIZE_ARGUMENTS else None
    if constant is None:
        constant = _unused(argument, list(text.constants))
        text.constants[constant] = literal
    text.arguments[argument] = constant
    return argument


def _literal(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _tuple_text(shape: Shape) -> str:
    return ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")


def _shape_text(shape: Shape, main: Shape, text: _Text) -> str:
    """A shape spelled with the named dims of the main input where they agree."""
    dims = list(text.constants)[: len(main)]
    same_rank = len(shape) == len(main)
    parts = []
    for place, size in enumerate(shape):
        if same_rank and main[place] == size:
            parts.append(dims[place])
        elif place == 0 and size == main[0]:
            parts.append(dims[0])
        else:
            parts.append(
                next((d for d, n in zip(dims[1:], main[1:], strict=True) if n == size), str(size))
            )
    return ", ".join(parts)


def _input_line(source: Source, main: Shape, text: _Text, dtype: str) -> str:
    shape = _shape_text(source.value.shape, main, text)
    if source.domain is INDEX and len(source.value.shape) == 1:
        shape += ","
    filled = source.domain.text.format(shape=shape, dtype=dtype, below=_below(source, main, text))
    return f"{source.name} = {filled}"


def _below(source: Source, main: Shape, text: _Text) -> str:
    known = ("num_embeddings", *list(text.constants)[1 : len(main)])
    return next((c for c in known if text.constants.get(c) == str(source.below)), str(source.below))


def summary(graph: Graph) -> str:
    """One sentence: what the operators are, in order."""
    parts = [node.template.doc for _, node in graph.nodes()]
    sentence = ", then ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def _docstring(graph: Graph, precision: Precision) -> list[str]:
    words, lines, line = summary(graph).split(), [], '"""'
    for word in words:
        if len(line) + len(word) + 1 > WIDTH - 4:
            lines.append(line)
            line = word
        else:
            line += word if line == '"""' else f" {word}"
    return [*lines, line, "", f"precision: {precision}", '"""']


def _wrapped(line: str, depth: int) -> list[str]:
    """A line of code at an indent; a long one opens its first bracket, as formatters do."""
    pad = depth * INDENT
    opening = min((i for i in map(line.find, "([") if i >= 0), default=-1)
    closing = max(line.rfind(")"), line.rfind("]"))
    if len(pad + line) <= WIDTH or opening < 0:
        return [pad + line]
    head, body, tail = line[: opening + 1], line[opening + 1 : closing], line[closing:]
    if len(pad + INDENT + body) <= WIDTH:
        return [pad + head, pad + INDENT + body, pad + tail]
    return [pad + head, *(f"{pad}{INDENT}{part}," for part in _parts(body)), pad + tail]


def _parts(body: str) -> list[str]:
    """What stands between the commas that are not inside brackets."""
    parts, depth = [""], 0
    for character in body:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _module(graph: Graph, precision: Precision, text: _Text, dtype: str) -> str:
    sources = [source for _, source in graph.sources()]
    main = sources[0].value.shape
    names = ", ".join(source.name for source in sources)
    parameters = ", ".join(f"{source.name}: torch.Tensor" for source in sources)
    imports = ["import torch", "import torch.nn as nn"]
    if any("F." in line for line in text.forward):
        imports.append("import torch.nn.functional as F")
    lines = [*_docstring(graph, precision), "", *imports, "", "", "class Model(nn.Module):"]
    if text.init:
        arguments = "".join(f", {name}" for name in text.arguments)
        lines += _wrapped(f"def __init__(self{arguments}):", 1)
        lines.append(f"{2 * INDENT}super().__init__()")
        lines += [part for line in text.init for part in _wrapped(line, 2)] + [""]
    lines += _wrapped(f"def forward(self, {parameters}) -> torch.Tensor:", 1)
    lines += [part for line in text.forward for part in _wrapped(line, 2)]
    lines += ["", "", *(f"{name} = {value}" for name, value in text.constants.items())]
    lines += ["", "", "def get_inputs():"]
    inputs = (_input_line(source, main, text, dtype) for source in sources)
    lines += [part for line in inputs for part in _wrapped(line, 1)]
    lines += [f"{INDENT}return [{names}]", "", "", "def get_init_inputs():"]
    lines += _wrapped(f"return [{', '.join(text.arguments.values())}]", 1)
    return "\n".join(lines) + "\n"
