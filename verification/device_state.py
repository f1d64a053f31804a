"""What the device says of itself while it is timed: clocks, temperature, power, throttling.

The judge asks NVML, which needs no device context. Where there is no NVML (a CPU) nothing is
known and nothing concluded.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.records import DeviceState
from verification.gpu import Gpu

MAX_DISCARDED = 0.2
"""Share of rounds that may be lost to a throttled device before nothing is concluded."""
HARD_REASONS = {
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""NVML's bits for slowing down that has nothing to do with what runs. A power cap (0x04) is not
among them: large products reach it on a healthy device."""
SOFT_REASONS = {0x02: "applications_clocks_setting", 0x04: "sw_power_cap", 0x10: "sync_boost"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at the device."""

    sm_clock_mhz: float
    temperature_c: float
    power_w: float
    reasons: int
    """NVML's bit mask."""

    @property
    def throttled(self) -> bool:
        return any(self.reasons & bit for bit in HARD_REASONS)


class DeviceWatch:
    """Samples of one device; `sample` is None where NVML does not answer.

    Of a MIG device they are those of its whole GPU, whose clocks it shares.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        if gpu is None or gpu.card is None:
            return
        with contextlib.suppress(Exception):  # whatever is wrong with NVML, we just do not know
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.card.uuid)
            self._nvml = pynvml

    def sample(self) -> Sample | None:
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        try:
            return Sample(
                sm_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                temperature_c=float(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                ),
                power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                reasons=int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            )
        except nvml.NVMLError:
            return None


def summary(samples: Sequence[Sample], discarded: int) -> DeviceState | None:
    """Medians over the rounds of a measurement, and every reason seen; None without samples."""
    if not samples:
        return None
    seen = 0
    for sample in samples:
        seen |= sample.reasons
    names = {**HARD_REASONS, **SOFT_REASONS}
    return DeviceState(
        sm_clock_mhz=statistics.median(s.sm_clock_mhz for s in samples),
        temperature_c=statistics.median(s.temperature_c for s in samples),
        power_w=statistics.median(s.power_w for s in samples),
        throttle_reasons=tuple(name for bit, name in sorted(names.items()) if seen & bit),
        discarded_rounds=discarded,
    )


def too_many(discarded: int, wanted: int) -> bool:
    """Whether so many rounds were lost that nothing can be concluded from the others."""
    return discarded > MAX_DISCARDED * wanted
