"""The verifiers of others in the comparison, run from copies that the user names.

    cuda_agent    the three commands of CUDA-Agent's `agent_workdir`, in a copy of it per solution:
                  accepted when verification says success and profiling prints a time
    kernelbench   KernelBench's evaluator, in a process per solution: accepted when compiled and
                  correct; `kernelbench, strict` refuses as well what its static checker or its
                  check of excessive speedup only remarks on

A command that fails ends a verdict early, and only what ran is counted. The first `alone` solutions
run with nothing beside them, which is where seconds come from: the fastest of the accepted ones,
since the first also fills the caches of torch.compile. The others run several at a time, for their
decisions only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.verifier_cases import Case, Subject
from benchmarks.verifier_table import Decision, run_row
from kernel_agent.printers import as_load_inline, as_paper
from schemas.records import Solution, Target

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = {"8.0": "Ampere", "8.6": "Ampere", "8.9": "Ada", "9.0": "Hopper"}
"""KernelBench's names, by compute capability; 10 and above is Blackwell."""
LIMIT_S = 300.0
VERIFIED = "[PASS] verify success"
PROFILED = re.compile(r"CUDA Extension: ([\d.]+)us")
Decide = Callable[[Case, Path], Decision]


class PeerError(Exception):
    """A verifier of others that cannot be run; says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The device as nvidia-smi tells: `capability` such as 9.0."""

    name: str
    driver: str
    capability: str


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that ended, or was killed at its limit (`code` None)."""

    code: int | None
    output: str
    seconds: float

    @property
    def reason(self) -> str:
        lines = self.output.strip().splitlines() or [""]
        ending = f"over {LIMIT_S:g} s" if self.code is None else f"exit code {self.code}"
        return f"{ending}: {lines[-1]}"[:300]


def gpu() -> Gpu:
    """The first GPU. Raises PeerError without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(
            f"expected a GPU, which the verifiers of others need, got from nvidia-smi: {error}; "
            "--only=ours needs none with --target=cpu"
        ) from error
    name, driver, capability = (part.strip() for part in said.splitlines()[0].split(","))
    return Gpu(name=name, driver=driver, capability=capability)


def run_command(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Ran:
    """Run a command in a session of its own; all of it is killed when it ends or at the limit."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever it left running
    return Ran(code=code, output=output, seconds=time.perf_counter() - started)


def run_peer(
    verifier: str, decide: Decide, cases: Sequence[Case], alone: int, beside: int, root: Path
) -> dict[str, Any]:
    """A row. `beside`: how many solutions after the first `alone` ones run at a time."""

    def folder(index: int) -> Path:
        made = root / f"{verifier}{index}"
        made.mkdir(parents=True)
        return made

    numbered = list(enumerate(cases))
    made = [decide(case, folder(index)) for index, case in numbered[:alone]]
    with ThreadPoolExecutor(beside) as threads:
        later = threads.map(lambda item: decide(item[1], folder(item[0])), numbered[alone:])
        made += [replace(decision, timed=beside == 1) for decision in later]
    return peer_row(verifier, made, alone, beside)


def peer_row(
    verifier: str, made: Sequence[Decision], alone: int, beside: int, **more: Any
) -> dict[str, Any]:
    """Verdicts a minute by the fastest accepted one that ran alone, or the fastest of all alone."""
    timed = [decision for decision in made if decision.timed]
    fastest = min((d.seconds for d in [d for d in timed if d.accepted] or timed), default=None)
    rate = None if fastest is None else 60 / fastest
    how = f"{alone} alone, of which the seconds are, then {beside} at a time"
    return run_row(verifier, made, rate, workers=1, how=how, **more)


class CudaAgent:
    """The scripts of CUDA-Agent."""

    def __init__(self, given: str, subject: Subject, device: Gpu) -> None:
        root = Path(given).expanduser()
        places = [root, root / "agent_workdir"]
        found = [p for p in places if (p / "utils" / "verification.py").is_file()]
        if not found:
            raise PeerError(
                f"expected --cuda_agent_dir to be a copy of github.com/BytedTsinghua-SIA/CUDA-Agent"
                f" with agent_workdir/utils/verification.py, got {given!r}"
            )
        self._layout, self._subject = found[0], subject
        # Its commands say python3: that is to be this Python.
        first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {"PATH": first, "TORCH_CUDA_ARCH_LIST": device.capability}
        self.files = digest(self._layout)

    def decide(self, case: Case, folder: Path) -> Decision:
        """Compile, verify, profile."""
        work = folder / "workdir"
        ignored = shutil.ignore_patterns("kernels", "build", "__pycache__", "*.so")
        shutil.copytree(self._layout, work, ignore=ignored)
        write(as_paper(case.solution(self._subject, Target.CUDA), Target.CUDA), work)
        (work / "model.py").write_text(self._subject.problem(Target.CUDA).code)
        steps: dict[str, Ran] = {}
        for name, command in (
            ("compile", ["bash", "utils/compile.sh"]),
            ("verification", ["python3", "-m", "utils.verification"]),
            ("profiling", ["python3", "-m", "utils.profiling"]),
        ):
            steps[name] = ran = run_command(command, work, self._environment)
            passed = ran.code == 0 and (name != "verification" or VERIFIED in ran.output)
            if not passed:
                break
        claimed = PROFILED.search(ran.output) if passed else None
        return Decision(
            case=case.name,
            kind=case.kind,
            accepted=claimed is not None,
            seconds=round(sum(step.seconds for step in steps.values()), 3),
            build_s=round(steps["compile"].seconds, 3),
            claimed_ms=float(claimed[1]) / 1e3 if claimed else None,
            status="accepted" if claimed else f"refused by {name}",
            reason="" if claimed else ran.reason,
            more={f"{step}_s": round(done.seconds, 3) for step, done in steps.items()},
        )


class KernelBench:
    """KernelBench's evaluator."""

    def __init__(self, given: str, subject: Subject, device: Gpu) -> None:
        self._source = Path(given).expanduser().resolve() / "src"
        if not (self._source / "kernelbench" / "eval.py").is_file():
            raise PeerError(
                "expected --kernelbench_dir to be a copy of github.com/ScalingIntelligence/"
                f"KernelBench with src/kernelbench/eval.py, got {given!r}"
            )
        self._subject = subject
        self._arch = ARCHITECTURES.get(device.capability, "Blackwell")
        self.files = digest(self._source / "kernelbench")

    def check_imports(self) -> None:
        """Raises PeerError with what its package lacks: better now than once a solution."""
        code = "import sys; sys.path.insert(0, sys.argv[1]); import kernelbench.eval"
        ran = run_command([sys.executable, "-c", code, str(self._source)], ROOT, {})
        if ran.code != 0:
            raise PeerError(
                f"kernelbench does not import here ({ran.reason}): install what it needs, "
                "litellm openai python-dotenv requests pydantic tqdm"
            )

    def decide(self, case: Case, folder: Path) -> Decision:
        """Evaluate in a fresh process. No result is a refusal, as by a pool that waits for one."""
        solution = as_load_inline(case.solution(self._subject, Target.CUDA), Target.CUDA)
        write(solution, folder)
        (folder / "model.py").write_text(self._subject.problem(Target.CUDA).code)
        result = folder / "result.json"
        files = [folder / "model.py", folder / "model_new.py", folder / "build", result]
        command = [sys.executable, "-m", "benchmarks.peer_kernelbench", str(self._source)]
        ran = run_command([*command, self._arch, *map(str, files)], ROOT, {})
        found = json.loads(result.read_text()) if result.is_file() else {}
        accepted = bool(found.get("compiled") and found.get("correct"))
        return Decision(
            case=case.name,
            kind=case.kind,
            accepted=accepted,
            seconds=round(ran.seconds, 3),
            claimed_ms=found["runtime_ms"] if accepted else None,
            status="accepted" if accepted else "refused",
            reason="" if accepted else _why(found) or ran.reason,
            more=found,
        )


def strictly(made: Sequence[Decision]) -> list[Decision]:
    """The same decisions where remarks of the static checker and on speed are refusals too."""
    return [
        replace(d, accepted=False, status="refused", reason=remark)
        if d.accepted and (remark := _remark(d.more))
        else d
        for d in made
    ]


def _remark(found: dict[str, Any]) -> str:
    if not found.get("static_ok", True):
        return "; ".join(found["static_errors"])[:300]
    speed = found.get("metadata", {}).get("excessive_speedup")
    return "excessive speedup" if speed == "True" else ""


def _why(found: dict[str, Any]) -> str:
    said = found.get("metadata", {})
    keys = ("correctness_issue", "runtime_error", "compilation_error")
    return "; ".join(f"{key}: {said[key]}" for key in keys if key in said)[:300]


def write(solution: Solution, folder: Path) -> None:
    """A solution's files."""
    for source in solution.files:
        file = folder / source.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.text)


def digest(folder: Path) -> str:
    """A hash of the Python, C++ and shell files of a peer: which version was run."""
    files = [f for f in sorted(folder.rglob("*")) if f.suffix in (".py", ".cpp", ".h", ".sh")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
