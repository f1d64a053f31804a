"""The single-turn task: one prompt, one answer that holds every file of a solution.

An answer gives each file as its path on a line of its own followed by a fenced block:

    `kernels/fused.cu`
    ```cpp
    extern "C" void fused(const float* x, float* out, int64_t n, void* stream) { ... }
    ```
"""

from __future__ import annotations

import re

from schemas.records import Precision, Problem, Target

SYSTEM = """\
You write fast kernels for PyTorch models. You are given a module that defines `Model`. Answer with
the files of a solution that computes the same thing faster: `model_new.py`, which defines
`ModelNew`, and its kernels under `kernels/`.

Give every file as its path in backquotes on a line of its own, followed by one fenced code block
with the whole file."""

_RULES = """\
Rules:
- `ModelNew` takes the same constructor arguments as `Model` and has the same parameter and buffer
  names, so that `load_state_dict` works; `forward` takes and returns the same tensors.
- Every computation happens in `kernels/`. `model_new.py` uses torch only for modules, parameters,
  allocation, shapes and views.
- Kernel files are `kernels/*.{suffix}`, built by {builder}. They export launchers:
  `extern "C" void NAME(pointers, sizes, scalars, void* stream)`. Sizes are `int64_t`, scalars are
  `double`, {stream}.
- In `model_new.py`, `import cabi`, then `lib = cabi.load()`, then
  `lib.NAME(x, out, x.numel(), 0.5)`: tensors are passed as pointers, the stream is added for you.
- {precision}
- Inputs hold NaN or infinity at times; results must match PyTorch there too."""

_BUILD = {
    Target.CUDA: ("cu", "nvcc for sm_90 without fast-math", "`stream` is a `cudaStream_t`"),
    Target.CPU: ("cpp", "g++ with OpenMP and without fast-math", "`stream` is null"),
}
_PRECISION = {
    Precision.BF16: "Tensors are bfloat16; errors may be a few times those of eager in bfloat16.",
    Precision.TF32: "Tensors are float32; errors may be a few times those of eager with TF32 on.",
    Precision.FP32: "Tensors are float32; errors may be a few times those of eager with TF32 off.",
}

_FILE = re.compile(
    r"^[ \t]*`(?P<path>[^`\n]+)`:?[ \t]*\n+"
    r"(?P<fence>`{3,})[^`\n]*\n(?P<text>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_PATH = re.compile(r"model_new\.py|kernels/[A-Za-z0-9_]+\.(?:cu|cuh|cpp|h)")


def prompt(problem: Problem) -> list[dict[str, str]]:
    """Chat [2] that asks for a whole solution in one answer."""
    suffix, builder, stream = _BUILD[problem.target]
    rules = _RULES.format(
        suffix=suffix, builder=builder, stream=stream, precision=_PRECISION[problem.precision]
    )
    user = f"`model.py`\n```python\n{problem.code.rstrip()}\n```\n\n{rules}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def answer(files: dict[str, str]) -> str:
    """The answer that `files_of_answer` reads back as `files` (texts end in one newline)."""
    order = sorted(files, key=lambda path: (path != "model_new.py", path))
    return "\n\n".join(_block(path, files[path]) for path in order)


def _block(path: str, text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    language = "python" if path.endswith(".py") else "cpp"
    return f"`{path}`\n{fence}{language}\n{text.rstrip()}\n{fence}"


def files_of_answer(text: str) -> dict[str, str]:
    """The files of an answer, {path: text}.

    Raises ValueError when `model_new.py` is missing, a path is not allowed or is given twice: a
    policy that does not keep the format has no solution, which is worth -1.
    """
    files: dict[str, str] = {}
    for match in _FILE.finditer(text):
        path = match["path"].strip()
        if not _PATH.fullmatch(path):
            raise ValueError(f"expected model_new.py or kernels/NAME.cu|cuh|cpp|h, got {path!r}")
        if path in files:
            raise ValueError(f"{path!r} is given twice")
        files[path] = match["text"]
    if "model_new.py" not in files:
        raise ValueError(f"expected a block for `model_new.py`, got {sorted(files)}")
    return files
