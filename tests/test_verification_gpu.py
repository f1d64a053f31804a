"""A worker is shown one GPU: whatever it is called here, and whoever else has the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.sandbox import RemoteError
from schemas.codec import content_id
from schemas.records import Solution, Target
from tests import factories
from tests.exploits.exploit import edited
from tests.exploits.lab import Lab
from tests.exploits.problems import CASES
from tests.test_runtime_isolation import control
from verification import gpu as gpus
from verification import machine as machines
from verification.device_state import DeviceWatch
from verification.gpu import USUAL_CHANNELS, Card, Gpu, cards, choose, find_gpu
from verification.machine import Machine

ENTRY = "tests.sandbox_entry:handlers"
FOUR = (
    Card(uuid="GPU-aa", minor=2),
    Card(uuid="GPU-ab", minor=0),
    Card(uuid="GPU-b0", minor=3, mig=("MIG-1", "MIG-2")),
    Card(uuid="GPU-c0", minor=11),
)
FILES = [f"/dev/nvidia{number}" for number in (0, 1, 2, 3, 11)]


@pytest.mark.parametrize(
    ("device", "listed", "shown_as", "number"),
    [
        ("cuda:0", None, "GPU-aa", 0),
        ("cuda:1", None, "GPU-ab", 1),
        ("cuda:0", "3", "GPU-c0", 3),
        ("cuda:1", "3, 0", "GPU-aa", 0),
        ("cuda:1", "1,GPU-c0", "GPU-c0", 3),
        ("cuda:0", "GPU-c", "GPU-c0", 3),
        ("cuda:0", "MIG-2", "MIG-2", 2),
        ("cuda:2", None, "MIG-1", 2),
        ("cuda:0", "GPU-b0", "MIG-1", 2),
        ("cuda:0", "GPU-a", "GPU-a", None),
        ("cuda:0", "MIG-GPU-dd/1/0", "MIG-GPU-dd/1/0", None),
    ],
)
def test_a_device_is_one_of_those_that_are_listed(
    device: str, listed: str | None, shown_as: str, number: int | None
) -> None:
    card = None if number is None else FOUR[number]
    assert choose(device, listed, FOUR) == Gpu(shown_as=shown_as, card=card)


@pytest.mark.parametrize(
    ("device", "listed", "shown_as"),
    [("cuda:1", None, "1"), ("cuda:1", "5,7", "7"), ("cuda:0", "MIG-2,0", "MIG-2")],
)
def test_without_nvml_a_gpu_keeps_its_name_and_no_file_is_shut(
    device: str, listed: str | None, shown_as: str
) -> None:
    found = choose(device, listed, ())
    assert found == Gpu(shown_as=shown_as, card=None)
    assert found.others(FILES) == ()


@pytest.mark.parametrize(
    ("device", "listed", "says"),
    [
        ("cuda:4", None, "one of the 4 GPUs of this machine, got number 4"),
        ("cuda:0", "9", "one of the 4 GPUs of this machine, got number 9"),
        ("cuda:1", "2", "one of the 1 GPUs that CUDA_VISIBLE_DEVICES lists"),
        ("cuda:0", "", "one of the 0 GPUs that CUDA_VISIBLE_DEVICES lists"),
        ("cuda:x", None, "expected cpu or cuda:N, such as cuda:0, got 'cuda:x'"),
        ("cuda", None, "expected cpu or cuda:N, such as cuda:0, got 'cuda'"),
    ],
)
def test_a_gpu_that_is_not_there_is_an_error(device: str, listed: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose(device, listed, FOUR)


def test_device_files_of_others_go_by_minor_numbers() -> None:
    others = {n: choose(f"cuda:{n}", None, FOUR).others(FILES) for n in range(4)}
    assert others[0] == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia11", "/dev/nvidia3")
    assert others[1] == ("/dev/nvidia1", "/dev/nvidia11", "/dev/nvidia2", "/dev/nvidia3")
    assert others[3] == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia3")
    # Where ours is not there, as under WSL, we had better leave everything as it is.
    assert choose("cuda:0", None, FOUR).others(["/dev/nvidia0"]) == ()
    unknown = Gpu(shown_as="GPU-aa", card=Card(uuid="GPU-aa", minor=None))
    assert unknown.others(FILES) == ()


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """NVML of a machine with the four GPUs, after one that it cannot open."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 5

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Card:
        if number == 0:
            raise NVMLError("insufficient permissions")
        return FOUR[number - 1]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        return next(card for card in FOUR if card.uuid == uuid)

    def nvmlDeviceGetUUID(self, handle: Card | str) -> str:
        return handle if isinstance(handle, str) else handle.uuid

    def nvmlDeviceGetMinorNumber(self, handle: Card) -> int | None:
        return handle.minor

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Card) -> int:
        if not handle.mig:
            raise NVMLError("not supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Card, number: int) -> str:
        if number >= len(handle.mig):
            raise NVMLError("not found")
        return handle.mig[number]

    def nvmlDeviceGetClockInfo(self, handle: Card, kind: int) -> int:
        return 1000 + FOUR.index(handle)

    def nvmlDeviceGetTemperature(self, handle: Card, kind: int) -> int:
        return 40

    def nvmlDeviceGetPowerUsage(self, handle: Card) -> int:
        return 100_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Card) -> int:
        return 0


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML and the device files of a machine that has the four GPUs."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(machines, "device_files", lambda: FILES)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_nvml_says(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cards() == FOUR
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert cards() == ()


@pytest.mark.parametrize(("device", "listed", "number"), [("cuda:1", None, 1), ("cuda:1", "0,3", 3),
                                                          ("cuda:0", "MIG-2", 2)])  # fmt: skip
def test_the_clocks_that_are_watched_are_those_of_the_gpu_that_is_used(
    four_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    listed: str | None,
    number: int,
) -> None:
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    sample = DeviceWatch(find_gpu(device)).sample()
    assert sample is not None
    assert sample.sm_clock_mhz == 1000 + number
    assert DeviceWatch(find_gpu("cpu")).sample() is None


@contextmanager
def cuda_machine(root: Path, device: str, **changes: Any) -> Iterator[Machine]:
    settings = factories.machine_settings(root, target=Target.CUDA, device=device, **changes)
    machine = Machine(settings)
    try:
        yield machine
    finally:
        machine.close()


def test_what_the_workers_of_a_machine_are_told(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with cuda_machine(tmp_path, "cuda:1") as machine:
        told = machine.config(more=1)
        assert machine.device == "cuda:1"
    assert told["device"] == "cuda:0"
    assert told["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-ab"
    assert told["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert told["view_shut"] == sorted(set(FILES) - {"/dev/nvidia0"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c0,0")
    with cuda_machine(tmp_path, "cuda:0") as machine:
        told = machine.config(environment=USUAL_CHANNELS)
    assert told["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-c0"
    assert told["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert told["view_shut"] == sorted(set(FILES) - {"/dev/nvidia11"})


def test_the_workers_of_a_cpu_are_told_nothing_of_gpus(cpu_machine: Machine) -> None:
    told = cpu_machine.config()
    assert (told["device"], told["environment"], told["view_shut"]) == ("cpu", {}, [])


@pytest.mark.parametrize("listed", [None, "0,2,1", "GPU-c0,MIG-1,GPU-ab"])
def test_a_worker_is_shown_one_gpu_and_opens_no_other(
    four_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cpu_machine: Machine,
    listed: str | None,
) -> None:
    """E2. Two device files that every machine has stand for those of other GPUs."""
    other, another = "/dev/full", "/dev/zero"
    monkeypatch.setattr(machines, "device_files", lambda: ["/dev/nvidia0", other, another])
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    device = "cuda:1" if listed is None else "cuda:2"
    shared = cpu_machine.zygote.address
    with cuda_machine(tmp_path, device, zygote=shared) as machine:
        for role in ("reference", "solution", "builder"):
            seen = machine.spawn(ENTRY, role).call("who", 30)["environment"]
            assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-ab", role
        worker = machine.spawn(ENTRY, "solution")
        if not worker.call("who", 30)["isolation"]["filesystem"]:
            pytest.skip("no view of files on this machine")
        for path in (other, another):
            with pytest.raises(RemoteError, match="PermissionError"):
                worker.call("open_device", 30, path=path, write=True)
            assert control("open_device", path=path, write=True)


# On a GPU.


def device_id(card: Card) -> str:
    """As the probe makes it of what CUDA says."""
    return f"gpu-{content_id(card.uuid.removeprefix('GPU-'))[:8]}"


@pytest.mark.gpu
def test_a_machine_measures_on_the_gpu_that_is_named(tmp_path: Path) -> None:
    known = cards()
    for number, card in enumerate(known):
        if not card.mig:
            with cuda_machine(tmp_path, f"cuda:{number}") as machine:
                assert machine.environment.device_id == device_id(card)
                assert machine.device_watch.sample() is not None
    assert known


COUNTS = """lib = cabi.load()
if torch.cuda.device_count() != 1 or torch._C._cuda_getDeviceCount() != 1:
    raise RuntimeError(f"{torch.cuda.device_count()} GPUs")"""


@pytest.mark.gpu
def test_a_solution_beside_another_gpu_sees_one(tmp_path: Path) -> None:
    """E2, with real device files: also for who sets $CUDA_VISIBLE_DEVICES anew."""
    files = gpus.device_files()
    if len(cards()) < 2 or len(files) < 2:
        pytest.skip("needs two GPUs")
    honest = CASES["scale_gelu"].files(Target.CUDA)
    solution = Solution.of(edited(honest, (("lib = cabi.load()", COUNTS),), "counts GPUs"))
    with cuda_machine(tmp_path, "cuda:1") as machine, Lab(machine) as lab:
        verdict = lab.verify("scale_gelu", solution)
        assert verdict.passed, verdict.reason
        assert verdict.environment.device_id == device_id(cards()[1])
        worker = machine.spawn(ENTRY, "solution")
        assert worker.call("count_gpus", 60, shown="0,1") == 1
        assert control("count_gpus", shown="0,1") == 2
        mine = f"/dev/nvidia{cards()[1].minor}"
        assert worker.call("open_device", 30, path=mine, write=True)
        for path in set(files) - {mine}:
            with pytest.raises(RemoteError, match="PermissionError"):
                worker.call("open_device", 30, path=path, write=True)
