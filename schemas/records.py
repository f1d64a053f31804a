"""The records that flow through the pipeline, and how they nest.

    Problem      the PyTorch reference to beat (KernelBench form) and how it was composed
    Admission    what screening found out about one problem; `reason` is None when admitted
    Solution     the files that define `ModelNew`
    Verdict      all that was measured of one (problem, solution): Check*, Measurement*, Interval*
    Turn         one reason / act / observe step of a rollout, with the Verdict it led to
    Trajectory   a rollout: Turn*, the best Solution and its Verdict
    Rejection    what left the flow, where and why

Records are frozen and keyword-only, ids are content hashes, units are in names, None means not
measured. `schemas.codec` turns any of them into plain JSON values and back, losslessly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import StrEnum

from schemas.codec import content_id

SCHEMA_VERSION = 1
"""Raised whenever a record changes its meaning; written into every Parquet file and `run.json`."""


class Target(StrEnum):
    """What a solution is written for."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """The class at which baselines run and at which eager's own error sets the budget."""

    BF16 = "bf16"
    TF32 = "tf32"
    FP32 = "fp32"


class RejectStage(StrEnum):
    """Where in the flow a row was rejected."""

    COMPOSE = "compose"
    ADMIT = "admit"
    DECONTAMINATE = "decontaminate"
    DEDUP = "dedup"
    ROLLOUT = "rollout"
    EXPORT = "export"


class AdmitReason(StrEnum):
    """Why screening refused a problem."""

    EAGER_ERROR = "eager_error"  # the reference raises
    COMPILE_ERROR = "compile_error"  # torch.compile raises
    COMPILE_MISMATCH = (
        "compile_mismatch"  # eager and torch.compile disagree beyond eager's own error
    )
    NOT_REPEATABLE = "not_repeatable"  # eval mode, same input, different output
    NOT_FINITE = "not_finite"  # NaN or infinity on natural inputs
    CONSTANT_OUTPUT = (
        "constant_output"  # one output holds a single value, or lies within the tolerance of zero
    )
    INSENSITIVE_INPUT = "insensitive_input"  # an input can change without moving the output
    INSENSITIVE_PARAMETER = "insensitive_parameter"  # the same for a parameter
    INSENSITIVE_OPERATOR = (
        "insensitive_operator"  # an operator can be dropped without moving the output
    )
    UNSUPPORTED = "unsupported"  # inputs in lists, float8, inputs that only the model can make
    FIXED_INPUTS = "fixed_inputs"  # another seed gives the same inputs
    TRIVIAL_ANSWER = "trivial_answer"  # zeros, the mean, the first input … would pass
    DECLARED_OPS = "declared_ops"  # the declared ops are not those in the graph
    TOO_FAST = "too_fast"  # eager below the band of the target
    TOO_SLOW = "too_slow"  # eager above it
    TIMEOUT = "timeout"
    CRASH = "crash"  # the process died
    OUT_OF_MEMORY = "out_of_memory"
    REFERENCE_INACCURATE = (
        "reference_inaccurate"  # fp64 cannot be computed, or eager strays absurdly far from it
    )


class VerdictStatus(StrEnum):
    """How a verdict ended. Only CORRECT carries speedups."""

    CORRECT = "correct"
    UNMEASURED = "unmeasured"  # every check passed, no valid timing: never a win
    INCORRECT = "incorrect"
    BUILD_ERROR = "build_error"
    RUNTIME_ERROR = "runtime_error"  # the solution raised
    INTEGRITY = "integrity"  # the solution changed inputs, aliased outputs, touched its own files …
    TIMEOUT = "timeout"
    CRASH = "crash"
    OUT_OF_MEMORY = "out_of_memory"
    REFERENCE_ERROR = "reference_error"  # our side failed; says nothing about the solution


class TrajectoryKind(StrEnum):
    """Two rollouts per problem: a plain correct one, and one that starts from it and tunes."""

    REFERENCE = "reference"
    OPTIMIZED = "optimized"


class StopReason(StrEnum):
    """Why a rollout ended."""

    SUBMITTED = "submitted"  # the policy said it was done
    TURN_LIMIT = "turn_limit"
    UNSUPPORTED = "unsupported"  # the policy cannot handle this problem
    NO_CORRECT_SOLUTION = "no_correct_solution"
    ENVIRONMENT_ERROR = "environment_error"  # our side failed


class Layer(StrEnum):
    """The three layers of optimisation a turn can work on."""

    ALGORITHM = "algorithm"
    HARDWARE = "hardware"
    FINE_TUNING = "fine_tuning"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A PyTorch reference in KernelBench form.

    `code` defines `Model`, `get_inputs()` and `get_init_inputs()`; `ops` and `data_source` read as
    in CUDA-Agent-Ops-6K (`torch#N` for N composed operators).
    """

    problem_id: str
    code: str
    ops: tuple[str, ...]
    data_source: str
    families: tuple[str, ...]
    target: Target
    precision: Precision
    seed: int
    index: int

    def __post_init__(self) -> None:
        if self.problem_id != content_id(self.code):
            raise ValueError(
                f"problem_id {self.problem_id!r} is not the hash of its code, "
                f"{content_id(self.code)!r}"
            )
        if not self.ops:
            raise ValueError("a problem declares at least one op")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where something was measured; travels with every number."""

    device: str
    device_id: str
    driver: str | None
    toolkit: str | None
    compiler: str
    torch: str
    python: str
    num_threads: int
    platform: str


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What the machine allowed us to take away from the solution process. `full` is all of it."""

    network: bool  # True: own network namespace, or no way to ask for a socket to the internet
    user: bool  # True: another, unprivileged user
    limits: bool  # True: memory, processes and file size are limited
    processes: bool = False  # True: own PID namespace, which ends with it
    filesystem: bool = False  # True: writes nothing outside folders of its own, sees no home
    syscalls: bool = False  # True: starts no program, asks nothing of the kernel it has no use for

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts that were not taken away, by name."""
        return tuple(f.name for f in fields(self) if not getattr(self, f.name))

    @property
    def full(self) -> bool:
        return not self.missing


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Samples of one side of a comparison, in milliseconds per call."""

    median_ms: float
    samples_ms: tuple[float, ...]
    clock: str

    def __post_init__(self) -> None:
        if not self.samples_ms:
            raise ValueError("a measurement without samples is not a measurement")
        times = (*self.samples_ms, self.median_ms)
        bad = [s for s in times if type(s) not in (int, float) or not 0.0 < s < float("inf")]
        if bad:
            raise ValueError(f"times must be finite and positive, got {bad[:3]}")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio with its 95 % bootstrap interval."""

    low: float
    point: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high < float("inf"):
            raise ValueError(f"not an interval of a positive ratio: {self}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of the solution's output with the fp64 reference.

    `error` and `budget` are in units of the output's scale; `error` is None when there was nothing
    to compare.
    """

    name: str
    distribution: str
    seed: int
    passed: bool
    error: float | None
    budget: float | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Whose work it was, in one unannounced call and with the solution's own kernels dead."""

    knocked_out: int | None
    """Functions or kernels that were dead in the second build; None where none could be made."""
    own_launches: int | None
    """Kernels launched from the solution's own binary; None where nothing can tell."""
    own_share: float | None
    """Of the device time (on a CPU: of the samples) of that call."""
    foreign: tuple[str, ...]
    """What else ran: kernels, on a CPU libraries."""


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """The device while it was timed; None where it does not say."""

    sm_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    throttle_reasons: tuple[str, ...]
    discarded_rounds: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All that was measured of one (problem, solution). `speedup_*` = baseline time / its time."""

    problem_id: str
    solution_id: str
    status: VerdictStatus
    reason: str
    effort: str
    checks: tuple[Check, ...]
    solution: Measurement | None
    eager: Measurement | None
    compile: Measurement | None
    speedup_eager: Interval | None
    speedup_compile: Interval | None
    aa_control: Interval | None
    roofline_ms: float | None
    headroom: float | None
    build_s: float | None
    binary_hash: str | None
    isolation: Isolation | None
    environment: Environment
    harness: str
    labels: tuple[str, ...] = ()
    """What is true of it and no fault, such as shape_specialised."""
    processes: int | None = None
    """Processes of the solution that its times come from."""
    attribution: Attribution | None = None
    device_state: DeviceState | None = None

    def __post_init__(self) -> None:
        timed = (
            self.solution,
            self.eager,
            self.compile,
            self.speedup_eager,
            self.speedup_compile,
            self.aa_control,
        )
        if self.status is VerdictStatus.CORRECT:
            if any(part is None for part in timed):
                raise ValueError("a correct verdict needs every measurement; use UNMEASURED")
            if not self.checks or not all(check.passed for check in self.checks):
                raise ValueError("a correct verdict needs checks, all of them passed")
        elif self.speedup_eager is not None or self.speedup_compile is not None:
            raise ValueError(f"a {self.status} verdict carries no speedup")

    @property
    def correct(self) -> bool:
        return self.status is VerdictStatus.CORRECT

    @property
    def passed(self) -> bool:
        """Every check passed, whether or not a speed could be measured."""
        return self.status in (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What screening found. Admitted when `reason` is None; then every other field is measured."""

    problem_id: str
    reason: AdmitReason | None
    detail: str
    operators: tuple[str, ...]  # canonical operator names in the traced graph, in order
    ngrams: tuple[str, ...]  # names only: for decontamination
    ngrams_attributes: tuple[str, ...]  # with bucketed attributes: for dedup within the set
    eager_ms: float | None
    compile_ms: float | None
    roofline_ms: float | None
    headroom: float | None
    min_bytes: int | None
    flops: int | None
    environment: Environment

    def __post_init__(self) -> None:
        if self.reason is None and None in (
            self.eager_ms,
            self.compile_ms,
            self.roofline_ms,
            self.headroom,
        ):
            raise ValueError("an admitted problem has its times measured")


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Where a kept problem stands among the benchmark and the set."""

    problem_id: str
    cluster_id: str
    kernelbench_id: str | None  # nearest KernelBench problem
    kernelbench_similarity: float
    near_miss: bool  # one operator away from a KernelBench problem
    split: str  # train | validation, by the hash of the cluster


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a solution; `path` is relative, with forward slashes."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The files that define `ModelNew`, sorted by path. `form` is cabi, load_inline or paper."""

    solution_id: str
    form: str
    files: tuple[SourceFile, ...]

    @staticmethod
    def of(files: dict[str, str], form: str = "cabi") -> Solution:
        """Build a solution from {path: text}; its id is the hash of form and files."""
        sources = tuple(SourceFile(path=path, text=files[path]) for path in sorted(files))
        key = content_id(json.dumps([form, [[s.path, s.text] for s in sources]]))
        return Solution(solution_id=key, form=form, files=sources)

    def text(self, path: str) -> str:
        return next(source.text for source in self.files if source.path == path)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """What the policy asked the environment to do; `arguments` is a JSON object as one string."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One step: `thought` and `calls` by the policy, `observations` (one per call) by the tools."""

    index: int
    thought: str
    calls: tuple[ToolCall, ...]
    observations: tuple[str, ...]
    solution_id: str | None
    verdict: Verdict | None
    layer: Layer | None
    gain: (
        float | None
    )  # time before / time after, of the solution's own time; None when not measured


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A rollout. `solution` and `verdict` are the best verified ones of it, None without any."""

    trajectory_id: str
    problem_id: str
    kind: TrajectoryKind
    policy: str
    system: str
    prompt: str
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    detail: str
    solution: Solution | None
    verdict: Verdict | None

    def __post_init__(self) -> None:
        if (self.solution is None) != (self.verdict is None):
            raise ValueError("a trajectory has both a solution and its verdict, or neither")
        if self.verdict is not None and not self.verdict.passed:
            raise ValueError("only a correct solution is the best of its trajectory")


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A row of `rejected`. `kind` is set when a trajectory was lost and the problem was not."""

    problem_id: str
    stage: RejectStage
    reason: str
    detail: str
    kind: TrajectoryKind | None
    index: int
