"""Is a solution right, and is the work its own? The phase before anything is timed.

Draws in two groups, and between them new parameters where the old ones lie; then a few elements
of the parameters and of the last inputs change where they lie. At the effort `publish` also two
hundred repeats, and labels for what is written for one shape or one set of
arguments. Cheap checks come first and the first wrong answer ends it: a wrong solution costs one
call.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from schemas.records import VerdictStatus
from verification.bench import TORCH_DID_PART, Bench, Refusal, fresh_seed
from verification.guards import Guard
from verification.workers.distributions import WIDENING
from verification.workers.inputs import DRAWS

REPEATS = 200
DRAW_GUARDS = {
    "centred": Guard.DRAW_CENTRED,
    "large": Guard.DRAW_LARGE,
    "heavy": Guard.DRAW_HEAVY,
    "structured": Guard.DRAW_STRUCTURED,
    "special": Guard.DRAW_SPECIAL,
}


def check_solution(bench: Bench, effort: str, state: Path) -> None:
    """Run every check that needs no clock. `state`: where new parameters go. Raises Refusal."""
    first, second = DRAWS[effort]
    # Which calls are audited is drawn, so that good behaviour cannot be kept for them.
    audited = {secrets.randbelow(len(first)), len(first) + secrets.randbelow(len(second))}
    for index, distribution in enumerate(first):
        _draw(bench, distribution, index in audited)
    _change_parameters(bench, state)
    for index, distribution in enumerate(second, len(first)):
        _draw(bench, distribution, index in audited)
    if effort == "publish":
        _repeat(bench)
    _needles(bench, state)
    _afterwards(bench)


def _draw(bench: Bench, distribution: str, audited: bool, guard: Guard | None = None) -> None:
    guard = guard or DRAW_GUARDS.get(distribution)
    if guard is not None and guard in DRAW_GUARDS.values() and not bench.on(guard):
        distribution, guard = "natural", None
    seed = fresh_seed()
    draw = {"seed": seed, "distribution": distribution, "state_seed": bench.state_seed}
    expect, run = ("expect", {"draw": draw}), ("run", {"draw": draw, "audited": audited})
    if distribution in WIDENING:
        _widened(bench, expect, run, distribution, seed, guard)
        return
    wanted, got = bench.both(expect, run)
    _fair_call(bench, wanted, got)
    bench.compare("draw", distribution, seed, got, guard)


def _widened(
    bench: Bench,
    expect: tuple[str, dict[str, Any]],
    run: tuple[str, dict[str, Any]],
    name: str,
    seed: int,
    guard: Guard | None,
) -> None:
    """Inputs a reference may not be defined on: it is asked first, and a solution only then."""
    wanted = bench.refer(expect[0], **expect[1])
    if "skipped" not in wanted:
        got = bench.ask(run[0], **run[1])
        _fair_call(bench, wanted, got)
        bench.compare("needle" if name == "needle" else "draw", name, seed, got, guard)


def _fair_call(bench: Bench, wanted: dict[str, Any], got: dict[str, Any]) -> None:
    """What a call must leave alone, by what its own process noticed. Raises Refusal."""
    if got.get("checksum") != wanted["checksum"]:
        raise Refusal(VerdictStatus.INTEGRITY, "the solution ran on other inputs")
    bench.require(Guard.INPUTS_KEPT, got.get("inputs_kept"), "the solution changed its inputs")
    bench.require(Guard.GUARD_BANDS, got.get("bands_kept"), "a kernel wrote beside its tensors")
    bench.require(
        Guard.ALIASES,
        not got.get("aliases") or wanted["aliases"],
        "an output shares memory with an input",
    )
    computed = got.get("computed") or []
    if computed and bench.torch_allowed:
        bench.labels.append(TORCH_DID_PART)
    else:
        bench.require(
            Guard.DISPATCH_AUDIT,
            not computed,
            f"operators of torch did the work: {', '.join(map(str, computed))[:300]}",
        )
    bench.attribute(got)


def _change_parameters(bench: Bench, state: Path) -> None:
    """New parameters where the old ones lie; a solution that has kept the old ones is wrong."""
    if not bench.on(Guard.PARAMETER_CHANGE):
        return
    seed = fresh_seed()
    found = bench.refer(
        "set_state", seed=seed, path=str(state), redraw=bench.on(Guard.FRESH_PARAMETERS)
    )
    bench.state_seed = seed
    if found["tensors"]:
        bench.ask("change_state", state=str(state))
        _draw(bench, "natural", False, Guard.PARAMETER_CHANGE)


def _needles(bench: Bench, state: Path) -> None:
    if bench.on(Guard.NEEDLE):
        seed = fresh_seed()
        if bench.refer("needle_state", seed=seed, path=str(state))["tensors"]:
            bench.ask("change_state", state=str(state))
        expect, run = ("expect_needles", {"seed": seed}), ("run_needles", {"seed": seed})
        _widened(bench, expect, run, "needle", seed, Guard.NEEDLE)


def _repeat(bench: Bench) -> None:
    """The same inputs many times, and in turn with others: whatever strays must stay within the
    budget."""
    if not bench.on(Guard.REPEATS):
        return
    seed, seed_too = fresh_seed(), fresh_seed()
    draw = {"seed": seed, "distribution": "natural", "state_seed": bench.state_seed}
    other = {**draw, "seed": seed_too}
    wanted, got = bench.both(("expect", {"draw": draw}), ("run", {"draw": draw}))
    _fair_call(bench, wanted, got)
    strayed = bench.ask("repeat", times=REPEATS, other=other)
    if strayed.get("differs"):
        bench.labels.append("not_bitwise_repeatable")
    bench.compare("repeat", "natural", seed, strayed, Guard.REPEATS)
    bench.refer("expect", draw=other)
    strayed = bench.ask("repeated")
    bench.compare("repeat", "in turn", seed_too, strayed, Guard.REPEATS)


def label_solution(bench: Bench, state: Path) -> None:
    """Whether it holds for other shapes and arguments too: labels, because most solutions are
    written for one problem. Its worker may not survive this."""
    seed = fresh_seed()
    draw = {"seed": seed, "distribution": "natural", "state_seed": bench.state_seed}
    for guard, method, label, more in (
        (Guard.SECOND_ARGUMENTS, "arguments", "arguments_specialised", {"state": str(state)}),
        (Guard.SECOND_SHAPE, "resized", "shape_specialised", {}),
    ):
        if not bench.on(guard):
            continue
        wanted = bench.refer(f"expect_{method}", draw=draw)
        if "skipped" in wanted:
            continue
        try:
            if "arguments" in wanted:
                more = {**more, "arguments": wanted["arguments"]}
            got = bench.ask(f"run_{method}", draw=draw, **more)
            right = bench.compared(method, "natural", seed, got)[0].passed
        except Refusal:
            right = False
        if not right:
            bench.labels.append(label)


def _afterwards(bench: Bench) -> None:
    found = bench.ask("alive")
    bench.require(Guard.LIVE_OUTPUTS, found.get("kept"), "a later call changed an earlier output")
    bench.require(
        Guard.STATE_AFTER, found.get("state_kept"), "a call changed parameters or buffers"
    )
    bench.require(
        Guard.GUARD_BANDS, found.get("bands_kept"), "a kernel wrote beside the parameters"
    )
    asked = found.get("asked") or []
    bench.require(
        Guard.PROCESS_AUDIT, not asked, f"the code asked for {', '.join(map(str, asked))[:300]}"
    )
