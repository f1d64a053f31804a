"""The Arrow schema of each published config, side by side with the records it is made from.

    problems      one kept problem a row: how it was made, what it costs, what it resembles
    trajectories  one rollout a row: outcome, timings with intervals, every turn, the chat
    ppo_warmup    one problem a row: a single-turn prompt, in verl's columns
    sft           one good trajectory a row: the chat to imitate
    critic        one trajectory a row, failures included: the chat, its rewards and returns
    rl            one problem a row: the agent's prompt, in verl's columns
    rejected      one loss a row: where and why

Every column says what it holds in its field metadata (`describe`), and the dataset card prints
that. A column that is not nullable always has a value; null means not measured. Columns stand in
reading order: ids, short scalars, long code, messages last. `messages` loads unchanged with
`datasets` and in chat templates that take tool calls: a tool call's `arguments` is one JSON
string, because tools differ in their arguments and Arrow structs do not.
"""

from __future__ import annotations

import pyarrow as pa

from schemas.records import SCHEMA_VERSION

SPLITS = ("train", "validation")


def _field(name: str, kind: pa.DataType, doc: str = "", *, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"doc": doc} if doc else None)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_TEXT, _INT, _FLOAT, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()

_TOOL_CALL = pa.struct(
    [
        _field("id", _TEXT),
        _field("type", _TEXT),
        _field("function", pa.struct([_field("name", _TEXT), _field("arguments", _TEXT)])),
    ]
)
_MESSAGE = pa.struct(
    [
        _field("role", _TEXT),
        _field("content", _TEXT),
        _field("tool_calls", _list(_TOOL_CALL), null=True),
        _field("tool_call_id", _TEXT, null=True),
        _field("name", _TEXT, null=True),
    ]
)
_PROMPT = _list(pa.struct([_field("role", _TEXT), _field("content", _TEXT)]))

_TURN = pa.struct(
    [
        _field("index", _INT),
        _field("layer", _TEXT, null=True),
        _field("gain", _FLOAT, null=True),
        _field("status", _TEXT, null=True),
        _field("reward", _FLOAT, null=True),
        _field("solution_id", _TEXT, null=True),
        _field("thought", _TEXT),
        _field("calls", _list(pa.struct([_field("name", _TEXT), _field("arguments", _TEXT)]))),
        _field("observations", _list(_TEXT)),
    ]
)
_SOLUTION = pa.struct(
    [
        _field("solution_id", _TEXT),
        _field("form", _TEXT),
        _field("files", _list(pa.struct([_field("path", _TEXT), _field("text", _TEXT)]))),
    ]
)
_ISOLATION = pa.struct(
    [
        *(_field(name, _BOOL) for name in ("network", "user", "limits")),
        *(_field(name, _BOOL, null=True) for name in ("processes", "filesystem", "syscalls")),
    ],
)


def _environment(*, null: bool) -> list[pa.Field]:
    """Where the row's times were measured; `null` where a row may have none."""
    return [
        _field("device", _TEXT, "name of the device the times were measured on", null=null),
        _field("device_id", _TEXT, "which one of them", null=null),
        _field("driver", _TEXT, "driver version", null=True),
        _field("toolkit", _TEXT, "CUDA toolkit version", null=True),
        _field("compiler", _TEXT, "compiler that built the solutions", null=null),
        _field("torch", _TEXT, "PyTorch version", null=null),
        _field("python", _TEXT, "Python version", null=null),
        _field("num_threads", _INT, "CPU threads PyTorch and OpenMP used", null=null),
        _field("platform", _TEXT, "operating system and machine", null=null),
    ]


def _class_of_problem() -> list[pa.Field]:
    return [
        _field("target", _TEXT, "what solutions are written for: cuda or cpu"),
        _field("precision", _TEXT, "bf16, tf32 or fp32: class of the baselines and error budget"),
        _field("num_ops", _INT, "number of composed operators"),
    ]


_HEADROOM = _field("headroom", _FLOAT, "compile_ms / roofline_ms")
_SPEED_SPLIT = _field("speed_split", _BOOL, "headroom is 1.2 or more: speed can be won here")

_PROBLEMS = [
    _field("problem_id", _TEXT, "first 16 hex digits of the SHA-256 of `code`"),
    _field(
        "ops",
        _list(_TEXT),
        "composed operators in order; CUDA-Agent-Ops-6K stores json.dumps of this list",
    ),
    _field("data_source", _TEXT, "torch#N for N composed operators, as in CUDA-Agent-Ops-6K"),
    _field("families", _list(_TEXT), "operator families of `ops`"),
    *_class_of_problem(),
    _field("operators", _list(_TEXT), "canonical operators in the traced graph, in order"),
    _field("cluster_id", _TEXT, "dedup cluster; its hash decides the split"),
    _field("kernelbench_id", _TEXT, "nearest KernelBench problem", null=True),
    _field("kernelbench_similarity", _FLOAT, "exact Jaccard similarity to it, 0 to 1"),
    _field("near_miss", _BOOL, "one operator away from a KernelBench problem"),
    _field("eager_ms", _FLOAT, "median time of PyTorch eager"),
    _field("compile_ms", _FLOAT, "median time of default-mode torch.compile"),
    _field("roofline_ms", _FLOAT, "least time the device needs for min_bytes and flops"),
    _HEADROOM,
    _SPEED_SPLIT,
    _field("min_bytes", _INT, "least bytes that must move: inputs, parameters, outputs", null=True),
    _field("flops", _INT, "floating-point operations", null=True),
    *_environment(null=False),
    _field("seed", _INT, "seed of the run that composed it"),
    _field("index", _INT, "index under that seed"),
    _field("code", _TEXT, "module with `Model`, `get_inputs()` and `get_init_inputs()`"),
]

_TRAJECTORIES = [
    _field("trajectory_id", _TEXT, "id of the rollout"),
    _field("problem_id", _TEXT, "row of `problems`"),
    _field("kind", _TEXT, "reference: plain and correct; optimized: tuned for speed"),
    _field("policy", _TEXT, "what acted"),
    *_class_of_problem(),
    _HEADROOM,
    _SPEED_SPLIT,
    _field("stop_reason", _TEXT, "why the rollout ended"),
    _field("detail", _TEXT, "more on that, often empty"),
    _field("num_turns", _INT, "reason / act / observe steps"),
    _field("reward", _FLOAT, "-1, 1, 2 or 3; null: the harness failed", null=True),
    _field("status", _TEXT, "verdict on the best solution, else the last verdict", null=True),
    _field("solution_median_ms", _FLOAT, "median time of the solution", null=True),
    _field("eager_median_ms", _FLOAT, "of eager, in the same session", null=True),
    _field("compile_median_ms", _FLOAT, "of torch.compile, in the same session", null=True),
    _field("speedup_eager", _FLOAT, "eager time / solution time", null=True),
    _field("speedup_eager_low", _FLOAT, "lower end of its 95 % interval", null=True),
    _field("speedup_eager_high", _FLOAT, "upper end", null=True),
    _field("speedup_compile", _FLOAT, "torch.compile time / solution time", null=True),
    _field("speedup_compile_low", _FLOAT, "lower end of its 95 % interval", null=True),
    _field("speedup_compile_high", _FLOAT, "upper end", null=True),
    _field("aa_control_low", _FLOAT, "the solution against itself: lower end", null=True),
    _field("aa_control_high", _FLOAT, "upper end", null=True),
    _field("num_checks", _INT, "comparisons with the fp64 reference", null=True),
    _field("max_error", _FLOAT, "error of the check nearest to its budget", null=True),
    _field("error_budget", _FLOAT, "budget of that check, same unit", null=True),
    _field("effort", _TEXT, "protocol of the verdict: reward or publish", null=True),
    _field("build_s", _FLOAT, "seconds to build the solution", null=True),
    _field("harness", _TEXT, "version of the verifier", null=True),
    _field(
        "labels", _list(_TEXT), "what is true of it and no fault: shape_specialised …", null=True
    ),
    _field("processes", _INT, "processes of the solution that its times come from", null=True),
    _field("knocked_out", _INT, "kernels without which it was seen to be wrong", null=True),
    _field("own_share", _FLOAT, "share of the work done by its own binary", null=True),
    _field("sm_clock_mhz", _FLOAT, "clock of the multiprocessors while it was timed", null=True),
    _field("isolation", _ISOLATION, "what was taken away from the solution process", null=True),
    *_environment(null=True),
    _field("solution", _SOLUTION, "files of the best verified solution", null=True),
    _field("turns", _list(_TURN), "the rollout, step by step, with what each led to"),
    _field("messages", _list(_MESSAGE), "the same rollout as a chat"),
]

_CHAT = [
    _field("tools", _TEXT, "tool definitions the policy saw: a JSON list, for chat templates"),
    _field("messages", _list(_MESSAGE), "chat: system, user, assistant with tool calls, tool"),
]

_SFT = [
    _field("trajectory_id", _TEXT, "row of `trajectories`"),
    _field("problem_id", _TEXT, "row of `problems`"),
    _field("kind", _TEXT, "reference or optimized"),
    _field("policy", _TEXT, "what acted"),
    *_class_of_problem(),
    _SPEED_SPLIT,
    _field("num_turns", _INT, "assistant messages"),
    _field("reward", _FLOAT, "1, 2 or 3"),
    _field("speedup_eager", _FLOAT, "eager time / solution time"),
    _field("speedup_compile", _FLOAT, "torch.compile time / solution time"),
    *_CHAT,
]

_CRITIC = [
    _field("trajectory_id", _TEXT, "row of `trajectories`"),
    _field("problem_id", _TEXT, "row of `problems`"),
    _field("kind", _TEXT, "reference or optimized"),
    _field("policy", _TEXT, "what acted"),
    *_class_of_problem(),
    _SPEED_SPLIT,
    _field("num_turns", _INT, "assistant messages"),
    _field("reward", _FLOAT, "-1, 1, 2 or 3"),
    _field("rewards", _list(_FLOAT), "one per assistant message: the outcome, at the last one"),
    _field("returns", _list(_FLOAT), "sum of the rewards from there on (gamma 1)"),
    *_CHAT,
]

_EXTRA_INFO = pa.struct(
    [
        _field("split", _TEXT),
        _field("index", _INT),
        _field("problem_id", _TEXT),
        *_class_of_problem(),
        _field("headroom", _FLOAT),
        _field("speed_split", _BOOL),
        _field("eager_ms", _FLOAT),
        _field("compile_ms", _FLOAT),
    ]
)

_VERL = [
    _field("problem_id", _TEXT, "row of `problems`"),
    _field("data_source", _TEXT, "torch#N for N composed operators"),
    _field("ability", _TEXT, "cuda_kernels or cpu_kernels"),
    _field(
        "reward_model",
        pa.struct([_field("style", _TEXT), _field("ground_truth", _TEXT)]),
        "style `rule`; ground_truth is the code of the problem, which is what a verifier needs",
    ),
    _field("extra_info", _EXTRA_INFO, "what a reward function needs besides the code"),
    _field("prompt", _PROMPT, "chat so far: system and user"),
]

_REJECTED = [
    _field("problem_id", _TEXT, "id of the problem; empty when there was not yet any code"),
    _field("index", _INT, "index under the seed"),
    _field("stage", _TEXT, "compose, admit, decontaminate, dedup, rollout or export"),
    _field("reason", _TEXT, "why; at export, config.reason: lost to that config only"),
    _field("detail", _TEXT, "more on that, often empty"),
    _field("kind", _TEXT, "set when a trajectory was lost and the problem was not", null=True),
]


def _schema(fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={"dataset": "ops6k", "schema_version": str(SCHEMA_VERSION)})


SCHEMAS: dict[str, pa.Schema] = {
    "problems": _schema(_PROBLEMS),
    "trajectories": _schema(_TRAJECTORIES),
    "ppo_warmup": _schema(_VERL),
    "sft": _schema(_SFT),
    "critic": _schema(_CRITIC),
    "rl": _schema(_VERL),
    "rejected": _schema(_REJECTED),
}
"""Schema of each config, in the order in which the card lists them."""


def splits_of(config: str) -> tuple[str, ...]:
    """Which splits a config has. What was rejected never got a split: all of it is `train`."""
    return SPLITS[:1] if config == "rejected" else SPLITS


def describe(field: pa.Field) -> str:
    """What a column holds, in one line."""
    return str((field.metadata or {}).get(b"doc", b"").decode())
