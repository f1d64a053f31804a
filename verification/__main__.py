"""`python -m verification check PROBLEM.py SOLUTION` and `python -m verification serve`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from schemas.records import Precision, Target
from verification.folder import FORMS, FolderError, SettingsError
from verification.report import UNDECIDED, UNREADABLE, printable

STORE = os.environ.get("OPS6K_STORE", "~/.cache/ops6k")
EFFORTS = ("reward", "publish")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Whatever goes wrong is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "check":
            from verification.check import check  # torch, which the server does not need

            return check(options)
        from verification.service.serve import serve  # aiohttp, which a check does not need

        return serve(options)
    except (FolderError, SettingsError) as error:
        print(printable(str(error)), file=sys.stderr)
        return UNREADABLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("OPS6K_DEBUG"):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        print(printable(f"our side failed (OPS6K_DEBUG=1 shows where): {text}"), file=sys.stderr)
        return UNDECIDED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verification", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_check(commands.add_parser("check", help="judge one solution of one problem"))
    _add_serve(commands.add_parser("serve", help="judge over HTTP, on any number of devices"))
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("problem", help="a file in KernelBench form: Model, get_inputs, get_init_inputs")
    add("solution", help="a folder with model_new.py and kernels/, or one .py file")
    add(
        "--precision",
        choices=list(map(str, Precision)),
        default="fp32",
        help="where the problem's docstring has no line 'precision: …'",
    )
    add("--effort", choices=EFFORTS, default="reward", help="publish: the full protocol")
    add("--form", choices=("auto", *FORMS), default="auto", help="auto: from the files")
    add("--device", default=None, help="cpu or cuda:N; default: cpu or cuda:0, by target")
    add("--json", default=None, metavar="FILE", help="write verdict and screening there")
    add("--accept_problem", action="store_true", help="judge though a trivial answer passes")
    add("--fresh", action="store_true", help="measure again what the store has")
    _add_machine(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen at")
    add("--port", type=_number(0), default=8600, help="0: any that is free, which is printed")
    add("--devices", default=None, help="cpu, or cuda:0,cuda:1; default: all of the target's")
    add("--workers_per_device", type=_number(1), default=2, help="one builds, another measures")
    add("--queue", type=_number(1), default=256, help="requests that may wait; then 429")
    add("--deadline_s", type=_number(1), default=600, help="longest wait for an answer; then 504")
    add("--token_env", default=None, metavar="NAME", help="variable with the token to ask for")
    add("--without_token", action="store_true", help="serve other machines, asking for none")
    _add_machine(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", choices=list(map(str, Target)), default="cpu", help="what kernels are for")
    add("--store", default=STORE, help="folder for verdicts and builds; $OPS6K_STORE")
    add("--libraries", type=_libraries, default=(), help="may be called: cublas, cudnn, torch")
    add("--partial_isolation", action="store_true", help="publish though isolation is not full")
    add("--memory_limit_gib", type=_positive, default=8.0, help="resident memory of a worker")
    add("--device_memory_gib", type=_positive, default=16.0, help="GPU memory of a worker")
    add("--problem_timeout_s", type=_positive, default=60.0, help="longest single step")


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return value

    return parse


def _libraries(text: str) -> tuple[str, ...]:
    named = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := set(named) - {"cublas", "cudnn", "torch"}:
        raise argparse.ArgumentTypeError(f"expected cublas, cudnn, torch, got {', '.join(unknown)}")
    return named


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
