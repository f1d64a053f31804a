"""One device and everything needed to measure on it: leases, warm parent, caches, limits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from runtime.lease import DeviceLease, physical_name
from runtime.sandbox import Limits, ParentGone, Worker, Zygote
from runtime.store import Store
from runtime.view import WORK
from schemas.codec import content_key, from_json
from schemas.records import Environment, Isolation, Solution, Target
from verification.building.built import Built, assemble
from verification.building.toolchain import Toolchain, toolchain
from verification.device_state import DeviceWatch
from verification.gpu import IN_A_WORKER, device_files, find_gpu
from verification.room import PAUSES_S
from verification.workers.attribution import build_launches

WORKERS = (
    "verification.workers.reference_worker",
    "verification.workers.solution_worker",
    "runtime.command",
)
SHM = Path("/dev/shm")
SHM_BYTES_NEEDED = 16 << 30
DYING_S = 5.0
AHEAD = 8
"""Builds ahead that nobody has fetched yet; older ones are forgotten here, and in the cache."""
ADDRESSES_GIB = 8.0
"""Address space beyond the memory a process may use: libraries, thread stacks."""
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc keeps freed blocks instead of handing them back to the system, for every side alike. By
default a CPU baseline pays for fresh pages on every call: 4.5 ms instead of 0.9 ms for two
pointwise operators over 16 MiB, which no solution could lose to, and most of the noise."""


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """What a run says about its machine."""

    target: Target
    device: str
    """"cpu", or "cuda:0" and so on among the GPUs that this process is shown; see
    `verification.gpu`."""
    store: str
    """Where finished work is kept."""
    cache: str
    """A local folder for built libraries and compiled baselines."""
    memory_limit_gib: float = 8.0
    """Resident memory of a worker."""
    device_memory_gib: float = 16.0
    """GPU memory of a worker."""
    problem_timeout_s: float = 60.0
    """Longest single step of a problem or a solution."""
    lease_log: str | None = None
    """A file that records how long the device was leased."""
    zygote: str | None = None
    """The address of a warm parent to share; without one the machine starts its own."""


class Machine:
    """A device with its tools. Start-up of the warm parent is lazy; `close` ends every worker."""

    def __init__(self, settings: MachineSettings) -> None:
        self.settings = settings
        self.target = settings.target
        self.device = settings.device
        self.timeout_s = settings.problem_timeout_s
        self.num_threads = len(os.sched_getaffinity(0)) if self.target is Target.CPU else 1
        self._gpu = find_gpu(settings.device)
        self.lease = DeviceLease(physical_name(settings.device), log=settings.lease_log)
        self.device_watch = DeviceWatch(self._gpu)
        self.store = Store(settings.store)
        self.cache = Path(settings.cache)
        self.builds = self.cache / "builds"
        self.builds.mkdir(parents=True, exist_ok=True)
        space = settings.memory_limit_gib + ADDRESSES_GIB if self.target is Target.CPU else None
        self.limits = Limits(memory_gib=settings.memory_limit_gib, address_space_gib=space)
        # On a CPU each process has a limit of its own, and whoever reaches it does so again.
        self.room_pauses_s = () if self.target is Target.CPU else PAUSES_S
        self._scratch_root = _scratch_root()
        self._ahead: dict[str, concurrent.futures.Future[Built]] = {}
        self._builder = concurrent.futures.ThreadPoolExecutor(1)
        self._replacing = threading.Lock()
        self._zygote: Zygote | None = None
        self._public: Path | None = None

    @functools.cached_property
    def _probed(self) -> dict[str, Any]:
        """What a worker sees; the first thing asked of the warm parent."""
        _ = self.zygote  # before the lease, which it may need itself
        with self.lease.opening():
            return self._probe("environment")

    def _probe(self, method: str) -> dict[str, Any]:
        worker = self.spawn("verification.workers.probe:handlers", "solution")
        try:
            return worker.call(method, self.timeout_s)
        finally:
            worker.close()

    @functools.cached_property
    def environment(self) -> Environment:
        found = from_json(Environment, self._probed["environment"])
        return replace(found, compiler=self.toolchain.version)

    @functools.cached_property
    def isolation(self) -> Isolation:
        return from_json(Isolation, self._probed["isolation"])

    @functools.cached_property
    def toolchain(self) -> Toolchain:
        return toolchain(self.target, self._probed["capability"])

    @functools.cached_property
    def launches(self) -> str:
        """The library that attributes launches in a solution's process; "" where there is none."""
        if self.target is Target.CPU:
            return ""
        library, _ = build_launches(self.cache / "native")
        return self.publish({"launches": library})["launches"] if library else ""

    @functools.cached_property
    def rates(self) -> dict[str, float]:
        """Copy and matrix rates of this device, measured once and kept in the store."""
        key = content_key("rates", self.environment)
        found = self.store.get("rates", key)
        if found is None:
            with self.lease.exclusive():
                found = self.store.get("rates", key)
                if found is None:
                    found = self._probe("rates")
                    self.store.put("rates", key, found)
        return found

    def recall(self, kind: str, key: str) -> Any | None:
        """Finished work from the store: what holds under any limits, else what holds under ours."""
        found = self.store.get(kind, key)
        return found if found is not None else self.store.get(kind, self._under_limits(key))

    def remember(self, kind: str, key: str, value: Any, limited: bool) -> None:
        """Keep finished work. `limited`: it ended at a time or memory limit, and another limit may
        end it otherwise."""
        self.store.put(kind, self._under_limits(key) if limited else key, value)

    def _under_limits(self, key: str) -> str:
        limits = self.settings
        return content_key(key, limits.memory_limit_gib, limits.device_memory_gib, self.timeout_s)

    def ask(self, worker: Worker, method: str, steps: int = 1, **params: Any) -> Any:
        """Call a worker that uses the device: shared with others, for this one call.

        Whoever waits to time waits for the longest such call, and everybody else for it. `steps`:
        how many steps' worth of time it may take.
        """
        with self.lease.shared():
            return worker.call(method, steps * self.timeout_s, **params)

    def compile(self, reference: Worker) -> bool:
        """Have a reference worker compile its baseline; whether all of it came from the cache."""
        with self.building():
            return bool(reference.call("compile", 2 * self.timeout_s)["cached"])

    def open(self, worker: Worker) -> dict[str, Any]:
        """Have a fresh worker open the device, before anything foreign is loaded."""
        with self.lease.opening():
            return worker.call("open", self.timeout_s)

    def end(self, worker: Worker) -> None:
        """Kill a worker; its memory goes back while nobody is timed."""
        with self.lease.shared():
            worker.close(wait_s=DYING_S)

    def build(
        self, solution: Solution, allowed: Collection[str] = (), inputs_code: str = ""
    ) -> Built:
        """The solution's libraries, within three steps' worth of time; see `building.built` for
        `inputs_code`. Raises BuildError."""
        under_way = self._ahead.pop(solution.solution_id, None)
        if under_way is not None:
            concurrent.futures.wait([under_way])
        return assemble(self, solution, allowed, inputs_code)

    def build_ahead(
        self, solution: Solution, allowed: Collection[str] = (), inputs_code: str = ""
    ) -> None:
        """Start building what `build` will be asked for, beside whatever else goes on.

        How it ends is for `build` to say. On a CPU nothing is done, since it would be beside a
        timing there.
        """
        if self.target is Target.CPU or solution.solution_id in self._ahead:
            return
        _ = self.toolchain, self.zygote, self._public_folder()  # which two threads must not make
        started = self._builder.submit(assemble, self, solution, allowed, inputs_code)
        self._ahead[solution.solution_id] = started
        while len(self._ahead) > AHEAD:
            del self._ahead[next(iter(self._ahead))]

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Around work for the CPU: where the CPU is the device, it must not disturb a timing."""
        with self.lease.shared() if self.target is Target.CPU else contextlib.nullcontext():
            yield

    @property
    def zygote(self) -> Zygote:
        if self._zygote is None:
            shared = self.settings.zygote
            if shared is not None:
                self._zygote = Zygote.connect(shared)
            else:
                with self.building():
                    self._zygote = start_zygote(self.cache, self.target)
        return self._zygote

    def config(self, environment: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        """What every worker is told. It is shown one GPU, whatever that is called here.

        `environment`: variables beside those of every worker, or in their place.
        """
        gpu = self._gpu
        return {
            "target": str(self.target),
            "device": IN_A_WORKER if gpu else self.device,
            "environment": {**(gpu.environment if gpu else {}), **(environment or {})},
            "view_shut": list(gpu.others(device_files())) if gpu else [],
            "num_threads": self.num_threads,
            "device_memory_gib": self.settings.device_memory_gib,
            **more,
        }

    def spawn(self, entry: str, role: str, limits: Limits | None = None, **config: Any) -> Worker:
        """Fork a worker; from a new parent of our own when the warm one was killed, which costs the
        work that was under way and no more.

        A solution or a builder sees neither store nor cache, opens no other GPU, and of our
        temporary folders sees those in `config`: `scratch` (to be read, with a folder `work` of its
        own), `mail` (files to be filled), `view_read` (the public libraries, unless it says
        otherwise) and `view_write`.
        """
        settings = self.settings
        told = {
            "view_hide": [os.path.abspath(path) for path in (settings.store, settings.cache)],
            "view_read": [str(self._public_folder())],
            **self.config(**config),
        }
        if limits is None:
            mail = config.get("mail") if role == "solution" else None
            limits = self._limits_beside(mail) if mail else self.limits
        parent = self.zygote
        try:
            return parent.spawn(entry, told, limits, role)
        except ParentGone:
            with self._replacing:  # a build ahead may notice it too
                if self._zygote is parent:
                    parent.close()
                    self._zygote = start_zygote(self.cache, self.target)
            return self.zygote.spawn(entry, told, limits, role)

    def _limits_beside(self, mail: str) -> Limits:
        """Ours, with files no larger than twice the largest in the mail, or a gigabyte: a mail
        folder is in memory, and whoever may fill its files could fill that."""
        largest = max((file.stat().st_size for file in Path(mail).iterdir()), default=0)
        return replace(self.limits, file_gib=min(self.limits.file_gib, 1 + 2 * largest / 2**30))

    @contextlib.contextmanager
    def scratch(self, work: bool = True) -> Iterator[Path]:
        """A folder for one solution, gone afterwards: whoever runs it reads what is there, and
        writes in the folder `work` in it, if there is to be one."""
        folder = Path(tempfile.mkdtemp(prefix=f"ops6k-{os.getpid()}-", dir=self._scratch_root))
        try:
            folder.chmod(0o755)
            if work:
                (folder / WORK).mkdir()
                (folder / WORK).chmod(0o777)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, libraries: dict[str, Path]) -> dict[str, str]:
        """Built libraries where an unprivileged user can load them, by name.

        Our cache may lie in a home folder that is closed to others, and memory folders are often
        mounted without the right to execute.
        """
        folder = self._public_folder()
        published = {}
        for name, library in libraries.items():
            content = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
            copy = folder / f"{content}.so"
            if not copy.exists():
                shutil.copy(library, copy)
                copy.chmod(0o755)
            published[name] = str(copy)
        return published

    def _public_folder(self) -> Path:
        """Made before the first worker, which sees it from then on or never."""
        if self._public is None:
            self._public = Path(tempfile.mkdtemp(prefix=f"ops6k-{os.getpid()}-"))
            self._public.chmod(0o755)
        return self._public

    def close(self) -> None:
        self._builder.shutdown(cancel_futures=True)
        if self._public is not None:
            shutil.rmtree(self._public, ignore_errors=True)
            self._public = None
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


def start_zygote(cache: Path, target: Target) -> Zygote:
    """A warm parent for the workers of any number of machines with the same cache and target.

    On a GPU it only imports: torch's compiler asks for devices, even for a CPU kernel, and a CUDA
    runtime that the parent has asked cannot be used by its children.
    """
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "warm"), **ALLOCATOR}
    return Zygote.start(WORKERS, environment, warm=target is Target.CPU)


def _scratch_root() -> str:
    """Memory if there is enough (Docker gives 64 MB by default), else the temporary folder.

    What killed processes left there is removed on the way.
    """
    shm = os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= SHM_BYTES_NEEDED
    temporary = Path(tempfile.gettempdir())
    for root in (SHM, temporary):
        for left in root.glob("ops6k-[0-9]*-*"):
            if not psutil.pid_exists(int(left.name.split("-")[1])):
                shutil.rmtree(left, ignore_errors=True)
    return str(SHM if shm else temporary)
