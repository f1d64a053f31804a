# ruff: noqa: E501, SIM905 - C text and word lists read better whole
"""Expressions and indices as C-family text: what C++ and CUDA share.

A Scope collects statements: a value used twice, or too long for its line, gets a name; the rest is
written in place. The dialect says how a buffer is read, how functions are spelled and which helper
functions that needs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kernel_agent.expert.index import Bound, Div, Index, Indirect, Mod, Var
from kernel_agent.expert.ir import Expr

MAX_INLINE = 64
BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "!=",  # of bools without side effects: no branches, so loops vectorise
}  # fmt: skip
# Library functions that exist for float (with an f) and double under one name.
LIBRARY = set(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sqrt
    floor ceil trunc fmod pow atan2 hypot copysign fmax fmin lgamma""".split()
)
C_TYPE = {"float": "float", "double": "double", "int": "int64_t", "bool": "bool"}
RESERVED = set(
    """auto bool break case char class const continue default delete do double else enum extern false float for if
    inline int long new operator private public register return short signed sizeof static struct switch template
    this true typename union unsigned using virtual void volatile while stream index exp log sin cos tan tanh pow
    sqrt abs floor ceil round min max gamma y0 y1 yn j0 j1 jn i j k l m n o p r s t u v w q lane block width erf
    self torch nn cabi lib running total part best left right sums patch warp scratch step unit carry chunk before
    previous edge active at row column value depth side slot mi ni a b c d e thread_x thread_y begin end select
    row_start column_start depth_start sum_to_here lead all wmma""".split()
)
HELPERS = {
    "nan_max": "// The larger value; NaN when either is NaN, as torch has it.\n"
    "{q} T nan_max(T a, T b) {{ return (a > b || a != a) ? a : b; }}",
    "nan_min": "// The smaller value; NaN when either is NaN, as torch has it.\n"
    "{q} T nan_min(T a, T b) {{ return (a < b || a != a) ? a : b; }}",
    "sign_of": "{q} T sign_of(T a) {{ return a != a ? a : T((a > T(0)) - (a < T(0))); }}",
    "floor_mod": "// The remainder with the sign of the divisor, as in Python.\n"
    "{q} T floor_mod(T a, T b) {{ T r = fmodf(a, b); return (r != T(0) && ((r < T(0)) != (b < T(0)))) ? r + b : r; }}",
    "floor_mod_int": "// The remainder with the sign of the divisor, as in Python.\n"
    "{s} int64_t floor_mod_int(int64_t a, int64_t b) {{ int64_t r = a % b; return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r; }}",
    "floor_div_int": "{s} int64_t floor_div_int(int64_t a, int64_t b) {{ int64_t q = a / b; return q * b > a != b < 0 && q * b != a ? q - 1 : q; }}",
    "int_power": "{s} int64_t int_power(int64_t a, int64_t b) {{ int64_t p = 1; for (; b > 0; --b) p *= a; return p; }}",
    "log_add_exp": "// log(exp(a) + exp(b)) without overflow.\n"
    "{s} float log_add_exp(float a, float b) {{ float m = nan_max(a, b); return fabsf(m) == INFINITY ? m : m + log1pf(expf(-fabsf(a - b))); }}",
}  # fmt: skip


def literal(value: float | int | bool, type: str) -> str:
    if type == "bool":
        return "true" if value else "false"
    if type == "int":
        return str(value) if abs(value) < 2**31 else f"INT64_C({value})"
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(float(value)) + ("f" if type == "float" else "")


def wrapped(text: str) -> str:
    """In parentheses unless it is a name, a number or a call."""
    simple = text.replace("_", "a").replace(".", "0").isalnum()
    return text if simple or _is_call(text) else f"({text})"


def _is_call(text: str) -> bool:
    """name(...) or name[...] whose bracket closes at the very end."""
    if not text or text[-1] not in ")]":
        return False
    depth = 0
    text = text.replace("<int64_t>(", "(")
    for position, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and c in ")]":
            return position == len(text) - 1
        if depth == 0 and not (c.isalnum() or c in "_."):
            return False
    return False


@dataclass
class Dialect:
    """How a target spells things. `load` and `local` give the text for reading a buffer element
    and a local."""

    load: Callable[[str, str], str]  # buffer, index text -> element in its expression type
    local: Callable[[str], str]
    index_type: str = "int64_t"
    rsqrt: bool = False  # has rsqrtf
    helpers: set[str] = field(default_factory=set)
    functions: set[str] = field(
        default_factory=set
    )  # library functions called, for their declarations

    def call(self, name: str, type: str, *args: str) -> str:
        suffix = "f" if type == "float" else ""
        self.functions.add(name + suffix)
        return f"{name}{suffix}({', '.join(args)})"

    def help(self, name: str, *args: str) -> str:
        self.helpers.add(name)
        if name == "log_add_exp":
            self.helpers.add("nan_max")
            self.functions |= {"expf", "log1pf"}
        return f"{name}({', '.join(args)})"


@dataclass
class Scope:
    """Statements of one block. Names of an enclosing scope stay visible."""

    dialect: Dialect
    names: dict[Expr, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    uses: Counter[Expr] = field(default_factory=Counter)
    counter: list[int] = field(default_factory=lambda: [0])
    rename: dict[str, str] = field(default_factory=dict)  # loop variable -> what stands for it here

    def child(self) -> Scope:
        return Scope(self.dialect, dict(self.names), [], Counter(), self.counter)

    def prepare(self, roots: Iterable[Expr]) -> None:
        """Count how often each value is used, so that `text` knows what deserves a name."""
        seen: set[Expr] = set()

        def visit(e: Expr) -> None:
            self.uses[e] += 1
            if e in seen or e in self.names:
                return
            seen.add(e)
            for a in e.args:
                visit(a)

        for root in roots:
            visit(root)

    def text(self, e: Expr) -> str:
        if e in self.names:
            return self.names[e]
        out = self._text(e)
        plain = e.op in ("const", "local") or (e.op == "index" and len(out) < 24)
        if not plain and (self.uses[e] > 1 or len(out) > MAX_INLINE):
            return self.named(e, out)
        return out

    def named(self, e: Expr, text: str | None = None) -> str:
        """Give the value a name in this scope."""
        text = self._text(e) if text is None else text
        word = e.attr[0] + "_value" if e.op == "load" else e.op
        self.counter[0] += 1
        name = f"{word}_v{self.counter[0]}" if e.op != "load" else f"{word}{self.counter[0]}"
        self.lines.append(f"const {C_TYPE[e.type]} {name} = {text};")
        self.names[e] = name
        return name

    def index(self, index: Index) -> str:
        parts = []
        for atom, c in index.terms:
            text = self._atom(atom)
            sign, c = ("-" if c < 0 else "+"), abs(c)
            parts.append((sign, text if c == 1 else f"{wrapped(text)} * {c}"))
        if index.const or not parts:
            parts.append(("-" if index.const < 0 else "+", str(abs(index.const))))
        parts.sort(key=lambda part: part[0] == "-")
        first = parts[0][1] if parts[0][0] == "+" else f"-{parts[0][1]}"
        return first + "".join(f" {sign} {text}" for sign, text in parts[1:])

    def _atom(self, atom: Var | Div | Mod | Indirect) -> str:
        if isinstance(atom, Var):
            return self.rename.get(atom.name, atom.name)
        if isinstance(atom, Indirect):
            text = wrapped(self.text(atom.value))
            return text if self.dialect.index_type == "int64_t" else f"(int){text}"
        sign = "/" if isinstance(atom, Div) else "%"
        return f"({wrapped(self.index(atom.num))} {sign} {atom.den})"

    def condition(self, b: Bound) -> str:
        return self._range(self.index(b.index), b.index.bounds, b.low, b.high)

    def _range(self, text: str, bounds: tuple[int, int], low: int, high: int) -> str:
        text = wrapped(text)
        if high == low + 1:
            return f"({text} == {low})"
        tests = [f"({text} >= {low})"] if bounds[0] < low else []
        tests += [f"({text} < {high})"] if bounds[1] >= high else []
        return " & ".join(tests) or "true"

    def _text(self, e: Expr) -> str:
        special = getattr(self, f"_op_{e.op}", None)
        if special is not None:
            return str(special(e))
        args = [self.text(a) for a in e.args]
        if e.op in BINARY:
            return f"{wrapped(args[0])} {BINARY[e.op]} {wrapped(args[1])}"
        if e.op in LIBRARY and e.type in ("float", "double"):
            return self.dialect.call(e.op, e.type, *args)
        raise NotImplementedError(f"no spelling for {e.op} on {e.type}")

    def _op_const(self, e: Expr) -> str:
        return literal(e.attr, e.type)

    def _op_local(self, e: Expr) -> str:
        return self.dialect.local(e.attr)

    def _op_index(self, e: Expr) -> str:
        return self.index(e.attr)

    def _op_load(self, e: Expr) -> str:
        buffer, index, bounds, other = e.attr
        text = self.dialect.load(buffer, self.index(index))
        if not bounds:
            return text
        tests = " & ".join(self.condition(b) for b in bounds)
        return f"({tests}) ? {text} : {literal(other, e.type)}"

    def _op_inside(self, e: Expr) -> str:
        inner = e.args[0]
        bounds = inner.attr.bounds if inner.op == "index" else (inner.attr, inner.attr)
        return self._range(self.text(inner), bounds, *e.attr)

    def _op_cast(self, e: Expr) -> str:
        text = self.text(e.args[0])
        if e.type == "bool":
            return f"{wrapped(text)} != 0"
        return f"({C_TYPE[e.type]}){wrapped(text)}"

    def _op_where(self, e: Expr) -> str:
        test, a, b = (self.text(x) for x in e.args)
        if e.type == "bool":
            return f"{wrapped(test)} ? {wrapped(a)} : {wrapped(b)}"
        return f"{wrapped(test)} ? {wrapped(a)} : {wrapped(b)}"

    def _op_neg(self, e: Expr) -> str:
        return f"-{wrapped(self.text(e.args[0]))}"

    def _op_not(self, e: Expr) -> str:
        return f"!{wrapped(self.text(e.args[0]))}"

    def _op_abs(self, e: Expr) -> str:
        text = self.text(e.args[0])
        if e.type == "int":
            return f"{wrapped(text)} < 0 ? -{wrapped(text)} : {wrapped(text)}"
        return self.dialect.call("fabs", e.type, text)

    def _op_round(self, e: Expr) -> str:  # half to even, as torch
        return self.dialect.call("nearbyint", e.type, self.text(e.args[0]))

    def _op_relu(self, e: Expr) -> str:
        text = wrapped(self.named(e.args[0]) if self._long(e.args[0]) else self.text(e.args[0]))
        zero = literal(0, e.type)
        return f"{text} < {zero} ? {zero} : {text}"  # NaN stays NaN

    def _long(self, e: Expr) -> bool:
        return e not in self.names and e.op not in ("const", "local")

    def _op_sigmoid(self, e: Expr) -> str:
        one = literal(1, e.type)
        power = self.dialect.call("exp", e.type, f"-{wrapped(self.text(e.args[0]))}")
        return f"{one} / ({one} + {power})"

    def _op_reciprocal(self, e: Expr) -> str:
        return f"{literal(1, e.type)} / {wrapped(self.text(e.args[0]))}"

    def _op_rsqrt(self, e: Expr) -> str:
        text = self.text(e.args[0])
        if self.dialect.rsqrt:
            return self.dialect.call("rsqrt", e.type, text)
        return f"{literal(1, e.type)} / {self.dialect.call('sqrt', e.type, text)}"

    def _extreme(self, e: Expr, name: str) -> str:
        text = self.dialect.help(name, *(self.text(a) for a in e.args))
        generic = name in ("nan_max", "nan_min", "sign_of")
        return text.replace("(", "<int64_t>(", 1) if e.type == "int" and generic else text

    def _op_max(self, e: Expr) -> str:
        return self._extreme(e, "nan_max")

    def _op_min(self, e: Expr) -> str:
        return self._extreme(e, "nan_min")

    def _op_sign(self, e: Expr) -> str:
        return self._extreme(e, "sign_of")

    def _op_remainder(self, e: Expr) -> str:
        return self._extreme(e, "floor_mod_int" if e.type == "int" else "floor_mod")

    def _op_floordiv(self, e: Expr) -> str:
        return self._extreme(e, "floor_div_int")

    def _op_fmod(self, e: Expr) -> str:
        a, b = (self.text(x) for x in e.args)
        return (
            f"{wrapped(a)} % {wrapped(b)}"
            if e.type == "int"
            else self.dialect.call("fmod", e.type, a, b)
        )

    def _op_pow(self, e: Expr) -> str:
        a, b = (self.text(x) for x in e.args)
        return (
            self.dialect.help("int_power", a, b)
            if e.type == "int"
            else self.dialect.call("pow", e.type, a, b)
        )


def helper_text(names: set[str], template: str, static: str) -> list[str]:
    """Definitions of the helper functions used. `template` and `static` open a template and a
    plain function."""
    return [HELPERS[n].format(q=template, s=static) for n in HELPERS if n in names]


def indent(lines: Iterable[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line if line else line for line in lines]


def without_unused(lines: list[str]) -> list[str]:
    """The lines of a body without loop variables that nothing in their block reads."""
    for position, line in enumerate(lines):
        found = re.match(r"( *)const (?:int|int64_t) (\w+) = ", line)
        if found and not _read_below(found[2], len(found[1]), lines[position + 1 :]):
            return without_unused([*lines[:position], *lines[position + 1 :]])
    return lines


def _read_below(name: str, depth: int, lines: list[str]) -> bool:
    for line in lines:
        if len(line) - len(line.lstrip(" ")) < depth:
            return False
        if re.search(rf"\b{name}\b", line):
            return True
    return False
