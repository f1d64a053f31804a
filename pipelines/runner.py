"""Runs a graph: checks first, then a local multi-process run that survives its workers, or a fleet.

Beam's own `DirectRunner` first tries to download a binary, so here the name means an explicit
`FnApiRunner`. That runner waits forever when a worker process dies, so `restart` starts the same
command again in place; finished work is in the store, so only what was in flight is repeated.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import apache_beam as beam
import grpc
import psutil
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipelines import options, output, summary
from pipelines.options import RunConfig, UsageError
from pipelines.progress import Progress

MAX_RESTARTS = 3
RESTARTS = "OPS6K_RESTARTS"
WATCHDOG_GRACE_S = 3.0
EXIT_FAILED, EXIT_USAGE, EXIT_WORKERS = 1, 2, 70

_restarting = threading.Lock()

Build = Callable[[beam.Pipeline, RunConfig], None]
Around = Callable[[RunConfig], AbstractContextManager[object]]
"""What a local run needs for as long as it lasts."""


def main(argv: list[str], build: Build, around: Around = nullcontext) -> int:
    """The command: exit code 0 when every loss has a reason, 1 when one is a bug of ours or the run
    failed, 2 when nothing was started, 70 when workers kept dying."""
    try:
        config, flags = options.parse(argv)
        _set_up_logging(config.verbose)
        config = resolve(config)
        target = options.Target(config.target)
        resumed = output.check(config, target)
        pipeline = prepare(config, flags)
        print(plan(config, resumed), flush=True)
        if config.dry_run and config.runner != "DataflowRunner":
            return 0  # only Dataflow can build a job without running it
        if not config.dry_run:
            output.claim(config, target)
    except UsageError as error:
        print(f"ops6k: {error}", file=sys.stderr)
        return EXIT_USAGE
    if not config.local:
        return run_on_fleet(config, pipeline, build)
    return run_here(config, pipeline, build, around)


def resolve(config: RunConfig) -> RunConfig:
    """The settings with target and folder decided, checked against this machine."""
    target = options.check_machine(config, config.local and options.gpu_found())
    return dataclasses.replace(
        config,
        target=target.value,
        output=options.absolute(config.output),
        store=options.absolute(config.store_root),
    )


def plan(config: RunConfig, resumed: bool) -> str:
    """What the run is about to do, in two lines."""
    where = f"--num_workers_local={config.num_workers}" if config.local else config.runner
    verb = "continues" if resumed else "starts"
    return (
        f"ops6k {verb}: {config.num_problems} candidates, seed {config.seed}, "
        f"target {config.target}, policy {config.policy}, {where}\n"
        f"  dataset in {config.output}, finished work in {config.store}"
    )


def prepare(config: RunConfig, flags: list[str]) -> beam.Pipeline:
    """An empty pipeline on its runner. Raises UsageError with all that Beam has against its flags.

    Some of Beam's demands depend on the runner, and for Dataflow it also looks at the buckets, so
    only making the pipeline tells.
    """
    beam_options = local_options(config, flags) if config.local else fleet_options(config, flags)
    try:
        pipeline = beam.Pipeline(FnApiRunner() if config.local else None, beam_options)
    except Exception as error:  # a ValueError, or whatever the client of a bucket raises
        raise UsageError(
            f"Beam cannot use {config.runner} with these flags: {' '.join(str(error).split())} "
            "(an option named here is a flag: --NAME=VALUE)"
        ) from error
    os.rmdir(pipeline.local_tempdir)  # for other languages' transforms; only a run would remove it
    return pipeline


def run_here(config: RunConfig, pipeline: beam.Pipeline, build: Build, around: Around) -> int:
    """Run on this machine's cores, restart when a worker process dies, and print the summary."""
    _watch_workers()
    with around(config), Progress(config):
        build(pipeline, config)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:
            # A dead worker may show here first; then `restart` ends this process meanwhile.
            time.sleep(WATCHDOG_GRACE_S)
            print(f"\nops6k: the run failed: {error}", file=sys.stderr)
            print("  finished work is kept: the same command continues", file=sys.stderr)
            return EXIT_FAILED
    return summary.conclude(config)


def local_options(config: RunConfig, flags: list[str]) -> PipelineOptions:
    """One worker runs inside this process, more are processes."""
    mode = "in_memory" if config.num_workers == 1 else "multi_processing"
    return PipelineOptions(
        [
            *flags,
            f"--direct_running_mode={mode}",
            f"--direct_num_workers={config.num_workers}",
            f"--default_sdk_harness_log_level={'INFO' if config.verbose else 'ERROR'}",
        ]
    )


def fleet_options(config: RunConfig, flags: list[str]) -> PipelineOptions:
    """Workers have the packages in their image; a pickled main session would hide a missing one."""
    dry_run = ["--dry_run=True"] if config.dry_run else []
    return PipelineOptions(
        [*flags, *dry_run, f"--runner={config.runner}", "--no_save_main_session"]
    )


def run_on_fleet(config: RunConfig, pipeline: beam.Pipeline, build: Build) -> int:
    """Hand the graph to the runner of a fleet and wait; with `--dry_run` build the job and stop."""
    build(pipeline, config)
    result = pipeline.run()
    if config.dry_run:
        print("ops6k: the job was built and not submitted")
        return 0
    state = result.wait_until_finish()
    if state != "DONE":
        print(f"ops6k: the job ended as {state}", file=sys.stderr)
        return EXIT_FAILED
    return summary.conclude(config)


def _watch_workers() -> None:
    """Restart when Beam's thread that waits for a worker process raises; stop cleanly on Ctrl-C."""
    show = threading.excepthook

    def on_thread_error(failure: threading.ExceptHookArgs) -> None:
        if failure.thread is not None and failure.thread.name == "run_worker":
            restart(f"{failure.exc_value}")
        if not issubclass(failure.exc_type, grpc.RpcError):  # the other ends of a dead worker
            show(failure)

    def on_signal(number: int, _frame: Any) -> NoReturn:
        _restarting.acquire(blocking=False)  # the workers are about to die, as they should
        kill_children()
        print("\nops6k: stopped; the same command continues", file=sys.stderr, flush=True)
        os._exit(128 + number)

    threading.excepthook = on_thread_error
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def restart(reason: str) -> NoReturn:
    """Become a fresh run of the same command; give up with a message after MAX_RESTARTS."""
    if not _restarting.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it: dead workers often come in pairs
    count = int(os.environ.get(RESTARTS, "0"))
    kill_children()
    if count >= MAX_RESTARTS:
        print(
            f"\nops6k: a worker process died for the {count + 1}th time ({reason}); giving up. "
            "Finished work is kept: the same command continues. If memory was short, lower "
            "--num_workers_local or --memory_limit_gib",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_WORKERS)
    print(
        f"\nops6k: a worker process died ({reason}); restart {count + 1} of {MAX_RESTARTS}, "
        "finished work is kept",
        file=sys.stderr,
        flush=True,
    )
    os.environ[RESTARTS] = str(count + 1)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def kill_children() -> None:
    """End every process this one has started, and wait for it: they may hold a device."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=10)


def _set_up_logging(verbose: bool) -> None:
    """Beam logs a warning at import, which sets up the root logger; hence `force`."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger().setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("apache_beam").setLevel(logging.INFO if verbose else logging.CRITICAL)
