"""The guards of a verdict by name, the invariant each enforces and the module where it does.

A guard is one reason a solution can be refused for. Production runs have all of them on; a test
switches single ones off to show that an exploit falls to the guard meant for it, and to no other
by accident. What was off is part of the verdict's `harness`, so such a verdict is never mistaken
for a real one.

The ten invariants:

     1  verdict and times come from a process that never imports solution code
     2  the reference never lives in the solution's process or its CUDA context
     3  built from source in a clean, offline place; what was checked is what is timed
     4  inputs come from secret seeds drawn after the solution is frozen, several distributions
     5  outputs of timed calls are checked
     6  expected values are fp64; inputs and parameters are the same after a call
     7  a problem enters only if trivial answers fail on it
     8  independent clocks agree; disagreement is "unmeasured"
     9  what was not measured is a failed measurement
    10  every guard has an exploit that it catches and an honest twin that it lets pass
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Guard(StrEnum):
    """Names for `Policy(off=...)`, `Verdict.harness` and docs/threats.md."""

    # correctness: verification.checking, compared in verification.workers.comparison
    STRUCTURE = "structure"
    STRIDES = "strides"
    BUDGET = "budget"
    SPECIALS = "specials"
    DRAW_CENTRED = "draw_centred"
    DRAW_LARGE = "draw_large"
    DRAW_HEAVY = "draw_heavy"
    DRAW_STRUCTURED = "draw_structured"
    DRAW_SPECIAL = "draw_special"
    NEEDLE = "needle"
    FRESH_PARAMETERS = "fresh_parameters"
    PARAMETER_CHANGE = "parameter_change"
    STATE_AFTER = "state_after"
    INPUTS_KEPT = "inputs_kept"
    ALIASES = "aliases"
    LIVE_OUTPUTS = "live_outputs"
    POISON = "poison"
    GUARD_BANDS = "guard_bands"
    REPEATS = "repeats"
    SECOND_SHAPE = "second_shape"
    SECOND_ARGUMENTS = "second_arguments"
    # own work
    DISPATCH_AUDIT = "dispatch_audit"
    PROCESS_AUDIT = "process_audit"
    BINARY_AUDIT = "binary_audit"
    KNOCK_OUT = "knock_out"
    ATTRIBUTION = "attribution"
    # time: verification.measuring, verification.timing
    TIMED_OUTPUTS = "timed_outputs"
    JUDGE_CLOCK = "judge_clock"
    CLOCKS_AGREE = "clocks_agree"
    OUTPUT_READY = "output_ready"
    BASELINE_DRIFT = "baseline_drift"
    AA_CONTROL = "aa_control"
    PHYSICS_FLOOR = "physics_floor"
    DEVICE_STATE = "device_state"


@dataclass(frozen=True, kw_only=True)
class GuardInfo:
    """What a guard looks at and which invariants it is part of."""

    invariants: tuple[int, ...]
    looks_at: str


GUARDS: dict[Guard, GuardInfo] = {}


def _says(guard: Guard, invariants: tuple[int, ...], looks_at: str) -> None:
    GUARDS[guard] = GuardInfo(invariants=invariants, looks_at=looks_at)


_says(Guard.STRUCTURE, (1,), "number, nesting, shape, dtype and exact type of the outputs")
_says(Guard.STRIDES, (1,), "memory layout of the outputs, where the reference's is contiguous")
_says(Guard.BUDGET, (6,), "error against fp64, at most a small multiple of eager's own")
_says(Guard.SPECIALS, (6,), "NaN and infinity exactly where eager and fp64 have them")
_says(Guard.DRAW_CENTRED, (4,), "inputs with another mean and spread, of both signs")
_says(Guard.DRAW_LARGE, (4,), "inputs 128 times as large")
_says(Guard.DRAW_HEAVY, (4,), "inputs with heavy tails")
_says(Guard.DRAW_STRUCTURED, (4,), "inputs sorted by size")
_says(Guard.DRAW_SPECIAL, (4,), "NaN, infinities, zeros, where the operators define them")
_says(
    Guard.NEEDLE,
    (4,),
    "a few elements of inputs and parameters changed in place: the output must follow",
)
_says(Guard.FRESH_PARAMETERS, (4,), "every parameter and buffer redrawn")
_says(Guard.PARAMETER_CHANGE, (4,), "parameters changed in place between two calls")
_says(Guard.STATE_AFTER, (6,), "parameters and buffers after the calls: they stay what they were")
_says(Guard.INPUTS_KEPT, (6,), "inputs after a call")
_says(Guard.ALIASES, (6,), "outputs that share memory with inputs")
_says(Guard.LIVE_OUTPUTS, (6,), "earlier outputs after later calls")
_says(Guard.POISON, (6,), "memory handed out is full of NaN, so that it is no answer")
_says(Guard.GUARD_BANDS, (6,), "bytes before and after inputs and allocations")
_says(Guard.REPEATS, (4,), "the same inputs many times: races")
_says(Guard.SECOND_SHAPE, (4,), "a neighbouring shape (a label, no refusal)")
_says(Guard.SECOND_ARGUMENTS, (4,), "other constructor arguments (a label, no refusal)")
_says(Guard.DISPATCH_AUDIT, (1,), "operators dispatched in an unannounced call")
_says(Guard.PROCESS_AUDIT, (1,), "processes, sockets and foreign libraries the code asks for")
_says(Guard.BINARY_AUDIT, (3,), "libraries and symbols the built library asks for")
_says(Guard.KNOCK_OUT, (1, 3), "the same solution with its kernels dead must be wrong")
_says(Guard.ATTRIBUTION, (1, 3), "which binary the kernels that ran came from")
_says(Guard.TIMED_OUTPUTS, (5,), "outputs of timed calls, drawn after the clock stopped")
_says(Guard.JUDGE_CLOCK, (8,), "the judge's clock around every timed call")
_says(
    Guard.CLOCKS_AGREE,
    (8,),
    "how long CUPTI saw the device busy with a call, against what is claimed",
)
_says(Guard.OUTPUT_READY, (8, 5), "what reading an output costs after the clock stopped")
_says(Guard.BASELINE_DRIFT, (8,), "baselines beside a solution against baselines alone")
_says(Guard.AA_CONTROL, (8, 9), "a baseline against itself")
_says(Guard.PHYSICS_FLOOR, (8,), "bytes and FLOPs over the rates measured on this device")
_says(Guard.DEVICE_STATE, (8, 9), "clocks and throttle reasons around every round")


def switched(off: Collection[Guard]) -> str:
    """What to add to a harness hash: nothing, or the guards that were off."""
    return "".join(f"-{guard}" for guard in sorted(off))
