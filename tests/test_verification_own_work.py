"""Whose work it was: what the accounts say by hand-sized numbers, and real solutions on the CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dedup.signature import signature
from schemas.records import Admission, Solution, VerdictStatus
from tests import samples
from verification.admission import admit
from verification.bench import Bench, Refusal
from verification.guards import Guard
from verification.judge import Judge
from verification.machine import Machine
from verification.own_work import (
    MAX_SAMPLED_SHARE,
    MIN_SAMPLES,
    Work,
    objection,
    of_launches,
    of_samples,
)
from verification.policy import Policy
from verification.sampling import UNKNOWN, Sampler

MEASURED = (VerdictStatus.CORRECT, VerdictStatus.UNMEASURED)
"""What becomes of honest work, on a quiet machine and on a busy one."""


def kernel(name: str, ms: Any = 1.0, own: Any = False, records: Any = 1) -> dict[str, Any]:
    return {"name": name, "ms": ms, "own": own, "records": records}


def account(*kernels: Any, **fields: Any) -> dict[str, Any]:
    return {"kernels": list(kernels), "busy_ms": 1.0, "problems": [], **fields}


def test_the_work_of_an_account_by_side() -> None:
    work = of_launches(
        account(
            kernel("mine", 3.0, own=True, records=2),
            kernel("mine_too", 1.0, own=True, records=5),
            kernel("gelu", 0.5),
            kernel("gelu", 0.25),
            kernel("softmax", 0.25),
        ),
        (),
    )
    assert work == Work(own=4.0, foreign={"gelu": 0.75, "softmax": 0.25}, own_launches=7)
    assert work.own_share == pytest.approx(0.8)
    assert objection(work) is None


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "void at::native::elementwise_kernel<128, direct_copy_kernel_cuda>",
        "void at::native::unrolled_elementwise_kernel<LoadWithCast<1>>",
    ],
)
def test_moving_data_is_nobodys_work(name: str) -> None:
    work = of_launches(account(kernel("mine", 0.1, own=True), kernel(name, 9.0)), ())
    assert work.own_share == 1.0
    assert objection(work) is None


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("ampere_sgemm_128x64_nn", "cublas"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "cublas"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>", "cublas"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "cudnn"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4", "cudnn"),
    ],
)
def test_a_library_counts_as_own_where_it_is_allowed(name: str, library: str) -> None:
    told = account(kernel("mine", 1.0, own=True), kernel(name, 9.0))
    refused, allowed = of_launches(told, ()), of_launches(told, {library})
    assert refused.foreign == {name: 9.0}
    assert objection(refused) == f"90% of the work was done by {name}"
    assert (allowed.own, allowed.own_launches, allowed.foreign) == (10.0, 1, {})
    assert objection(allowed) is None


def test_an_allowed_library_does_not_allow_the_rest() -> None:
    told = account(kernel("mine", 1.0, own=True), kernel("softmax_warp_forward", 1.0))
    assert objection(of_launches(told, {"cublas", "cudnn"})) is not None


def test_a_solution_without_a_kernel_of_its_own_is_refused() -> None:
    for told in (account(), account(kernel("ampere_sgemm", 1.0))):
        assert objection(of_launches(told, {"cublas"})) == "no kernel of its own ran"


def test_an_incomplete_account_does_not_show_that_nothing_ran() -> None:
    """But what it shows of others' work it shows."""
    lost = {"problems": ["CUPTI dropped 7 records"]}
    nothing = of_launches(account(**lost), ())
    assert (nothing.own_launches, nothing.problems) == (None, ("CUPTI dropped 7 records",))
    assert objection(nothing) is None
    assert objection(of_launches(account(kernel("gelu"), **lost), ())) is not None
    assert of_launches(account(kernel("mine", own=True), **lost), ()).own_launches == 1


@pytest.mark.parametrize(("foreign", "refused"), [(0.24, False), (0.26, True)])
def test_a_fifth_of_the_work_may_be_foreign(foreign: float, refused: bool) -> None:
    work = Work(own=1.0, foreign={"gelu": foreign}, own_launches=1)
    assert (objection(work) is not None) is refused


def test_an_objection_names_the_four_largest() -> None:
    work = Work(own=0.0, foreign=dict(zip("abcdef", range(1, 7), strict=True)), own_launches=1)
    assert objection(work) == "100% of the work was done by f, e, d, c"


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        "kernels",
        {},
        {"kernels": [], "busy_ms": 1.0},
        {"kernels": [], "problems": []},
        {"kernels": 3, "busy_ms": 1.0, "problems": []},
        account(busy_ms=None),
        account(busy_ms=float("inf")),
        account(problems=None),
        account("kernel"),
        account({"name": "k"}),
        account(kernel("k", "much")),
        account(kernel("k", None)),
        account(kernel("k", float("nan"))),
        account(kernel("k", -1.0)),
        account(kernel("k", 10**400)),
        account(kernel("k", own=True, records=float("inf"))),
        account(kernel("k", own=True, records=-5)),
    ],
    ids=lambda told: repr(told)[:60],
)
def test_a_malformed_account_is_the_solutions_fault(told: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        of_launches(told, ())
    if told is None:
        return  # there is nothing to tell with
    nobody: Any = None
    with pytest.raises(Refusal, match="no account of launches") as refusal:
        Bench(nobody, nobody, nobody, 0).attribute({"launches": told})
    assert refusal.value.status is VerdictStatus.INTEGRITY


OWN, OTHER = "/tmp/ops6k-1-abc/0123.so", "/tmp/ops6k-1-abc/4567.so"
TORCH = f"{sys.prefix}/lib/python3/site-packages/torch/lib/libtorch_cpu.so"
NEUTRAL = {"/usr/lib/libgomp.so.1": 900, f"{sys.base_prefix}/bin/python3": 50, "[vdso]": 9}


def test_the_work_in_samples_by_file() -> None:
    found = {OWN: 20, OTHER: 5, "/usr/lib/x86_64-linux-gnu/libmvec.so.1": 10, TORCH: 15, UNKNOWN: 5}
    work = of_samples(found | NEUTRAL, (OWN, OTHER))
    assert work is not None
    assert (work.own, dict(work.foreign)) == (35, {"libtorch_cpu.so": 15, UNKNOWN: 5})
    assert work.own_launches is None
    assert objection(work, MAX_SAMPLED_SHARE) is None
    other = of_samples(found | NEUTRAL, (OWN,))
    assert other is not None
    assert other.foreign["4567.so"] == 5


@pytest.mark.parametrize(
    ("own", "foreign", "refused"),
    [
        (0, MIN_SAMPLES - 1, None),  # too few to tell, whatever they are
        (0, MIN_SAMPLES, True),
        (2, 28, True),
        (4, 28, False),
        (10, 80, False),  # a light kernel between two casts
    ],
)
def test_samples_object_only_when_they_are_many(
    own: int, foreign: int, refused: bool | None
) -> None:
    work = of_samples({OWN: own, TORCH: foreign, **NEUTRAL}, (OWN,))
    assert (work is None) is (refused is None)
    if work is not None:
        assert (objection(work, MAX_SAMPLED_SHARE) is not None) is refused


def test_samples_of_nothing_tell_nothing() -> None:
    assert of_samples({}, (OWN,)) is None
    assert of_samples(NEUTRAL, (OWN,)) is None


# ---- real solutions, judged on the CPU

FORWARD = """        out = torch.empty_like(x)
        lib.scale_gelu(x, self.weight, out, x.shape[0], x.shape[1])
        return out
"""
IMPORTS = "import cabi\nimport torch\n"
ON_A_THREAD = """import queue
import threading

import cabi
import torch

asked, answered = queue.SimpleQueue(), queue.SimpleQueue()


def compute():
    while True:
        x, weight, out = asked.get()
        torch.mul(x, weight, out=out)
        answered.put(torch._C._nn.gelu(out, out=out))


threading.Thread(target=compute, daemon=True).start()
"""
FIRST_ROW_IS_OURS = """        out = torch.empty_like(x)
        asked.put((x[1:], self.weight.detach(), out[1:]))
        answered.get()
        lib.scale_gelu(x, self.weight, out, 1, x.shape[1])
        return out
"""
"""With the kernel dead the first row is wrong, so that the knock-out shows nothing."""
COPIES = """        out = torch.zeros_like(x)
        x = x.bfloat16().float().copy_(x)
        lib.scale_gelu(x.clone(), self.weight, out, x.shape[0], x.shape[1])
        return out.clone()
"""


def edited(forward: str, imports: str = IMPORTS) -> Solution:
    assert FORWARD in samples.MODEL_NEW
    assert IMPORTS in samples.MODEL_NEW
    text = samples.MODEL_NEW.replace(FORWARD, forward).replace(IMPORTS, imports)
    return samples.solution(text)


@pytest.fixture(scope="module")
def admission(cpu_machine: Machine) -> Admission:
    sampler = Sampler(os.getpid())
    with sampler:
        pass
    if sampler.refused:
        pytest.skip(f"needs a kernel that lets us sample: {sampler.refused}")
    found = admit(samples.problem(), cpu_machine, signature, ("mul", "gelu"))
    assert found.reason is None, found.detail
    return found


@pytest.fixture(scope="module")
def judge(cpu_machine: Machine, admission: Admission) -> Iterator[Judge]:
    with Judge(samples.problem(), admission, cpu_machine) as made:
        yield made


@contextlib.contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Neighbours that want all cores."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_torch_on_another_thread_falls_to_attribution(
    judge: Judge, cpu_machine: Machine, admission: Admission
) -> None:
    """The dispatch audit does not see that thread; the right answer needs the solution's kernel."""
    exploit = edited(FIRST_ROW_IS_OURS, ON_A_THREAD)
    verdict = judge.verify(exploit)
    assert verdict.status is VerdictStatus.INTEGRITY, verdict.reason
    assert verdict.reason.startswith(f"{Guard.ATTRIBUTION}: "), verdict.reason
    assert "libtorch_cpu.so" in verdict.reason
    policy = Policy(off=frozenset({Guard.ATTRIBUTION}))
    with Judge(samples.problem(), admission, cpu_machine, policy) as lenient:
        passed = lenient.verify(exploit)
    assert passed.status in MEASURED, passed.reason
    assert passed.attribution is not None
    assert passed.attribution.own_share is not None
    assert passed.attribution.own_share < 0.1


def test_an_honest_kernel_has_most_of_the_samples(judge: Judge) -> None:
    verdict = judge.verify(samples.solution())
    assert verdict.status in MEASURED, verdict.reason
    assert verdict.attribution is not None
    assert verdict.attribution.own_launches is None
    assert verdict.attribution.own_share is not None
    assert verdict.attribution.own_share > 0.5


def test_copies_and_casts_are_no_reason_to_refuse(judge: Judge) -> None:
    verdict = judge.verify(edited(COPIES))
    assert verdict.status in MEASURED, verdict.reason


def test_an_honest_kernel_is_never_refused_on_a_busy_machine(judge: Judge) -> None:
    with _busy(2):
        verdict = judge.verify(edited(FORWARD.replace("return out", "return out  # busy")))
    assert verdict.status in MEASURED, verdict.reason
