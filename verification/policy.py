"""What a solution may do besides its own work, and what a verdict to be published needs."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records import Isolation
from verification.guards import Guard


class IsolationError(RuntimeError):
    """This machine cannot confine a solution enough for numbers that are to be published."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a solution may do besides its own work."""

    libraries: frozenset[str] = frozenset()
    """What it may call: "cublas" for products, "cudnn" for convolutions, "torch" for operators of
    torch, as in KernelBench. Its own kernels must matter all the same (KNOCK_OUT)."""
    off: frozenset[Guard] = frozenset()
    """Guards that are not asked; for tests of the guards, and recorded in `Verdict.harness`."""
    partial_isolation: bool = False
    """Whether the effort `publish` goes ahead on a machine that cannot isolate a solution fully, or
    on a GPU cannot see whose work its calls were."""


def require_full(isolation: Isolation) -> None:
    """Raises IsolationError unless a solution is isolated fully."""
    if not isolation.full:
        raise IsolationError(
            f"expected full isolation for a verdict to be published, got {isolation}: run on a "
            "machine that gives it (python -m pipelines.doctor says what is missing), or allow "
            "partial isolation, which the verdict then shows"
        )
