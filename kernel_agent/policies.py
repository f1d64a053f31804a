"""The policies by name: what `--policy` takes."""

from __future__ import annotations

import functools

from kernel_agent.expert.policy import Expert
from kernel_agent.policy import Policy
from kernel_agent.tracing import trace
from verification.machine import Machine

POLICIES = ("expert",)


def policy_named(name: str, machine: Machine) -> Policy:
    """The policy behind a name. Raises ValueError for an unknown one."""
    if name == "expert":
        return Expert(functools.partial(trace, machine=machine))
    raise ValueError(f"expected one of {', '.join(POLICIES)} for --policy, got {name!r}")
