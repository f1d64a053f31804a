"""Kernels are told apart by the modules that have them. The watcher and the cubins are real, the
driver and CUPTI are fakes that play loads and records; `tests/gpu_launches.py` shows the same on a
GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from verification.building import fatbin
from verification.workers.attribution import (
    AttributionError,
    Launches,
    build_launches,
    find_cuda_home,
    report_of,
)

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = find_cuda_home() / "include"
needs_cupti = pytest.mark.skipif(
    not (INCLUDE / "cupti.h").exists() or shutil.which("nvcc") is None,
    reason="needs CUPTI's headers, and nvcc to make cubins",
)

OWN = """
__global__ void mine(float* y) { y[threadIdx.x] = 1.0f; }
__global__ void shared(float* y) { y[threadIdx.x] = 2.0f; }
extern "C" int run(float* y) { mine<<<1, 32>>>(y); shared<<<1, 32>>>(y); return 0; }
"""
FOREIGN = """
__global__ void theirs(float* y) { y[threadIdx.x] *= 3.0f; }
__global__ void shared(float* y) { y[threadIdx.x] *= 4.0f; }
"""
MINE, THEIRS, SHARED = "_Z4minePf", "_Z6theirsPf", "_Z6sharedPf"

DRIVER = 'extern "C" int cuCtxSynchronize() { return 0; }'
CUPTI = """
#include <cupti.h>
#include <cstring>
#include <string>
#include <vector>
static CUpti_CallbackFunc callback;
static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;
static bool listening[64], recording[256];
static std::vector<std::vector<char>> records;
static size_t lost;
static std::string failing;
static CUptiResult result(const char* name) {
    return failing == name ? CUPTI_ERROR_UNKNOWN : CUPTI_SUCCESS;
}
template <class T> static void add(T record, CUpti_ActivityKind kind, long start, long end) {
    record.kind = kind;
    record.start = start;
    record.end = end;
    auto* bytes = reinterpret_cast<char*>(&record);
    if (recording[kind]) records.emplace_back(bytes, bytes + sizeof record);
}
extern "C" {
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc function, void*) {
    *handle = (CUpti_SubscriberHandle)1;
    callback = function;
    return result("cuptiSubscribe");
}
CUptiResult cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle,
                                CUpti_CallbackDomain domain, CUpti_CallbackId id) {
    if (domain == CUPTI_CB_DOMAIN_RESOURCE) listening[id] = enable;
    return result("cuptiEnableCallback");
}
CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
    *text = "TEXT";
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc r,
                                           CUpti_BuffersCallbackCompleteFunc c) {
    request = r;
    complete = c;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
    recording[kind] = true;
    return result("cuptiActivityEnable");
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
    recording[kind] = false;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t*, size_t, CUpti_Activity** record) {
    static size_t next;
    if (failing == "cuptiActivityGetNextRecord") return CUPTI_ERROR_UNKNOWN;
    if (next < records.size()) {
        *record = (CUpti_Activity*)records[next++].data();
        return CUPTI_SUCCESS;
    }
    next = 0;
    records.clear();
    return CUPTI_ERROR_MAX_LIMIT_REACHED;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* number) {
    *number = lost;
    lost = 0;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityFlushAll(uint32_t) {
    uint8_t* buffer;
    size_t size, most;
    request(&buffer, &size, &most);
    complete(nullptr, 0, buffer, size, records.size());
    return result("cuptiActivityFlushAll");
}

void event(int id, const char* cubin, size_t size) {
    CUpti_ModuleResourceData module{};
    module.pCubin = cubin;
    module.cubinSize = size;
    CUpti_ResourceData data{};
    data.resourceDescriptor = &module;
    if (listening[id]) callback(nullptr, CUPTI_CB_DOMAIN_RESOURCE, id, &data);
}
void load(const char* cubin, size_t size) {
    event(CUPTI_CBID_RESOURCE_MODULE_LOADED, cubin, size);
}
void context() {  // a callback that is nobody's module
    CUpti_ResourceData data{};
    callback(nullptr, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_CONTEXT_CREATED, &data);
}
void ran(const char* name, long start, long end) {
    CUpti_ActivityKernel9 record{};
    record.name = name ? strdup(name) : nullptr;
    add(record, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, start, end);
}
void copied(long start, long end) {
    add(CUpti_ActivityMemcpy5{}, CUPTI_ACTIVITY_KIND_MEMCPY, start, end);
}
void filled(long start, long end) {
    add(CUpti_ActivityMemset4{}, CUPTI_ACTIVITY_KIND_MEMSET, start, end);
}
void lose(size_t number) { lost = number; }
void fail(const char* name) { failing = name; }
}
"""
PLAY = """
import ctypes, json, mmap, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, {root!r})
from verification.workers import attribution
from verification.workers.attribution import AttributionError, Launches
folder = Path({folder!r})
own, foreign = (folder / "own.cubin").read_bytes(), (folder / "foreign.cubin").read_bytes()
play = ctypes.CDLL("libcupti.so.13")
def load(cubin): play.load(cubin, ctypes.c_size_t(len(cubin)))
def ran(name, start, end): play.ran(name, ctypes.c_long(start), ctypes.c_long(end))
def show(): print(json.dumps(asdict(launches.end())))
launches = Launches({native!r})
{body}
"""
STARTED = """
launches.start()
launches.own(folder / "own.so")
"""
MAPPED = """
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
def load_at_the_edge(cubin):  # what is read behind it is a segmentation fault
    size = (len(cubin) + page - 1) // page * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0) == 0
    start = size - len(cubin)
    memory[start:size] = cubin
    play.load(ctypes.c_void_p(address + start), ctypes.c_size_t(len(cubin)))
"""


def _compile(folder: Path, name: str, text: str) -> None:
    command = ["g++", "-x", "c++", "-fPIC", "-shared", f"-I{INCLUDE}", "-", f"-Wl,-soname,{name}"]
    subprocess.run([*command, "-o", str(folder / name)], input=text, text=True, check=True)


def _device_code(folder: Path) -> None:
    """own.so as the verifier builds it, the cubin in it, and a cubin that is not."""
    (folder / "own.cu").write_text(OWN)
    (folder / "foreign.cu").write_text(FOREIGN)
    arch = "-gencode=arch=compute_90,code=sm_90"
    for command in (
        ["nvcc", arch, "-O3", "--no-compress", "-Xcompiler=-fPIC", "-c", "own.cu", "-o", "own.o"],
        ["nvcc", "-shared", "--no-device-link", "own.o", "-o", "own.so"],
        ["nvcc", "-arch=sm_90", "-cubin", "foreign.cu", "-o", "foreign.cubin"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    with (folder / "own.so").open("rb") as file:
        section: Any = ELFFile(file).get_section_by_name(fatbin.SECTION)
        data = section.data()
    (image,) = fatbin.images(data)
    (folder / "own.cubin").write_bytes(data[image.offset : image.offset + image.size])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stage")
    _device_code(folder)
    _compile(folder, "libcuda.so.1", DRIVER)
    _compile(folder, "libcupti.so.13", CUPTI)
    native, reason = build_launches(folder / "cache")
    assert native is not None, reason
    return {"folder": str(folder), "native": str(native), "root": str(ROOT)}


def _run(stage: dict[str, Any], body: str, *first: str) -> subprocess.CompletedProcess[str]:
    """Play `body` in a process that finds libraries in the folders `first`, then in the stage."""
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join((*first, stage["folder"]))}
    command = [sys.executable, "-c", PLAY.format(body=body, **stage)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _play(stage: dict[str, Any], body: str) -> list[dict[str, Any]]:
    """The reports that `body` shows."""
    done = _run(stage, STARTED + body)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _uses(report: dict[str, Any]) -> dict[str, tuple[bool, int, float]]:
    return {
        use["name"]: (use["own"], use["records"], use["device_ms"]) for use in report["kernels"]
    }


@needs_cupti
def test_kernels_are_told_apart_by_the_module_that_has_them(stage: dict[str, Any]) -> None:
    (report,) = _play(
        stage,
        """
play.context()
load(own); load(b"")
load(foreign.replace(b"shared", b"common"))
launches.begin()
ran(b"_Z4minePf", 1_000_000, 3_000_000); ran(b"_Z4minePf", 4_000_000, 5_000_000)
ran(b"_Z6theirsPf", 5_000_000, 5_500_000)
ran(b"never loaded", 5_500_000, 5_600_000); ran(None, 5_600_000, 5_700_000)
play.copied(ctypes.c_long(6_000_000), ctypes.c_long(6_500_000))
play.filled(ctypes.c_long(6_500_000), ctypes.c_long(7_000_000))
show()
""",
    )
    assert _uses(report) == {
        MINE: (True, 2, 3.0),
        THEIRS: (False, 1, 0.5),
        "never loaded": (False, 1, 0.1),
        "?": (False, 1, 0.1),
    }
    assert (report["copies"], report["copy_ms"], report["busy_ms"]) == (2, 1.0, 4.7)
    assert (report["own_modules"], report["foreign_modules"], report["dropped"]) == (1, 2, 0)
    assert report["problems"] == ["1 modules are no cubins"]


@needs_cupti
@pytest.mark.parametrize("order", ["load(own); load(foreign)", "load(foreign); load(own)"])
def test_a_name_that_a_foreign_module_has_too_is_nobodys_own(
    stage: dict[str, Any], order: str
) -> None:
    """Or a solution could call a kernel of a library by launching one of its own with its name."""
    names = "ran(b'_Z6sharedPf', 1, 1_000_001); ran(b'_Z4minePf', 1, 1_000_001); show()"
    alone, both = _play(
        stage, f"load(own); launches.begin(); {names}; {order}; launches.begin(); {names}"
    )
    assert _uses(alone) == {SHARED: (True, 1, 1.0), MINE: (True, 1, 1.0)}
    assert _uses(both) == {SHARED: (False, 1, 1.0), MINE: (True, 1, 1.0)}
    assert both["problems"] == []


@needs_cupti
def test_own_is_what_lies_in_the_library_to_the_byte(stage: dict[str, Any]) -> None:
    (report,) = _play(
        stage,
        """
changed = bytearray(own); changed[-1] ^= 1
load(bytes(changed))
launches.begin(); ran(b"_Z4minePf", 1, 2); show()
""",
    )
    assert (report["own_modules"], report["foreign_modules"]) == (0, 1)
    assert not any(use["own"] for use in report["kernels"])


@needs_cupti
def test_modules_loaded_before_the_library_is_named_are_foreign(stage: dict[str, Any]) -> None:
    done = _run(
        stage,
        "launches.start(); load(own); launches.own(folder / 'own.so')\n"
        "launches.begin(); ran(b'_Z4minePf', 1, 2); show()",
    )
    report = json.loads(done.stdout)
    assert (report["own_modules"], report["foreign_modules"]) == (0, 1)
    assert _uses(report)[MINE][0] is False


@needs_cupti
def test_only_what_runs_between_begin_and_end_counts(stage: dict[str, Any]) -> None:
    first, second, third = _play(
        stage,
        """
load(own)
ran(b"_Z4minePf", 1, 2)
launches.begin(); ran(b"_Z4minePf", 10, 20); show()
ran(b"_Z4minePf", 30, 40)
launches.begin(); show()
launches.begin(); ran(b"_Z6sharedPf", 50, 60); show()
""",
    )
    assert [_uses(report).keys() for report in (first, second, third)] == [{MINE}, set(), {SHARED}]
    assert (first["busy_ms"], second["busy_ms"]) == (1e-5, 0.0)


@needs_cupti
def test_what_runs_at_once_counts_once_and_gaps_do_not(stage: dict[str, Any]) -> None:
    (report,) = _play(
        stage,
        """
launches.begin()
ran(b"b", 8_000_000, 9_000_000)   # records come in any order
ran(b"a", 1_000_000, 5_000_000); ran(b"a", 2_000_000, 3_000_000)
play.copied(ctypes.c_long(4_000_000), ctypes.c_long(6_000_000))
ran(b"none", 0, 0)
show()
""",
    )
    assert (report["busy_ms"], report["copy_ms"]) == (6.0, 2.0)
    assert _uses(report)["a"] == (False, 2, 5.0)


@needs_cupti
def test_modules_that_cannot_be_read_are_counted_and_harm_nothing(stage: dict[str, Any]) -> None:
    """Cut short anywhere, or with numbers that lead out of them, even past the end of memory."""
    (report,) = _play(
        stage,
        MAPPED
        + """
import struct
def put(offset, form, value):
    made = bytearray(foreign)
    struct.pack_into(form, made, offset, value)
    return bytes(made)
table, = struct.unpack_from("<Q", foreign, 0x28)
count, text = struct.unpack_from("<HH", foreign, 0x3C)
names = table + 64 * text
broken = [foreign[:size] for size in (1, 3, 4, 16, 63, 64, 100, len(foreign) // 2, table + 1)]
broken += [put(0x28, "<Q", 2**64 - 64), put(0x28, "<Q", 2**63), put(0x3E, "<H", 0xFFFF)]
broken += [put(names + 0x18, "<Q", 2**64 - 1), put(names + 0x20, "<Q", 2**64 - 1)]
broken += [put(table + 64, "<I", 2**32 - 1)]
for cubin in broken: load_at_the_edge(cubin)
play.load(None, ctypes.c_size_t(4096))
# The last name has no end: what lies behind it is not to be read.
last = put(names + 0x18, "<Q", len(foreign) - 6)
last = bytearray(last); struct.pack_into("<Q", last, names + 0x20, 6); last[-6:] = b".text."
for index in range(count): struct.pack_into("<I", last, table + 64 * index, 0)
load_at_the_edge(bytes(last))
load(own)
launches.begin(); ran(b"_Z4minePf", 1, 2); show()
""",
    )
    assert _uses(report)[MINE][0] is True
    assert (report["own_modules"], report["foreign_modules"]) == (1, 17)
    assert report["problems"] == ["16 modules are no cubins"]


@needs_cupti
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("play.lose(3)", "CUPTI dropped 3 records"),
        ("play.fail(b'cuptiActivityFlushAll')", "cuptiActivityFlushAll: TEXT (999)"),
        ("play.fail(b'cuptiActivityGetNextRecord')", "cuptiActivityGetNextRecord: TEXT (999)"),
    ],
)
def test_what_is_incomplete_is_a_problem(stage: dict[str, Any], spoil: str, told: str) -> None:
    body = f"load(own); launches.begin(); ran(b'_Z4minePf', 1, 2); {spoil}; show()"
    (report,) = _play(stage, body)
    assert told in report["problems"]
    assert report["dropped"] == (3 if "lose" in spoil else 0)


@needs_cupti
def test_recording_that_cannot_be_switched_on_is_a_problem(stage: dict[str, Any]) -> None:
    (report,) = _play(stage, "play.fail(b'cuptiActivityEnable'); launches.begin(); show()")
    assert report["problems"] == ["cuptiActivityEnable: TEXT (999)"] * 3


@needs_cupti
@pytest.mark.parametrize("call", ["cuptiSubscribe", "cuptiEnableCallback"])
def test_it_says_why_it_cannot_watch(stage: dict[str, Any], call: str) -> None:
    done = _run(stage, f"play.fail({call.encode()!r}); launches.start()")
    assert f"launches cannot be watched: {call}: TEXT (999)" in done.stderr


@needs_cupti
def test_a_libcupti_without_a_function_is_none(stage: dict[str, Any], tmp_path: Path) -> None:
    old = CUPTI.replace("cuptiActivityGetNumDroppedRecords", "cuptiSomethingElse")
    _compile(tmp_path, "libcupti.so.13", old)
    done = _run(stage, "launches.start()", str(tmp_path))
    assert "no function cuptiActivityGetNumDroppedRecords" in done.stderr


@needs_cupti
def test_without_libcupti_it_says_so(stage: dict[str, Any]) -> None:
    done = _run(
        stage,
        "attribution._cupti_candidates = lambda home: ['/nowhere/libcupti.so.13']\n"
        "launches.start()",
    )
    assert done.returncode == 1, done
    assert "cannot open: /nowhere/libcupti.so.13" in done.stderr


@needs_cupti
def test_without_a_driver_it_says_so(stage: dict[str, Any]) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver")
    with pytest.raises(AttributionError, match=r"libcuda\.so\.1"):
        Launches(Path(stage["native"])).start()


@needs_cupti
@pytest.mark.parametrize("path", ["nowhere.so", "."])
def test_a_library_that_cannot_be_read_is_an_error(stage: dict[str, Any], path: str) -> None:
    with pytest.raises(AttributionError, match="cannot read"):
        Launches(Path(stage["native"])).own(Path(stage["folder"]) / path)


STREAMS = ("ios_base", "basic_ios", "basic_ostream", "basic_istream", "streambuf", "std::locale")


@needs_cupti
@pytest.mark.parametrize("link", ["", "-static-libstdc++"])
def test_the_watcher_has_nothing_of_iostreams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """Locales of a libstdc++ of its own crashed beside the one that torch loads."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {link}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    native, reason = build_launches(tmp_path / "cache")
    if native is None and link:
        pytest.skip(f"g++ has no libstdc++ to link statically: {reason[-200:]}")
    assert native is not None, reason
    listed = subprocess.run(["nm", "-C", str(native)], capture_output=True, text=True, check=True)
    assert "std::" in listed.stdout
    assert [line for line in listed.stdout.splitlines() if any(s in line for s in STREAMS)] == []


def test_without_headers_there_is_no_watcher_but_a_reason(tmp_path: Path) -> None:
    native, reason = build_launches(tmp_path / "cache", tmp_path)
    assert native is None
    assert "cupti.h" in reason


def test_a_report_in_our_words() -> None:
    kernel = {"name": "k", "own": 1, "records": 2, "ns": 1500}
    raw = {
        "kernels": [kernel, {**kernel, "name": "f", "own": 0, "records": 1}],
        "busy_ns": 5000, "copy_ns": 250, "copies": 1, "dropped": 4,
        "own_modules": 1, "foreign_modules": 3, "problems": ["broken"],
    }  # fmt: skip
    report = report_of(raw)
    assert [(use.name, use.records) for use in report.of(own=True)] == [("k", 2)]
    assert [use.name for use in report.of(own=False)] == ["f"]
    assert report.kernels[0].device_ms == pytest.approx(0.0015)
    assert (report.busy_ms, report.copy_ms) == (0.005, 0.00025)
    assert (report.own_modules, report.foreign_modules) == (1, 3)
    assert report.problems == ("broken", "CUPTI dropped 4 records")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Own kernels, torch's, graphs, code made at run time, a dead copy, clocks and costs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_launches"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
