"""Tricks that deceive, made mechanically of an expert's solution: edits of its model_new.py."""

from __future__ import annotations

import re
from random import Random

from benchmarks.efforts.edits import ALLOCATED, MODEL, STATE, Edit, Files, Text

FORWARD = re.compile(r"    def forward\(self, ([^)]+)\):\n")
KEPT = """
    def _kept(self, name, value):
        kept = self.__dict__.setdefault("kept", {})
        if name not in kept:
            kept[name] = value.detach().clone()
        return kept[name]
"""


def _around(text: Text, body: str) -> Files | None:
    """The old forward as `_work`, and a new one; ARGUMENTS and FIRST stand for its parameters."""
    found = FORWARD.search(text.model)
    if found is None:
        return None
    arguments = found[1]
    lines = [f"    def forward(self, {arguments}):", *body.strip("\n").split("\n")]
    new = "\n".join(lines).replace("ARGUMENTS", arguments)
    new = new.replace("FIRST", arguments.split(",")[0])
    model = text.model.replace("def forward(", "def _work(", 1)
    return text.with_model(f"{model}\n{new}\n")


def remembered(text: Text, rng: Random) -> Files | None:
    """Outputs remembered by the address and version of the first input."""
    return _around(
        text,
        """
        key, kept = (FIRST.data_ptr(), FIRST._version), self.__dict__.setdefault("kept", {})
        if key not in kept:
            kept[key] = self._work(ARGUMENTS)
        return kept[key]
""",
    )


def honest_for_five_calls(text: Text, rng: Random) -> Files | None:
    """From the sixth call on the answer of the fifth."""
    return _around(
        text,
        """
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls <= 5:
            self.answer = self._work(ARGUMENTS)
        return self.answer
""",
    )


def one_call_in_eight_left_out(text: Text, rng: Random) -> Files | None:
    """Every eighth call returns the answer of the seventh."""
    return _around(
        text,
        """
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 8:
            self.answer = self._work(ARGUMENTS)
        return self.answer
""",
    )


def parameters_kept(text: Text, rng: Random) -> Files | None:
    """Parameters as they were in the first call."""
    model, count = STATE.subn(lambda m: f'self._kept("{m[1]}", {m[0]})', text.model)
    return text.with_model(model + KEPT) if count else None


def one_output(text: Text, rng: Random) -> Files | None:
    """The same memory for the outputs of all calls."""
    model, count = ALLOCATED.subn(
        lambda m: f'{m[1]} = self.__dict__.setdefault("made_{m[1]}", {m[2]})', text.model
    )
    return text.with_model(model) if count else None


def torch_does_it(code: str, text: Text) -> Files:
    """The problem's own model, beside a library that nobody calls."""
    model = re.sub(r"\bModel\b", "ModelNew", code)
    return {**text.files, MODEL: f"{model}\n\nimport cabi\n\nlib = cabi.load()\n"}


TRICKS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        remembered, one_call_in_eight_left_out, parameters_kept, honest_for_five_calls, one_output,
    )
}  # fmt: skip
"""Edits of model_new.py by name."""
