"""Hostile problem files and solution folders by seed, and what the verifier says to them.

    python -m tests.fuzz_folders --count=2000 --json=FILE

Each case is an honest pair with one to three things done to it: bytes and lines changed, odd
encodings, statements that end or hang a process, links, pipes, devices, deep, empty and huge
folders. Every case must end in a verdict with a reason, a refusal of its problem with a reason, or
a FolderError of one line; anything else is a failure and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.codec import to_json
from schemas.records import Precision, Problem, Solution, Target
from tests import factories, samples
from verification.folder import FolderError, read_problem, read_solution
from verification.machine import Machine
from verification.service.pool_process import Job
from verification.service.pool_worker import Judges

SMALL = samples.CODE.replace("rows, features = 4099, 1024", "rows, features = 67, 256")
PLAIN = {
    "model_new.py": samples.MODEL_NEW.encode(),
    "kernels/scale_gelu.cpp": samples.KERNEL.encode(),
}
OUTSIDE = "problem.py"
"""A file beside the solution's folder, for links to lead to."""
TIMEOUT_S = 5.0

Bytes = Callable[[random.Random, bytes], bytes]
Folders = Callable[[random.Random, Path], None]


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _letter(rng: random.Random, data: bytes) -> bytes:
    """A change that stays ASCII, so that it gets further than the decoder."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] = rng.randrange(32, 127)
    return bytes(changed)


def _drop_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    del lines[rng.randrange(len(lines))]
    return b"\n".join(lines)


def _double_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    return b"\n".join([*lines[:at], lines[at], *lines[at:]])


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _insert(*texts: bytes) -> Bytes:
    """One of the texts as a line of its own, at the start or anywhere."""

    def change(rng: random.Random, data: bytes) -> bytes:
        lines = data.split(b"\n")
        lines.insert(rng.choice((0, rng.randrange(len(lines) + 1))), rng.choice(texts))
        return b"\n".join(lines)

    return change


BYTES: dict[str, Bytes] = {
    "bytes flipped": _flip,
    "a letter changed": _letter,
    "a line dropped": _drop_line,
    "a line twice": _double_line,
    "lines swapped": _swap_lines,
    "truncated": lambda rng, data: data[: rng.randrange(len(data))],
    "unicode junk": _insert("\u202e\u0000\ufeff\U0001f600".encode(), "\uff49mport os".encode()),
    "another encoding": _insert(b"# -*- coding: utf-7 -*-", b"# \xe9t\xe9", b"x = '\xff\xfe'"),
    "UTF-16": lambda rng, data: data.decode(errors="replace").encode("utf-16"),
    "a BOM": lambda rng, data: b"\xef\xbb\xbf" + data,
    "empty": lambda rng, data: b"",
    "spaces": lambda rng, data: b" \t\n" * 1000,
    "a huge line": _insert(b"x = '" + b"a" * (1 << 20) + b"'"),
    "too large": lambda rng, data: data + b"\n#" * (2 << 20),
    "deep": _insert(b"x = " + b"(" * 5000 + b")" * 5000, b"x = " + b"-" * 90000 + b"1"),
    "a deep chain": _insert(b"x = (1).real" + b".real" * 30000),
    "a large number": _insert(b"x = " + b"9" * 6000, b"x = 9 ** 9 ** 9 if 0 else 1"),
    "noise printed": _insert(b"print('\\x1b[2J' * 100000, flush=True)"),
    "it leaves": _insert(b"import os; os._exit(0)", b"raise SystemExit(0)", b"exit()"),
    "it dies": _insert(b"import ctypes; ctypes.string_at(0)", b"import os; os.abort()"),
    "it raises": _insert(b"raise KeyboardInterrupt", b"1 / 0", b"raise Exception('\\ud800')"),
    "no such module": _insert(b"import no_such_module", b"from . import x"),
    "a forged answer": _insert(
        b"import os\nfor fd in range(3, 40):\n    try: os.write(fd, b'{\"result\": {}}\\n')\n"
        b"    except OSError: pass"
    ),
    "another precision": lambda rng, data: data.replace(b"fp32", rng.choice([b"fp8", b"tf32"])),
}
HANGING: dict[str, Bytes] = {
    "it hangs": _insert(b"while True: pass", b"import time; time.sleep(1e6)"),
}


def _replace(name: str, make: Callable[[Path], Any]) -> Folders:
    """Put something else where `name` was."""

    def change(rng: random.Random, folder: Path) -> None:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return change


def _in_kernels(make: Callable[[Path], Any]) -> Folders:
    def change(rng: random.Random, folder: Path) -> None:
        if (folder / "kernels").is_dir() and not (folder / "kernels").is_symlink():
            make(folder / "kernels")

    return change


def _deep(folder: Path) -> None:
    for index in range(30):
        folder = folder / f"d{index}"
        folder.mkdir()
    (folder / "x.cpp").write_text("int x;")


def _many(folder: Path) -> None:
    for index in range(100):
        (folder / f"f{index}.cpp").write_text("")


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _odd_name(folder: Path) -> None:
    for name in (b"\xff\xfe.cpp", b"a b.cpp", b"$(touch x).cpp", b"n\nl.cpp", b"-o.cpp"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("int x;")


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket has to be short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


FOLDERS: dict[str, Folders] = {
    "model is a link out": _replace(
        "model_new.py", lambda p: p.symlink_to(p.parent.parent / OUTSIDE)
    ),
    "model is a link in": _replace("model_new.py", lambda p: p.symlink_to("kernels/x")),
    "model is a loop": _replace("model_new.py", lambda p: p.symlink_to("model_new.py")),
    "model is a pipe": _replace("model_new.py", os.mkfifo),
    "model is a socket": _replace("model_new.py", _listen),
    "model is a device": _replace("model_new.py", lambda p: p.symlink_to("/dev/zero")),
    "model is a folder": _replace("model_new.py", Path.mkdir),
    "model is huge": _replace("model_new.py", _sparse),
    "no model": _replace("model_new.py", lambda p: None),
    "kernels is a link": _replace("kernels", lambda p: p.symlink_to(p.parent.parent)),
    "kernels is a file": _replace("kernels", lambda p: p.write_text("int x;")),
    "kernels is a pipe": _replace("kernels", os.mkfifo),
    "no kernels": _replace("kernels", lambda p: None),
    "empty kernels": _replace("kernels", Path.mkdir),
    "a link among kernels": _in_kernels(lambda p: (p / "l.cpp").symlink_to(p / "../.." / OUTSIDE)),
    "a pipe among kernels": _in_kernels(lambda p: os.mkfifo(p / "f.h")),
    "a folder like a file": _in_kernels(lambda p: (p / "d.cpp").mkdir()),
    "deep kernels": _in_kernels(_deep),
    "many kernels": _in_kernels(_many),
    "a huge kernel": _in_kernels(lambda p: _sparse(p / "h.cpp")),
    "odd names": _in_kernels(_odd_name),
    "a library of its own": _in_kernels(lambda p: (p / "solution.so").write_bytes(b"\x7fELF")),
    "an object of its own": _in_kernels(lambda p: (p / "scale_gelu.cpp.o").write_bytes(b"\x7fELF")),
    "a build file": _in_kernels(lambda p: (p / "build.ninja").write_text("rule x")),
    "other files": _replace("setup.py", lambda p: p.write_text("raise Exception")),
}
PATHS = ("/dev/zero", "/dev/null", "/", "/no/such/file", "nul\0byte", "x" * 5000, "")


def hostile(seed: int, root: Path, hanging: bool = True) -> tuple[str, str, list[str]]:
    """Write case `seed` below the empty folder `root`: problem, solution, what was done to them."""
    rng = random.Random(seed)
    problem, solution = root / "problem.py", root / "solution"
    (solution / "kernels").mkdir(parents=True)
    problem.write_text(SMALL)
    for name, data in PLAIN.items():
        (solution / name).write_bytes(data)
    changes = {**BYTES, **(HANGING if hanging and rng.random() < 0.1 else {})}
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        what = rng.random()
        if what < 0.3:
            done.append(_change(rng, problem, changes))
        elif what < 0.83:
            done.append(_change(rng, solution / rng.choice(list(PLAIN)), changes))
        elif what < 0.97:
            name = rng.choice(list(FOLDERS))
            FOLDERS[name](rng, solution)
            done.append(name)
        else:
            path = rng.choice(PATHS)
            done.append(f"the path {path[:20]!r}")
            pair = (path, str(solution)) if rng.random() < 0.5 else (str(problem), path)
            return *pair, done
    alone = rng.random() < 0.1
    return str(problem), str(solution / "model_new.py" if alone else solution), done


def _change(rng: random.Random, file: Path, changes: dict[str, Bytes]) -> str:
    """Change a file's bytes, if it still is one of ours: never through a link, never a pipe."""
    name = rng.choice(list(changes))
    links = any(path.is_symlink() for path in (file, file.parent))
    if links or not file.is_file() or file.stat().st_size > 1 << 24:
        return f"{name}, in vain"
    file.write_bytes(changes[name](rng, file.read_bytes() or b"\n"))
    return f"{name} in {file.name}"


def read(problem: str, solution: str) -> tuple[Problem, Solution]:
    """Both as records. Raises FolderError."""
    return (
        read_problem(problem, Target.CPU, Precision.FP32),
        read_solution(solution).solution,
    )


def judge(judges: Judges, problem: str, solution: str) -> str:
    """How a case ended, in a word. Raises AssertionError when that was without a reason."""
    try:
        given, answer = read(problem, solution)
    except FolderError as error:
        assert error.args[0] and "\n" not in error.args[0]
        return "unreadable"
    job = Job(problem=given, solution=answer, effort="reward", accept_problem=False)
    reply = judges.answer(job)
    if "refused" in reply:
        assert len(reply["refused"]) > len("the problem is refused: ")
        return f"problem refused: {reply['reason']}"
    assert "verdict" in reply, reply
    verdict = reply["verdict"]
    assert verdict["reason"] or verdict["status"] == "correct", verdict
    return verdict["status"]


def settings(root: Path) -> Any:
    limits = {"problem_timeout_s": TIMEOUT_S, "memory_limit_gib": 4.0}
    return factories.machine_settings(root, **limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", default=None, help="where the result goes")
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    failures = []
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(settings(Path(folder)))
        judges = Judges(machine)
        for seed in range(options.first, options.first + options.count):
            root = Path(folder) / f"case{seed}"
            problem, solution, done = hostile(seed, root)
            try:
                ends[judge(judges, problem, solution)] += 1
            except Exception:
                failures.append({"seed": seed, "done": done, "trace": traceback.format_exc()})
                print(f"seed {seed}: {done}\n{traceback.format_exc()}", file=sys.stderr)
            shutil.rmtree(root, ignore_errors=True)
            if (seed + 1) % 100 == 0:
                print(f"{seed + 1}: {dict(ends.most_common())}, {len(failures)} failures")
        about = {"environment": machine.environment, "isolation": machine.isolation}
        judges.close()
        machine.close()
    result = {
        "command": f"python -m tests.fuzz_folders --count={options.count} --first={options.first}",
        "seconds": round(time.time() - started, 1),
        "cases": options.count,
        "ends": dict(ends.most_common()),
        "failures": failures,
        **{name: to_json(value) for name, value in about.items()},
    }
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("cases", "seconds", "ends")}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
