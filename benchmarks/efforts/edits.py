"""Mechanical edits of an expert's kernels: mutants that compute something else, and a wait that
makes a solution slower.

An edit takes the texts of a correct solution and returns changed ones, or None where it does not
fit. What an edit means is in its name; whether the result is wrong beyond the budget is for a
verifier to say: with a constant off by 0.05 % a bf16 problem is still right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from schemas.records import Target

MODEL = "model_new.py"
Files = dict[str, str]
CONSTANT = re.compile(r"(?<![\w.])(\d+\.\d+(?:e[+-]?\d+)?)f\b")
LOOP = re.compile(r"for \(int(?:64_t)? ([r-u]) = 0; \1 < (\d+); \+\+\1\)")
UNIT = re.compile(r"\b(?:unit|at) < (\d+)")
PADDED = re.compile(r"- \d+\) (>=) 0\)")
PARALLEL = re.compile(r"#pragma omp (?:parallel )?for[^\n]*\n *for \(int64_t i = 0; i < (\d+);")
GRID = re.compile(r"<<<(\d+), ")
OWN = re.compile(r"^( +)(float|double|bool) (\w+)(\[\d+\])?(?: = ([^;]+))?;$", re.MULTILINE)
BARRIER = re.compile(r"^ *__syncthreads\(\);[^\n]*\n", re.MULTILINE)
TOTAL = re.compile(r"\bdouble (?=\w*total = |running = )")
SLOW_MATH = re.compile(r"(?<!\w)(?=(?:expf|sinf|cosf|logf|powf|tanf)\()")
ALLOCATED = re.compile(r"(\w+) = (torch\.empty\([^\n]*dtype=torch\.(\w+)[^\n]*\))")
STATE = re.compile(r"(?<=[ (])self((?:\.\w+|\[\d+\])+)(?=[,)])")

ROUNDED = """
static inline DEVICE float rounded(float v) {
    union { float f; unsigned u; } bits{v};
    bits.u = (bits.u + 0x7fffu + ((bits.u >> 16) & 1u)) & 0xffff0000u;
    return bits.f;
}
"""
WAITS = {
    Target.CPU: """
#include <ctime>
static long long clock_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static void wait_ns(long long ns, void*) {
    for (const long long end = clock_ns() + ns; clock_ns() < end;) {}
}
""",
    Target.CUDA: """
__global__ void wait_kernel(long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
static void wait_ns(long long ns, void* stream) {
    wait_kernel<<<1, 1, 0, (cudaStream_t)stream>>>(ns);
}
""",
}


@dataclass(frozen=True, kw_only=True)
class Text:
    """A solution of the expert, taken apart."""

    target: Target
    model: str
    kernels: str

    @staticmethod
    def of(files: Files, target: Target) -> Text:
        return Text(target=target, model=files[MODEL], kernels=files[_path(target)])

    @property
    def files(self) -> Files:
        return {MODEL: self.model, _path(self.target): self.kernels}

    @property
    def last(self) -> int:
        """Where the text of the last kernel begins."""
        return self.kernels.rindex('extern "C" int')

    def with_kernels(self, kernels: str) -> Files:
        return {**self.files, _path(self.target): kernels}

    def with_model(self, model: str) -> Files:
        return {**self.files, MODEL: model}

    def float_outputs(self) -> list[str]:
        """Names of the fp32 buffers that forward returns."""
        returned = set(re.findall(r"\w+", self.model.rstrip().rsplit("return ", 1)[1]))
        made = {name: dtype for name, _, dtype in ALLOCATED.findall(self.model)}
        return [name for name in made if name in returned and made[name] == "float32"]


Edit = Callable[[Text, Random], Files | None]


def _path(target: Target) -> str:
    return "kernels/kernels.cpp" if target is Target.CPU else "kernels/kernels.cu"


def _replaced(text: str, found: re.Match[str], group: int, new: str) -> str:
    return text[: found.start(group)] + new + text[found.end(group) :]


def _one(pattern: re.Pattern[str], text: str, rng: Random) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return rng.choice(found) if found else None


def _scaled(text: Text, rng: Random, factor: float) -> Files | None:
    constants = [m for m in CONSTANT.finditer(text.kernels) if float(m[1]) != 0.0]
    if not constants:
        return None
    found = rng.choice(constants)
    return text.with_kernels(_replaced(text.kernels, found, 1, f"{float(found[1]) * factor:.9e}"))


def wrong_constant(text: Text, rng: Random) -> Files | None:
    """One constant 5 % too large."""
    return _scaled(text, rng, 1.05)


def slightly_wrong_constant(text: Text, rng: Random) -> Files | None:
    """One constant 0.05 % too large."""
    return _scaled(text, rng, 1.0005)


def last_rows_left_out(text: Text, rng: Random) -> Files | None:
    """The last step of the last kernel's outer loop, or its last block, is not computed."""
    pattern = PARALLEL if text.target is Target.CPU else GRID
    found = pattern.search(text.kernels, text.last)
    if found is None or int(found[1]) < 2:
        return None
    return text.with_kernels(_replaced(text.kernels, found, 1, str(int(found[1]) - 1)))


def off_by_one(text: Text, rng: Random) -> Files | None:
    """A reduction without its last term, or a padded border one element too wide."""
    loops = [(m, len(m.groups())) for p in (LOOP, UNIT) for m in p.finditer(text.kernels)]
    loops = [(found, group) for found, group in loops if int(found[group]) > 1]
    borders = [(found, 1) for found in PADDED.finditer(text.kernels)]
    if not loops and not borders:
        return None
    found, group = rng.choice(loops + borders)
    new = ">" if found[group] == ">=" else str(int(found[group]) - 1)
    return text.with_kernels(_replaced(text.kernels, found, group, new))


def rounded_to_bf16(text: Text, rng: Random) -> Files | None:
    """An fp32 output that has been through bf16."""
    return _stores(text, lambda value, index: f"rounded({value})", ROUNDED)


def one_in_many(text: Text, rng: Random) -> Files | None:
    """One element of an fp32 output in 100,003 is zero. Only where elements are stored singly."""
    return _stores(
        text, lambda value, index: f"(({index}) % 100003 == 5) ? 0.0f : ({value})", "", r"\["
    )


def _stores(
    text: Text, new: Callable[[str, str], str], helper: str, before: str = r"(?:_out\.v)?\["
) -> Files | None:
    outputs = text.float_outputs()
    if not outputs:
        return None
    names = "|".join(map(re.escape, outputs))
    store = re.compile(rf"\b((?:{names}){before})([^;=\n]*)\] = ([^;\n]+);")
    kernels, count = store.subn(lambda m: f"{m[1]}{m[2]}] = {new(m[3], m[2])};", text.kernels)
    return text.with_kernels(_with_helper(kernels, helper, text.target)) if count else None


def _with_helper(kernels: str, helper: str, target: Target) -> str:
    """The helper after the last include."""
    at = kernels.index("\n", kernels.rindex("#include")) + 1
    device = "__device__" if target is Target.CUDA else ""
    return kernels[:at] + helper.replace("DEVICE", device) + kernels[at:]


def race(text: Text, rng: Random) -> Files | None:
    """A barrier left out; on a CPU one variable of a thread becomes everybody's."""
    if text.target is Target.CUDA:
        found = _one(BARRIER, text.kernels, rng)
        return found and text.with_kernels(_replaced(text.kernels, found, 0, ""))
    found = _one(OWN, text.kernels, rng)
    if found is None:
        return None
    space, kind, name, size, value = found.groups(default="")
    lines = f"{space}static {kind} {name}{size};" + (f"\n{space}{name} = {value};" if value else "")
    return text.with_kernels(_replaced(text.kernels, found, 0, lines))


def nan_lost(text: Text, rng: Random) -> Files | None:
    """Maxima and minima that let go of a NaN, as fmaxf does."""
    return _changed(text, " || a != a)", ")")


def less_precise(text: Text, rng: Random) -> Files | None:
    """Sums in float where the expert has double, or on a GPU the fast forms of exp and so on."""
    kernels = TOTAL.sub("float ", text.kernels)
    if kernels == text.kernels and text.target is Target.CUDA:
        kernels = SLOW_MATH.sub("__", kernels)
    return text.with_kernels(kernels) if kernels != text.kernels else None


def _changed(text: Text, old: str, new: str) -> Files | None:
    return text.with_kernels(text.kernels.replace(old, new)) if old in text.kernels else None


def slowed(text: Text, wait_ns: int) -> Files:
    """The same, after which the last launcher waits for so many nanoseconds."""
    kernels, last = text.kernels, text.last
    at = kernels.index("    return ", last)
    wait = f"    wait_ns({wait_ns}ll, stream);\n"
    return text.with_kernels(
        _with_helper(kernels[:at] + wait + kernels[at:], WAITS[text.target], text.target)
    )


MUTANTS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        wrong_constant, last_rows_left_out, rounded_to_bf16, off_by_one, race,
        slightly_wrong_constant, one_in_many, nan_lost, less_precise,
    )
}  # fmt: skip
"""Edits of the kernels by name."""
