"""The solution's process: unprivileged, offline, and believed only where that costs the solution.

It gets inputs by seed, parameters by file and the libraries the judge built. What it says about
time is checked against the judge's own clock, what it says about correctness is not asked:
outputs are read and judged elsewhere. What it notices about itself (`audit`, guard bands,
changed inputs) may only lower a verdict.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from runtime.problem_code import load_module, make_inputs
from verification.workers import forms
from verification.workers.attribution import AttributionError, Launches, LaunchReport
from verification.workers.audit import DispatchAudit, ProcessAudit, forbid_compilers
from verification.workers.bands import Bands
from verification.workers.clock import Clock, warm_up
from verification.workers.distributions import add_needles
from verification.workers.inputs import Draw, checksum, draw_inputs, resized
from verification.workers.names import OtherNames, load, match_names, renamed
from verification.workers.ring import InputRing
from verification.workers.stray import Stray
from verification.workers.transport import Mailbox, flatten_outputs
from verification.workers.worker_setup import (
    opener,
    release,
    set_precision,
    shares_memory,
    synchronize,
)

POISONED_BLOCKS = 2
"""Of the size of every output, before each checked call."""


class Candidate:
    """A solution being asked for outputs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.device: str = config["device"]
        self._form: str = config["form"]
        self.scratch = Path(config["scratch"])
        self._mailbox = Mailbox(config["mail"], self.device)
        set_precision(config["precision"])
        self.module = load_module(config["inputs_code"], "problem_inputs")
        self._clock = Clock(self.device)
        self._launches, self.unwatched = _watcher(config)
        self._audit = ProcessAudit()
        self._names: dict[str, str] | None = None
        """The problem's name of each parameter and buffer, where they are not the same."""
        forbid_compilers()
        self._alive: list[tuple[str, list[torch.Tensor]]] = []
        self._checked: list[Any] = []
        self._bands = Bands()
        self._ring: InputRing | None = None
        self._inputs: Any = None
        self._result: Any = None
        self._kept: dict[int, tuple[str, list[torch.Tensor]]] = {}
        self._rooms: list[list[torch.Tensor]] = []
        self._stray = Stray()

    def build_model(
        self, libraries: dict[str, str], state: str, init_inputs: list[Any]
    ) -> dict[str, Any]:
        """Import `model_new.py`, construct `ModelNew` and give it the reference's parameters.

        {"other_names": True} where it has those under other names: `match_names` is to follow.
        """
        self._audit.libraries |= set(libraries.values())
        for library in libraries.values():
            self._own(library)
        with self._audit.listening():
            self._solution = forms.import_model(self._form, self.scratch, libraries)
        try:
            self._construct(state, init_inputs)
        except OtherNames:
            if self._names is not None:
                raise
            return {"other_names": True}
        return {}

    def match_names(
        self, seed: int, constructed: str, state: str, init_inputs: list[Any]
    ) -> dict[str, Any]:
        """The same under names of its own. `constructed`: what the reference's constructor made
        from `seed`; see `names`."""
        wanted = torch.load(constructed, map_location=self.device, weights_only=True)
        torch.manual_seed(seed)
        model = self._make(init_inputs)
        with self._audit.listening():
            own = model.to(self.device).state_dict(keep_vars=True)
        self._names = match_names(own, wanted)
        self._load(model, state)
        return {}

    def _own(self, library: str) -> None:
        if self._launches is not None:
            self._launches.own(Path(library))

    def _construct(self, state: str, init_inputs: list[Any]) -> None:
        self._load(self._make(init_inputs), state)

    def _make(self, init_inputs: list[Any]) -> torch.nn.Module:
        with self._audit.listening(), torch.device(self.device):
            return self._solution.ModelNew(*init_inputs).eval()

    def _load(self, model: torch.nn.Module, state: str) -> None:
        weights = torch.load(state, map_location=self.device, weights_only=True)
        with self._audit.listening():
            load(model, weights, self._names)
            self.model = model.to(self.device)
        for tensor in self._state():
            tensor.data = self._bands.copy(tensor.data)
        self._state_sum = checksum(self._state())
        synchronize()

    def _state(self) -> list[torch.Tensor]:
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return [tensor for _, tensor in sorted(named.items())]

    def change_state(self, state: str) -> dict[str, Any]:
        """New values in the parameters and buffers where they lie, without torch's noticing."""
        weights = torch.load(state, map_location=self.device, weights_only=True)
        mine = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, value in renamed(weights, self._names).items():
            if name in mine:
                mine[name].data.copy_(value)
        self._state_sum = checksum(self._state())
        return {}

    def _forward(self, inputs: list[Any]) -> Any:
        with torch.no_grad():
            return self.model(*inputs)

    def run(self, draw: dict[str, Any], audited: bool = False) -> dict[str, Any]:
        """One checked call. The outputs stay alive, so that a reused buffer shows at the end."""
        bands = Bands()
        self._checked = [
            bands.copy(value) if isinstance(value, torch.Tensor) else value
            for value in draw_inputs(self.module, self.device, Draw(**draw))
        ]
        return self._run(bands, audited)

    def run_needles(self, seed: int) -> dict[str, Any]:
        """The inputs of the last checked call with a few elements changed where they lie."""
        add_needles(self._checked, seed)
        return self._run(Bands(), False)

    def run_resized(self, draw: dict[str, Any]) -> dict[str, Any]:
        """A checked call at a neighbouring shape."""
        inputs = draw_inputs(self.module, self.device, Draw(**draw))
        self._checked = resized(inputs) or inputs
        return self._run(Bands(), False)

    def run_arguments(
        self, draw: dict[str, Any], state: str, arguments: list[Any]
    ) -> dict[str, Any]:
        """A checked call of a model with other constructor arguments."""
        kept = self.model
        try:
            self._construct(state, arguments)
            return self.run(draw)
        finally:
            self.model = kept

    def _run(self, bands: Bands, audited: bool) -> dict[str, Any]:
        inputs = self._checked
        before = checksum(inputs)
        self._poison()
        audit = DispatchAudit(bands)
        with (
            self._watching() as seen,
            self._audit.listening(),
            audit if audited else contextlib.nullcontext(),
        ):
            result = self._forward(inputs)
            synchronize()
        structure, outputs = flatten_outputs(result)
        self._alive.append((checksum(list(outputs)), outputs))
        return {
            "checksum": before,
            "inputs_kept": checksum(inputs) == before,
            "bands_kept": bands.kept(),
            "computed": sorted(set(audit.computed))[:20],
            "aliases": shares_memory(outputs, inputs),
            "launches": seen.get("launches"),
            **self._send(structure, outputs),
        }

    @contextlib.contextmanager
    def _watching(self) -> Iterator[dict[str, Any]]:
        """Whose kernels run meanwhile; the answer is there afterwards, where anything can tell."""
        seen: dict[str, Any] = {}
        if self._launches is None:
            yield seen
            return
        self._launches.begin()
        yield seen
        seen["launches"] = _account(self._launches.end())

    def _poison(self) -> None:
        """Fill what the allocator is about to hand out with NaN, so that it cannot pass as output.

        Not covered: blocks of other sizes, which a shape-dependent kernel may ask for first.
        """
        if self._alive:
            blocks = [
                torch.empty_like(output)
                for output in self._alive[-1][1]
                for _ in range(POISONED_BLOCKS)
            ]
            for block in blocks:
                if block.is_contiguous() and block.numel():
                    block.view(-1).view(torch.uint8).fill_(0xFF)

    def repeat(self, times: int, other: dict[str, Any]) -> dict[str, Any]:
        """Run the last inputs again and again, from half-way on in turn with those of another draw,
        so that the answer to the call before is none to this one. Hands over the output that strays
        furthest from the first one of its inputs; the other's is handed over by `repeated`, and its
        inputs are the last ones then."""
        both = [self._checked, draw_inputs(self.module, self.device, Draw(**other))]
        strays = [Stray(), Stray()]
        for index in range(times):
            turn = index % 2 if index >= times // 2 else 0
            strays[turn].look(*flatten_outputs(self._forward(both[turn])))
        self._stray, self._checked = strays[1], both[1]
        differs = any(stray.far > 0.0 for stray in strays)
        return {"differs": differs, **self._send(strays[0].structure, strays[0].furthest)}

    def repeated(self) -> dict[str, Any]:
        """The output for the other draw that strayed furthest."""
        stray, self._stray = self._stray, Stray()
        return self._send(stray.structure, stray.furthest)

    def _send(self, structure: str, outputs: list[torch.Tensor]) -> dict[str, Any]:
        """Hand outputs to the reader, over those it has read."""
        sent = [self._mailbox.put(index, value) for index, value in enumerate(outputs)]
        return {"structure": structure, "outputs": sent}

    def alive(self) -> dict[str, Any]:
        """Whether all earlier outputs, the state and its bands still hold what they held, and what
        the code has asked the system for. Outputs and inputs are let go then."""
        kept = all(checksum(list(outputs)) == was for was, outputs in self._alive)
        self._alive, self._checked = [], []
        release(self.device)
        return {
            "kept": kept,
            "state_kept": checksum(self._state()) == self._state_sum,
            "bands_kept": self._bands.kept(),
            "asked": self._audit.asked,
        }

    def make_ring(self, seed: int) -> dict[str, Any]:
        """Make the inputs of the timed calls."""
        self._ring = self._inputs = self._result = None  # before there is a second one
        self._kept, self._rooms = {}, []
        release(self.device)
        self._ring = InputRing(self.module, self.device, seed)
        synchronize()
        return {}

    def warm_up(self, rooms: int) -> dict[str, Any]:
        """Run until caches and allocator are warm; says with how many calls.

        Leaves memory for `rooms` copies of an output, so that copying is all that `keep` does.
        """
        if self._ring is None:
            raise RuntimeError("make_ring comes first")
        ring = self._ring
        calls = warm_up(lambda: self._forward(ring.advance()))
        _, outputs = flatten_outputs(self._forward(ring.advance()))
        self._rooms = [[torch.zeros_like(o) for o in outputs] for _ in range(rooms)]
        synchronize()
        return {"calls": calls + 1}

    def prepare(self) -> dict[str, Any]:
        """New values in the inputs, before the judge starts its clock."""
        if self._ring is None:
            raise RuntimeError("make_ring comes first")
        self._result = None
        self._inputs = self._ring.advance()
        self._clock.prepare()
        return {}

    def call(self, bare: bool = False) -> dict[str, Any]:
        """One timed call; a `bare` one has nothing of ours around it that could be left out."""
        milliseconds, result = self._clock.time(lambda: self._forward(self._inputs), not bare)
        self._result = result
        return {"ms": milliseconds}

    def watch(self) -> dict[str, Any]:
        """A call like a timed one, in which kernels are attributed and CUPTI's clock is read."""
        with self._watching() as seen:
            reply = self.call(bare=True)
        return {**reply, "launches": seen.get("launches")}

    def keep(self, number: int) -> dict[str, Any]:
        """Copy the output of the last timed call, asked for after the clock has stopped.

        A copy on the device: handing it over takes a hundred times as long, and can wait until
        others may use the device again.
        """
        structure, outputs = flatten_outputs(self._result)
        room = self._rooms.pop() if self._rooms else []
        if [o.shape for o in outputs] != [r.shape for r in room]:
            room = [torch.empty_like(o) for o in outputs]
        for copy, output in zip(room, outputs, strict=True):
            copy.copy_(output)
        synchronize()
        self._kept[number] = (structure, room)
        return {}

    def hand_over(self, number: int) -> dict[str, Any]:
        """The output that was kept of a timed call."""
        self._ring = self._inputs = self._result = None
        return self._send(*self._kept.pop(number))


def _watcher(config: dict[str, Any]) -> tuple[Launches | None, str]:
    """Watches kernels from before anything of the solution is loaded; else None and why not."""
    if not config["device"].startswith("cuda"):
        return None, ""  # the judge watches from outside
    if not config["launches"]:
        return None, "there is no CUPTI on this machine"
    try:
        launches = Launches(Path(config["launches"]))
        launches.start()
    except (AttributionError, OSError) as error:
        return None, str(error)
    return launches, ""


def _account(report: LaunchReport) -> dict[str, Any]:
    """A report as JSON."""
    return {
        "kernels": [
            {
                "own": use.own,
                "name": use.name[:200],
                "records": use.records,
                "ms": use.device_ms,
            }
            for use in report.kernels
        ],
        "busy_ms": report.busy_ms,
        "problems": list(report.problems),
    }


def _first_use(inputs_code: str, device: str) -> tuple[Callable[[Any], Any], ...]:
    """Constructing `ModelNew` of a solution's module, and calling it."""
    problem = load_module(inputs_code, "problem_inputs")

    def construct(module: Any) -> Any:
        with torch.device(device):
            return module.ModelNew(*problem.get_init_inputs()).eval().to(device)

    def call(model: Any) -> None:
        with torch.no_grad():
            model(*make_inputs(problem, device, 0))

    return construct, call


METHODS = (
    "build_model", "match_names", "change_state",
    "run", "run_needles", "run_resized", "run_arguments", "repeat", "repeated", "alive",
    "make_ring", "warm_up", "prepare", "call", "watch", "keep", "hand_over",
)  # fmt: skip


def handlers(config: dict[str, Any], isolation: dict[str, bool]) -> dict[str, Callable[..., Any]]:
    """The entry point of a solution worker."""
    os.chdir(config["scratch"])
    state: dict[str, Candidate] = {}

    def load() -> dict[str, Any]:
        state["candidate"] = candidate = Candidate(config)
        return {"unwatched": candidate.unwatched}

    def record(used: bool = False) -> dict[str, Any]:
        """What extensions the solution asks to be built; run in a worker of its own. `used`: it is
        constructed and called too, if importing it asks for nothing; the device must be open."""
        forbid_compilers()
        uses = _first_use(config["inputs_code"], config["device"]) if used else ()
        return {"extensions": forms.record(Path(config["scratch"]), uses)}

    def method(name: str) -> Callable[..., Any]:
        return lambda **params: getattr(state["candidate"], name)(**params)

    return {
        "open": opener(config, isolation),
        "load": load,
        "record": record,
        **{name: method(name) for name in METHODS},
    }
