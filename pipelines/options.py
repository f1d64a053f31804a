"""The settings of a run: one dataclass, its command line, and every check made before work starts.

`parse` turns argv into a `RunConfig` and Beam's own flags; `check_machine` looks at the machine,
`runner.prepare` has Beam look at its flags, and `output.claim` looks at the folder. All raise
`UsageError`, which the command prints without a traceback before it exits with code 2.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import os
import shutil
import textwrap
import typing
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from apache_beam.options import pipeline_options

from schemas.records import Target
from verification.building.toolchain import ToolchainError, toolchain

STORE = ".store"
"""Where finished work is kept, inside an output folder on a local disk."""
WORKERS_PER_GPU = 12
"""Each has two processes on its GPU at a time; more would wait for the lease, not the CPU."""
LOCAL_RUNNERS = ("DirectRunner",)
RUNNERS = (*LOCAL_RUNNERS, "DataflowRunner", "FlinkRunner", "SparkRunner", "PortableRunner")
REFUSED_RUNNERS = {
    "DaskRunner": "Beam's Dask runner computes only the last branch of a graph and merges tagged "
    "outputs, so it loses rows without an error",
    "PrismRunner": "it needs a binary that Beam downloads; DirectRunner runs here without one",
}
OURS_INSTEAD = {
    "direct_num_workers": "--num_workers_local",
    "direct_running_mode": "--num_workers_local (1 runs in this process, more are processes)",
}


TargetName = Literal["auto", "cpu", "cuda"]


class UsageError(ValueError):
    """A wrong command line, machine or folder. Its text is all that the user sees."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run does. The sentence under a field is its help text."""

    runner: str = "DirectRunner"
    """Where the graph runs: DirectRunner is this machine, the others are fleets."""
    target: TargetName = "auto"
    """What solutions are written for; auto is cuda where a GPU and nvcc are, else cpu."""
    policy: Literal["expert"] = "expert"
    """Who writes the solutions."""
    num_problems: int = 40
    """How many candidates are composed; some of them will be rejected."""
    seed: int = 0
    """The same seed gives the same candidates, whatever the number of workers."""
    output: str = "out"
    """The folder for the dataset: new, empty, or of an earlier run with the same settings."""
    store: str = ""
    """Where finished work is kept and looked up; OUTPUT/.store when empty."""
    num_workers_local: int = 0
    """Worker processes of DirectRunner; 0 is one per core, with target cuda at most 12 per GPU."""
    problem_timeout_s: float = 60.0
    """The longest that one sandboxed step of one problem may take, in seconds."""
    memory_limit_gib: float = 8.0
    """The most memory that one sandboxed process may use, in GiB."""
    device_memory_gib: float = 16.0
    """The most GPU memory that one sandboxed process may use, in GiB."""
    near_misses: Literal["drop", "keep"] = "drop"
    """Whether problems one operator away from a KernelBench problem enter the training configs."""
    sft: Literal["correct", "faster_than_eager", "faster_than_compile"] = "faster_than_eager"
    """Which trajectories enter sft, by what their final verdict proves."""
    accelerator: str = "type:nvidia-h100-80gb;count:1;install-nvidia-driver:5xx"
    """The accelerator hint of the device stages when the target is cuda and a fleet runs them."""
    dry_run: bool = False
    """Check everything, print the plan and stop; with DataflowRunner also build the job."""
    verbose: bool = False
    """Show Beam's own log."""

    @property
    def local(self) -> bool:
        return self.runner in LOCAL_RUNNERS

    @property
    def store_root(self) -> str:
        return self.store or f"{self.output.rstrip('/')}/{STORE}"

    @property
    def num_workers(self) -> int:
        cores = len(os.sched_getaffinity(0))
        if self.num_workers_local or self.target != Target.CUDA:
            return self.num_workers_local or cores
        import torch  # here, because checking a command line should not take seconds

        return min(cores, WORKERS_PER_GPU * max(1, torch.cuda.device_count()))


def field_help() -> dict[str, str]:
    """The sentence under each field of `RunConfig`, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(RunConfig)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name = typing.cast(ast.Name, field.target).id
            found[name] = str(typing.cast(ast.Constant, text.value).value)
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _BeamParser(pipeline_options._BeamArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"Beam: {message}")


def _our_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pipelines.ops6k",
        allow_abbrev=False,
        description="Compose problems, write and verify kernels for them, export the dataset.",
        epilog="Beam's own flags pass through. The same command resumes a killed one.",
    )
    hints, text = typing.get_type_hints(RunConfig), field_help()
    for field in dataclasses.fields(RunConfig):
        kind, default = hints[field.name], field.default
        options: dict[str, Any] = {"default": default, "help": f"{text[field.name]} [{default}]"}
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = kind if kind in (int, float) else str
            options["metavar"] = (
                "{" + ",".join(typing.get_args(kind)) + "}"
                if typing.get_args(kind)
                else field.name.upper()
            )
        parser.add_argument(f"--{field.name}", **options)
    return parser


@functools.cache
def _beam_parser() -> argparse.ArgumentParser:
    parser = _BeamParser(allow_abbrev=False, add_help=False)
    for kind in pipeline_options.PipelineOptions.__subclasses__():
        if kind.__module__.startswith("apache_beam."):
            kind._add_argparse_args(parser)
    return parser


def parse(argv: list[str]) -> tuple[RunConfig, list[str]]:
    """The settings and Beam's flags. Raises UsageError for anything neither of them knows.

    Beam itself ignores unknown flags, so a misspelt `--num_problem=5` would run with the default.
    """
    ours, rest = _our_parser().parse_known_args(argv)
    beam = _beam_parser()
    known, unknown = beam.parse_known_args(rest)
    if unknown:
        flag = unknown[0].split("=")[0]
        flags = [*_our_parser()._option_string_actions, *beam._option_string_actions]
        raise UsageError(f"unknown argument {flag!r}{_nearest(flag, flags)}")
    for name, better in OURS_INSTEAD.items():
        if getattr(known, name) != beam.get_default(name):
            raise UsageError(f"--{name} is set by this command: use {better}")
    config = RunConfig(**vars(ours))
    _check_values(config)
    return config, rest


def _check_values(config: RunConfig) -> None:
    for field, kind in typing.get_type_hints(RunConfig).items():
        if allowed := typing.get_args(kind):
            _check_choice(field, getattr(config, field), allowed)
    if config.runner in REFUSED_RUNNERS:
        raise UsageError(f"--runner={config.runner} is refused: {REFUSED_RUNNERS[config.runner]}")
    _check_choice("runner", config.runner, RUNNERS)
    if config.num_problems <= 0:
        raise UsageError(f"--num_problems must be 1 or more, got {config.num_problems}")
    if config.num_workers_local < 0:
        raise UsageError(f"--num_workers_local must be 0 or more, got {config.num_workers_local}")
    if not 0 <= config.seed < 2**63:
        raise UsageError(f"--seed must lie in [0, 2**63), got {config.seed}")
    for name in ("problem_timeout_s", "memory_limit_gib", "device_memory_gib"):
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name} must be positive, got {value}")
    if not config.output:
        raise UsageError("--output must name a folder")
    if not config.local and config.target == "auto":
        raise UsageError(
            f"--target=auto looks at this machine, but {config.runner} works on others: "
            "say --target=cpu or --target=cuda"
        )
    for name, folder in (("output", config.output), ("store", config.store_root)):
        if config.runner == "DataflowRunner" and "://" not in folder:
            raise UsageError(
                f"--{name}={folder}: Dataflow's workers do not share this disk; "
                "name a bucket, gs://..."
            )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            f"--{name}={value}: expected one of {', '.join(allowed)}{_nearest(value, allowed)}"
        )


def absolute(folder: str) -> str:
    """A folder as every worker can name it, whatever its working directory; URLs stay."""
    return folder if "://" in folder else os.path.abspath(folder)


def _nearest(word: str, words: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def gpu_found() -> bool:
    """Whether torch sees a GPU. Makes no device context; imports torch only where a driver is."""
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import torch

    return torch.cuda.is_available()


def resolve_target(target: str, gpu: bool, nvcc: bool) -> Target:
    """`auto` is cuda where both a GPU and nvcc are, else cpu."""
    if target == "auto":
        return Target.CUDA if gpu and nvcc else Target.CPU
    return Target(target)


def check_machine(config: RunConfig, gpu: bool) -> Target:
    """The target, once this machine can serve it. Raises UsageError saying what is missing."""
    target = resolve_target(config.target, gpu, shutil.which("nvcc") is not None)
    if not config.local:
        return target
    if target is Target.CUDA and not gpu:
        raise UsageError("--target=cuda needs an NVIDIA GPU that torch sees, found none")
    try:
        toolchain(target)
    except ToolchainError as error:
        raise UsageError(str(error)) from error
    return target
