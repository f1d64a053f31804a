"""The tools of a rollout: write, compile, verify, profile. Each answers in a few lines of text.

`verify` and `profile` are requests to the judge; both read one verdict, so the second is free.
What they print is all a policy may quote.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from schemas.records import Interval, Solution, ToolCall, Verdict, VerdictStatus
from verification.building.build import BuildError
from verification.judge import Judge

MAX_OBSERVATION = 6000
READ_ONLY = ("model.py", "SKILL.md")


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {k: {"type": "string", "description": v} for k, v in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool(
        "write",
        "Write a file of the workspace.",
        path="model_new.py or kernels/NAME",
        content="The whole text of the file.",
    ),
    _tool("compile", "Build everything in kernels/ into one library."),
    _tool("verify", "Compare five draws and timed outputs with the fp64 reference."),
    _tool("profile", "Time beside eager, torch.compile and the roofline."),
)
"""The tools as chat completions describe them."""


class ToolError(Exception):
    """A call that cannot be carried out; the text goes back to the policy."""


class Toolbox:
    """The workspace of one rollout (path -> text) and the tools that work on it."""

    def __init__(self, judge: Judge, files: dict[str, str] | None = None) -> None:
        self._judge = judge
        self.files: dict[str, str] = dict(files or {})
        self.verdict: Verdict | None = None

    def run(self, call: ToolCall) -> str:
        """Carry out a call. Whatever is wrong with it is in the answer; only our own bugs raise."""
        tools: dict[str, Callable[..., str]] = {
            "write": self.write,
            "compile": self.compile,
            "verify": self.verify,
            "profile": self.profile,
        }
        try:
            if call.name not in tools:
                raise ToolError(f"unknown tool {call.name!r}; there are {', '.join(tools)}")
            tool = tools[call.name]
            return clip(tool(**_arguments(call, tool)))
        except ToolError as error:
            return f"error: {error}"

    def solution(self) -> Solution:
        if "model_new.py" not in self.files:
            raise ToolError("there is no model_new.py yet; write it first")
        return Solution.of(self.files)

    def write(self, path: str, content: str) -> str:
        if path != "model_new.py" and not path.startswith("kernels/"):
            what = "read-only" if path in READ_ONLY else "outside the workspace"
            raise ToolError(f"{path} is {what}; write model_new.py or kernels/NAME")
        self.files[path] = content
        return f"wrote {path}, {content.count(chr(10))} lines"

    def compile(self) -> str:
        try:
            made = self._judge.build(self.solution())
        except BuildError as error:
            return f"build failed\n{error}"
        return "built (cached)" if made.cached else f"built in {made.build_s:.2f} s"

    def verify(self) -> str:
        self.verdict = self._judge.verify(self.solution())
        return describe_checks(self.verdict)

    def profile(self) -> str:
        self.verdict = self._judge.verify(self.solution())
        return describe_times(self.verdict)


def _arguments(call: ToolCall, tool: Callable[..., str]) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except json.JSONDecodeError as error:
        raise ToolError(f"arguments of {call.name} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ToolError(f"arguments of {call.name} must be a JSON object")
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        raise ToolError(f"{call.name}: {error}") from error
    if not all(isinstance(value, str) for value in arguments.values()):
        raise ToolError(f"arguments of {call.name} must be strings")
    return arguments


def clip(text: str) -> str:
    """At most MAX_OBSERVATION characters: beginning and end, with a note of what was cut."""
    if len(text) <= MAX_OBSERVATION:
        return text
    half = MAX_OBSERVATION // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


def describe_checks(verdict: Verdict) -> str:
    """Did it compute the right thing?"""
    passed = [check for check in verdict.checks if check.passed]
    if verdict.status in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED):
        worst = max(passed, key=lambda c: (c.error or 0.0) / (c.budget or 1.0))
        draws = sum(check.name == "draw" for check in passed)
        return (
            f"PASS: {draws} draws and the outputs of {len(passed) - draws} timed calls are right\n"
            f"largest error {worst.error or 0.0:.2g} of the output's scale "
            f"(budget {worst.budget or 0.0:.2g})"
        )
    return f"FAIL ({verdict.status}) after {len(passed)} passed checks\n{verdict.reason}"


def describe_times(verdict: Verdict) -> str:
    """How fast is it, beside the baselines and the roofline?"""
    if verdict.solution is None or verdict.eager is None or verdict.compile is None:
        return f"not measured ({verdict.status}): {verdict.reason}"
    lines = [
        f"eager          {verdict.eager.median_ms:9.4f} ms  {_times(verdict.speedup_eager)}",
        f"torch.compile  {verdict.compile.median_ms:9.4f} ms  {_times(verdict.speedup_compile)}",
        f"yours          {verdict.solution.median_ms:9.4f} ms",
    ]
    if verdict.roofline_ms is not None:
        share = verdict.roofline_ms / verdict.solution.median_ms
        lines.append(
            f"roofline       {verdict.roofline_ms:9.4f} ms  yours reaches {share:.0%} of it"
        )
    if verdict.status is VerdictStatus.UNMEASURED:
        lines.append(f"no speedup is claimed: {verdict.reason}")
    return "\n".join(lines)


def _times(ratio: Interval | None) -> str:
    if ratio is None:
        return ""
    return (
        f"yours is {ratio.point:.2f}x as fast (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    )
