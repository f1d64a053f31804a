"""Kernels that others published through our verifier: claimed speedups against measured ones.

    python -m benchmarks.published --suite=cuda_l1 --peer_dir=DIR --target=cuda --workers=12 \\
        --seconds=450 --json=FILE
    python -m benchmarks.published --suite=cuda_l1 --peer_dir=DIR --target=cuda --also=FILE \\
        --json=FILE2
    python -m benchmarks.published --review=REVIEW.json --json=FILE

A suite is read from a copy of its repository that the user names; nothing of its text is kept.
`--problems_dir` takes the problems of another version of KernelBench than the suite's own. The
JSON is written after every row. `--also` takes over the rows of earlier files, and only what they
do not decide is judged; with `--again=unmeasured,reference_error` what ended so is judged again.
`--review` reads a file made by hand, {name: {"class", "note"}}, and counts what became of the
kernels that were not accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.peer_verifiers import PeerError, gpu
from benchmarks.published import (
    cuda_l1,
    kernelbench,
    kernelbench_runs,
    kernelsseum,
    pygpubench,
    sol_execbench,
)
from benchmarks.published.pairs import with_problems_of
from benchmarks.published.records import Published, PublishedError, Suite, copy_of, digest
from benchmarks.published.running import Plan, answers
from benchmarks.published.table import RETRIED, STATUSES, Row, row_of, table
from schemas.records import Precision, Target
from training_export.run_record import git_commit, version_of
from verification.machine import MachineSettings

ROOT = Path(__file__).resolve().parents[2]
SUITES: dict[str, Suite] = {
    "cuda_l1": cuda_l1.SUITE,
    "kernelbench": kernelbench.SUITE,
    "kernelbench_runs": kernelbench_runs.SUITE,
    "kernelsseum": kernelsseum.SUITE,
    "pygpubench": pygpubench.SUITE,
    "sol_execbench": sol_execbench.SUITE,
}
CLASSES = (
    "not_own_work", "wrong", "timing_trick", "cannot_build", "problem_refused", "wrongly_refused",
)  # fmt: skip
PACKAGES = ("torch", "triton", "ninja")
LIBRARIES = {"cublas", "cudnn", "torch"}


def main(argv: list[str]) -> int:
    options = _options(argv)
    try:
        if options.review:
            print(_reviewed(options.review, options.json))
            return 0
        published, earlier = _chosen(options)
        record = _record(argv, options, published)
    except (PublishedError, PeerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record["rows"] += earlier
    decided = {row["name"] for row in earlier}
    for made in published:
        if made.why_not and made.name not in decided:
            record["rows"].append(row_of(options.suite, made, {}))
            decided.add(made.name)
    _run(options, [made for made in published if made.name not in decided], record)
    _write(options.json, record)
    print(table(record["rows"]))
    missing = len(published) - len({row["name"] for row in record["rows"]})
    if missing:
        print(f"\n{missing} not judged for lack of time; --also={options.json or 'FILE'} goes on")
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    add = parser.add_argument
    add("--suite", choices=list(SUITES), help="whose kernels")
    add("--peer_dir", help="a copy of the suite's repository")
    add("--problems_dir", help="a copy of KernelBench to take the problems from, by their numbers")
    add("--target", choices=[str(t) for t in Target], default="cuda")
    add("--device", default="cuda:0")
    add("--effort", choices=("reward", "publish"), default="reward")
    add("--precision", choices=[str(p) for p in Precision], help="default: what the problem is in")
    add(
        "--libraries",
        default="",
        help="allowed beside what a problem needs, separated by commas, such as torch",
    )
    add("--num", type=int, default=None, help="the first so many; default: all")
    add("--only", default="", help="names, or how they begin, separated by semicolons")
    add("--workers", type=int, default=12, help="processes that judge")
    add("--seconds", type=float, default=540.0, help="after which no verdict is begun")
    add("--store", help="a folder for verdicts and builds; default: a temporary one")
    add("--memory_limit_gib", type=float, default=16.0, help="resident memory of a process")
    add("--device_memory_gib", type=float, default=16.0, help="GPU memory of a process")
    add("--problem_timeout_s", type=float, default=60.0, help="longest single step")
    add("--also", default="", help="JSON files of earlier runs, separated by commas")
    add("--again", default="", help="statuses of theirs to judge again, separated by commas")
    add("--json", help="where everything goes")
    add("--review", help="what reading by hand came to; then nothing is run, --json is read")
    options = parser.parse_args(argv)
    missing = ("json",) if options.review else ("suite", "peer_dir")
    for name in missing:
        if getattr(options, name) is None:
            parser.error(f"expected --{name}=…, got none")
    options.libraries = tuple(part for part in options.libraries.split(",") if part)
    if unknown := set(options.libraries) - LIBRARIES:
        parser.error(f"expected --libraries of {sorted(LIBRARIES)}, got {sorted(unknown)}")
    options.again = tuple(part.strip() for part in options.again.split(",") if part.strip())
    if unknown := set(options.again) - set(STATUSES):
        parser.error(f"expected --again of {', '.join(STATUSES)}, got {', '.join(sorted(unknown))}")
    if options.again and not options.also:
        parser.error("expected --also=… with --again, got none")
    for name in ("workers", "num"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"expected --{name} of at least 1, got {given}")
    return options


def _chosen(options: argparse.Namespace) -> tuple[list[Published], list[Row]]:
    """What is to be judged, and the rows of it that earlier files have. Raises PublishedError."""
    suite = SUITES[options.suite]
    found = list(suite.read(copy_of(suite, options.peer_dir), Target(options.target)))
    if options.only:
        starts = tuple(part.strip() for part in options.only.split(";") if part.strip())
        found = [made for made in found if made.name.startswith(starts)]
    # One problem and policy after the other: what is open stays open.
    found = sorted(found[: options.num], key=lambda made: bool(made.off))
    if options.problems_dir:
        found = with_problems_of(options.problems_dir, found)
    if not found:
        raise PublishedError(f"expected kernels in {options.peer_dir!r}, found none that is asked")
    if options.precision:
        found = [replace(made, precision=Precision(options.precision)) for made in found]
    if options.libraries:
        found = [
            replace(made, libraries=tuple(sorted({*made.libraries, *options.libraries})))
            for made in found
        ]
    files = [part for part in options.also.split(",") if part]
    earlier = [row for file in files for row in _earlier(file, options.suite)]
    rows = {row["name"]: row for row in earlier if row["status"] not in RETRIED}
    kept = {name: row for name, row in rows.items() if row["status"] not in options.again}
    return found, [kept[made.name] for made in found if made.name in kept]


def _earlier(file: str, suite: str | None) -> list[Row]:
    """The rows of a file. Raises PublishedError."""
    try:
        rows = json.loads(Path(file).read_text())["rows"]
        return [row for row in rows if row["status"] and suite in (None, row["suite"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublishedError(
            f"{file}: expected a JSON file of an earlier run, got {error!r}"
        ) from error


def _record(
    argv: list[str], options: argparse.Namespace, published: Sequence[Published]
) -> dict[str, Any]:
    """Raises PeerError without a GPU where one is asked for, PublishedError for --json."""
    if options.json and not Path(options.json).resolve().parent.is_dir():
        raise PublishedError(f"expected --json in a folder that exists, got {options.json!r}")
    return {
        "command": ["python", "-m", "benchmarks.published", *argv],
        "commit": git_commit(str(ROOT)),
        "suite": options.suite,
        "url": SUITES[options.suite].url,
        "content": digest(published),
        "chosen": len(published),
        "device": asdict(gpu()) if options.target == "cuda" else None,
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "packages": {name: version_of(name) for name in PACKAGES},
        "rows": [],
    }


def _run(options: argparse.Namespace, left: list[Published], record: dict[str, Any]) -> None:
    if not left:
        return
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        root = Path(options.store or folder)
        target = Target(options.target)
        settings = MachineSettings(
            target=target,
            device="cpu" if target is Target.CPU else options.device,
            store=str(root / "store"),
            cache=str(root / "cache"),
            memory_limit_gib=options.memory_limit_gib,
            device_memory_gib=options.device_memory_gib,
            problem_timeout_s=options.problem_timeout_s,
        )
        plan = Plan(
            settings=settings,
            effort=options.effort,
            workers=options.workers,
            seconds=options.seconds,
            accept_problem=SUITES[options.suite].accept_problem,
        )
        with tqdm(total=len(left), unit="kernel", smoothing=0) as bar:
            for made, answer in answers(plan, left, record.update):
                row = row_of(options.suite, made, answer)
                record["rows"].append(row)
                _write(options.json, record)
                bar.set_postfix_str(f"{made.name} {row['status']}")
                bar.update()


def _write(file: str | None, record: dict[str, Any]) -> None:
    """All of it or what was there: a run may be killed at any time."""
    if file:
        beside = Path(f"{file}.new")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(file)


def _reviewed(review: str, file: str) -> str:
    """The table of a finished file with what was read by hand. Raises PublishedError."""
    rows = _earlier(file, None)
    try:
        reviews = json.loads(Path(review).read_text())
        wrong = [name for name, said in reviews.items() if said["class"] not in CLASSES]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublishedError(
            f'{review}: expected {{name: {{"class": …, "note": …}}}}, got {error!r}'
        ) from error
    unknown = sorted(set(reviews) - {row["name"] for row in rows})
    if wrong or unknown:
        raise PublishedError(
            f"{review}: expected classes of {', '.join(CLASSES)} for names of {file}, got "
            + "; ".join([*(f"{n}: {reviews[n]['class']!r}" for n in wrong), *unknown])
        )
    return table(rows, reviews)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
