"""Which kernels ran, for how long and whose: CUPTI inside the solution's process (GPU only).

`build_launches` compiles `native/launches.cpp` once; `Launches` loads it into the process of the
solution before the solution itself, and before there is a device context:

    launches = Launches(native)
    launches.start()
    launches.own(library)          before the library is loaded
    launches.begin(); model(*inputs); report = launches.end()

A kernel is the solution's own when the module that has it lies byte for byte in its library. The
solution shares the process, so it can lie here: a report may only lower a verdict. `control`
shows that a foreign kernel is still seen; use it after the solution ran. Not covered: code that
writes over our memory or over CUPTI's, and foreign kernels copied into the solution's own image.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).resolve().parents[1] / "native"
SOURCES = ("launches.cpp",)
CUDA_HOME = "/usr/local/cuda"
COMPILE_TIMEOUT_S = 120.0


class AttributionError(RuntimeError):
    """Launches cannot be watched here; the message has CUPTI's own words."""


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """One kernel in one report: how often the device ran it, and the milliseconds of that."""

    name: str
    own: bool
    records: int
    device_ms: float


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """What ran between `begin` and `end`.

    Times are milliseconds on the device; in `busy_ms` of them anything ran. Gaps between kernels
    are not in it, since watching makes them longer. `own_modules` counts modules of the solution's
    library that were loaded since the start. `problems` says why the report may be incomplete: it
    then shows nothing in anybody's favour.
    """

    kernels: tuple[KernelUse, ...]
    copy_ms: float
    busy_ms: float
    copies: int
    dropped: int
    own_modules: int
    foreign_modules: int
    problems: tuple[str, ...]

    def of(self, own: bool) -> tuple[KernelUse, ...]:
        return tuple(use for use in self.kernels if use.own is own)


def build_launches(cache: Path, cuda_home: Path | None = None) -> tuple[Path | None, str]:
    """The compiled watcher, from the cache if it is there; (None, reason) where it cannot be built.

    `cuda_home`: the CUDA toolkit, by default the one that `find_cuda_home` finds.
    The file is readable for every user when the cache is. Safe under concurrent use.
    """
    home = cuda_home or find_cuda_home()
    include, compiler = home / "include", shutil.which(os.environ.get("CXX", "g++"))
    if not (include / "cupti.h").exists():
        return None, f"expected CUPTI's headers, found no {include / 'cupti.h'}"
    if compiler is None:
        return None, "expected a C++ compiler, found no g++ on the PATH: install it or set $CXX"
    digest = hashlib.sha256()
    for part in (*(NATIVE / name for name in SOURCES), include / "cupti_version.h"):
        digest.update(part.read_bytes())
    library = cache / f"launches-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library, ""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / library.name
        command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{include}"]
        command += [str(NATIVE / SOURCES[0]), "-o", str(made), "-ldl"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{compiler} does not run: {error}"
        if done.returncode != 0:
            return None, f"{compiler} refused native/{SOURCES[0]}: {done.stderr[-1000:]}"
        made.chmod(0o755)
        os.replace(made, library)
    return library, ""


def find_cuda_home() -> Path:
    """The folder whose `include` has CUPTI's headers: the toolkit's, or that of torch's wheels.

    /usr/local/cuda when there is none.
    """
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc is not None:
        homes += [str(path.parent.parent) for path in (Path(nvcc), Path(nvcc).resolve())]
    homes += [CUDA_HOME, *_wheels()]
    found = (Path(home) for home in homes if home)
    return next((home for home in found if (home / "include/cupti.h").exists()), Path(CUDA_HOME))


def _wheels() -> list[str]:
    """The folders of NVIDIA's wheels, such as site-packages/nvidia/cu13."""
    package = importlib.util.find_spec("nvidia")
    roots = package.submodule_search_locations if package else None
    return [str(path) for root in roots or () for path in sorted(Path(root).glob("*"))]


class Launches:
    """The watcher in this process. There is one a process, and it stays."""

    def __init__(self, native: Path, cuda_home: Path | None = None) -> None:
        self._cuda_home = cuda_home or find_cuda_home()
        self._library = ctypes.CDLL(str(native))
        self._library.launches_end.restype = ctypes.c_long
        self._library.launches_read.restype = ctypes.c_long
        self._library.launches_read.argtypes = [ctypes.c_char_p, ctypes.c_long]

    def start(self) -> None:
        """Watch from now on. Raises AttributionError. Modules loaded earlier are foreign."""
        candidates = "\n".join(_cupti_candidates(self._cuda_home))
        if self._library.launches_start(candidates.encode()) != 0:
            problems = self._read()["problems"]
            raise AttributionError(f"launches cannot be watched: {'; '.join(problems)}")

    def own(self, path: Path) -> None:
        """A library of the solution's, before it is loaded. Raises AttributionError."""
        if self._library.launches_own(str(path).encode()) != 0:
            raise AttributionError(f"cannot read {path}")

    def begin(self) -> None:
        """Wait for the device and record from here."""
        self._library.launches_begin()

    def end(self) -> LaunchReport:
        """Wait for the device; what ran since `begin`."""
        return report_of(self._read())

    def control(self, device: str = "cuda") -> bool:
        """Whether a kernel that is not the solution's is seen as such."""
        import torch  # here, so that building and reading reports does without

        value = torch.ones(8, device=device)
        self.begin()
        value.mul_(2.0)
        return any(use.records for use in self.end().of(own=False))

    def _read(self) -> dict[str, Any]:
        size = self._library.launches_end()
        buffer = ctypes.create_string_buffer(size)
        if self._library.launches_read(buffer, size) != size:
            raise AttributionError("the report changed while it was read")
        return json.loads(buffer.raw)


def report_of(raw: dict[str, Any]) -> LaunchReport:
    """The native report in our words."""
    problems = [str(problem) for problem in raw["problems"]]
    if raw["dropped"]:
        problems.append(f"CUPTI dropped {raw['dropped']} records")
    return LaunchReport(
        kernels=tuple(
            KernelUse(
                name=item["name"],
                own=bool(item["own"]),
                records=item["records"],
                device_ms=item["ns"] / 1e6,
            )
            for item in raw["kernels"]
        ),
        copy_ms=raw["copy_ns"] / 1e6,
        busy_ms=raw["busy_ns"] / 1e6,
        copies=raw["copies"],
        dropped=raw["dropped"],
        own_modules=raw["own_modules"],
        foreign_modules=raw["foreign_modules"],
        problems=tuple(problems),
    )


def _cupti_candidates(cuda_home: Path) -> list[str]:
    """Where libcupti may be; what the process has loaded already is preferred by the watcher."""
    paths = ["libcupti.so.13", "libcupti.so.12"]
    for home in (*_wheels(), str(cuda_home), CUDA_HOME):
        for folder in ("lib", "lib64", "extras/CUPTI/lib64"):
            paths += map(str, sorted((Path(home) / folder).glob("libcupti.so.1?")))
    return paths
