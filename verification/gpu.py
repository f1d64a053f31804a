"""Which GPU a device is, and how a worker is shown that one and no other.

"cuda:1" is the second of the GPUs that $CUDA_VISIBLE_DEVICES lists, or else of all, counted by PCI
bus as NVML and nvidia-smi count. A worker is shown it by its UUID, since numbers shift where other
GPUs cannot be opened, and calls it "cuda:0". The device file has a number of its own, the minor
number, which NVML tells. Where NVML does not answer, a worker is shown the GPU by the name it was
given, a number as a rule, and no device file is shut.

Not covered: MIG devices of one GPU share its device file; the reference's process keeps our files,
so that only its environment says which GPU to use.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

IN_A_WORKER = "cuda:0"
"""What every worker calls its GPU."""
DEVICE_FILES = "/dev/nvidia[0-9]*"
"""One for each GPU. Those beside them (nvidiactl, nvidia-uvm, nvidia-caps) are for all."""
CHANNELS = "CUDA_DEVICE_MAX_CONNECTIONS"
FEW_CHANNELS, USUAL_CHANNELS = {CHANNELS: "1"}, {CHANNELS: "8"}
"""How many queues to the device a context has. With one, sixteen processes make 795 contexts a
minute on an H200, with the driver's usual eight 295 (benchmarks/contexts.py). It only matters to
code that works on several streams, which may run one after the other then."""
STREAMS = re.compile(r"StreamCreate|StreamFromPool|\bStream\s*\(|Graph")
"""What makes streams of its own, in C++ or Python. Who hides it from us only slows himself."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU as NVML knows it."""

    uuid: str
    minor: int | None
    """The number of its device file."""
    mig: tuple[str, ...] = ()
    """UUIDs of the MIG devices it is split into."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The one a worker is shown."""

    shown_as: str
    """For $CUDA_VISIBLE_DEVICES."""
    card: Card | None
    """None where NVML does not know it."""

    @property
    def environment(self) -> dict[str, str]:
        """What a worker's environment says, before anything of CUDA starts there."""
        shown = {"CUDA_VISIBLE_DEVICES": self.shown_as, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return shown | FEW_CHANNELS

    def others(self, files: Collection[str]) -> tuple[str, ...]:
        """The device files of other GPUs; none where it is not known which one is ours."""
        ours = f"/dev/nvidia{self.card.minor}" if self.card else ""
        return tuple(sorted(file for file in files if file != ours)) if ours in files else ()


def channels(texts: Iterable[str]) -> dict[str, str]:
    """What the environment of a process needs that runs code with these texts."""
    return USUAL_CHANNELS if any(map(STREAMS.search, texts)) else FEW_CHANNELS


def find_gpu(device: str) -> Gpu | None:
    """The GPU that a device is here; None for a CPU. Raises ValueError where there is none."""
    if not device.startswith("cuda"):
        return None
    return choose(device, os.environ.get("CUDA_VISIBLE_DEVICES"), cards())


def device_files() -> list[str]:
    """The device files of all GPUs."""
    return glob.glob(DEVICE_FILES)


def choose(device: str, listed: str | None, known: Sequence[Card]) -> Gpu:
    """The GPU that a device is among those of $CUDA_VISIBLE_DEVICES, or of all where that is not
    set. Raises ValueError."""
    parsed = re.fullmatch(r"cuda:(\d+)", device)
    if parsed is None:  # a plain "cuda" would have a lease of its own
        raise ValueError(f"device: expected cpu or cuda:N, such as cuda:0, got {device!r}")
    number = int(parsed[1])
    name = str(number)
    if listed is not None:
        names = [part.strip() for part in listed.split(",") if part.strip()]
        if number >= len(names):
            raise ValueError(
                f"{device}: expected one of the {len(names)} GPUs that CUDA_VISIBLE_DEVICES lists, "
                f"which is {listed!r}: cuda:0 is the first of them"
            )
        name = names[number]
    card = _called(name, known)
    if card is None and known and name.isdigit():
        raise ValueError(
            f"{device}: expected one of the {len(known)} GPUs of this machine, got number {name}: "
            "nvidia-smi -L lists them"
        )
    return Gpu(shown_as=_shown_as(name, card), card=card)


def _called(name: str, known: Sequence[Card]) -> Card | None:
    """By number, by UUID, which may be cut short, or by that of a MIG device."""
    if name.isdigit():
        return known[int(name)] if int(name) < len(known) else None
    found = [card for card in known if name in card.mig or card.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _shown_as(name: str, card: Card | None) -> str:
    """A MIG device by its own UUID; a GPU that is split by its first one's: CUDA uses no second."""
    if card is None or name in card.mig:
        return name
    return card.mig[0] if card.mig else card.uuid


def cards() -> tuple[Card, ...]:
    """The GPUs that can be opened here, in NVML's order; none where it does not answer."""
    with contextlib.suppress(Exception):  # whatever is wrong with NVML, we just do not know
        import pynvml

        pynvml.nvmlInit()
        found = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # others may see it and we not
                found.append(_card(pynvml, pynvml.nvmlDeviceGetHandleByIndex(number)))
        return tuple(found)
    return ()


def _card(nvml: Any, handle: Any) -> Card:
    minor, mig = None, []
    with contextlib.suppress(nvml.NVMLError):
        minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
    with contextlib.suppress(nvml.NVMLError):  # not every GPU can be split
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # a place that is empty
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                mig.append(str(nvml.nvmlDeviceGetUUID(part)))
    return Card(uuid=str(nvml.nvmlDeviceGetUUID(handle)), minor=minor, mig=tuple(mig))
