# ruff: noqa: E501 - sentences read better whole
"""What is worth trying on a plan: variants of its printing, each with the sentence that motivates
it."""

from __future__ import annotations

from kernel_agent.expert.contraction import match
from kernel_agent.expert.kernels import LoopKernel, ScanKernel, shared_values
from kernel_agent.expert.params import PLAIN, Params
from kernel_agent.expert.plan import Plan
from schemas.records import Precision, Target


def variants(plan: Plan, target: Target, precision: Precision = Precision.FP32) -> list[Params]:
    """The variants that can change something for this plan, the most promising first: the
    printer's defaults, or before them tiles of 64 for a matrix product, with TF32 where it is
    allowed (on an H200 these beat the defaults in 24 of 28 problems, by up to 1.7x, and tiles of
    128 beat them in 3 of 27). Only problems of the tf32 class may use TF32, so only they get the
    variants that do."""
    if target is Target.CPU:
        return [PLAIN, *_cpu(plan)]
    tiles = _tiles(plan, precision)
    return [*tiles[:1], PLAIN, *tiles[1:], *_cuda(plan)]


def _layouts(plan: Plan) -> set[str]:
    kernels = [k for k in plan.kernels if isinstance(k, LoopKernel)]
    found = {k.layout for k in kernels}
    if any(k.layout == "row" and any(shared_values(k)) for k in kernels):
        found.add("shared")
    if any(isinstance(k, ScanKernel) for k in plan.kernels):
        found.add("scan")
    return found


def _cpu(plan: Plan) -> list[Params]:
    layouts = _layouts(plan)
    out = []
    if "column" in layouts:
        out += [
            Params(
                name="narrow_columns",
                why="blocks of 64 columns: a block's rows fit the first-level cache, so later passes reread them there",
                options={"column_block": 64},
            ),
            Params(
                name="wide_columns",
                why="blocks of 1024 columns: longer contiguous runs per row, fewer jumps between rows",
                options={"column_block": 1024},
            ),
        ]
    if "shared" in layouts:
        out.append(
            Params(
                name="recompute_row",
                why="recompute values of the row in each pass: no row buffer to write and read again",
                options={"keep_row": 0},
            )
        )
    return out


def _tiles(plan: Plan, precision: Precision) -> list[Params]:
    kernels = [k for k in plan.kernels if isinstance(k, LoopKernel)]
    if plan.kind != "optimized" or not any(match(k) for k in kernels):
        return []
    sizes = (
        (64, "tiles of 64 x 64: more blocks, so that small products fill the device"),
        (128, "tiles of 128 x 128: each loaded element is used twice as often"),
    )
    out = []
    if precision is Precision.TF32:
        out += [
            Params(
                name=f"tf32_tile_{n}",
                why=f"TF32 tensor cores, which this precision class allows; {why}",
                options={"tile": n, "tf32": 1},
            )
            for n, why in sizes
        ]
    out += [Params(name=f"tile_{n}", why=why, options={"tile": n}) for n, why in sizes]
    return out


def _cuda(plan: Plan) -> list[Params]:
    layouts = _layouts(plan)
    return [params for layout, chosen in CUDA.items() if layout in layouts for params in chosen]


def _threads(option: str, whose: str, *choices: tuple[int, str]) -> list[Params]:
    return [
        Params(name=f"{option}_{n}", why=f"{n} threads {whose}: {why}", options={option: n})
        for n, why in choices
    ]


CUDA: dict[str, list[Params]] = {
    "pointwise": [
        Params(
            name="small_blocks",
            why="blocks of 128 threads: less of the device idles at the tail of the grid",
            options={"threads": 128},
        ),
        Params(
            name="large_blocks",
            why="blocks of 512 threads: fewer blocks to schedule for the same number of loads in flight",
            options={"threads": 512},
        ),
        Params(
            name="two_vectors",
            why="8 elements a thread: two 16-byte loads of each fp32 input are in flight before the first use",
            options={"vector": 8},
        ),
    ],
    "row": _threads(
        "row_threads",
        "a row",
        (128, "more rows per multiprocessor, shorter combines"),
        (256, "between few and many elements a thread"),
        (512, "fewer elements a thread, so the row's values fit its registers"),
        (1024, "the most loads in flight for one long row"),
    ),
    "shared": [
        Params(
            name="reread_row",
            why="reread the row from cache in each pass: fewer registers, so more rows at once",
            options={"cache_row": 0},
        )
    ],
    "column": _threads(
        "column_threads",
        "share a column",
        (4, "cheaper combines when there are many columns"),
        (32, "more loads in flight when there are few"),
    ),
    "scan": [
        Params(
            name="long_scan_chunks",
            why="8 elements a thread in a scan: half as many block-wide steps along the line",
            options={"scan_each": 8},
        ),
        Params(
            name="wide_scan",
            why="512 threads a line: a longer chunk per block-wide step",
            options={"scan_threads": 512},
        ),
    ],
}
"""Worth trying on a GPU, by what a plan has."""
