"""KernelBench's evaluator on one solution, in a process of its own; the result goes to a file.

    python -m benchmarks.peer_kernelbench SRC ARCH PROBLEM.py SOLUTION.py BUILD_DIR RESULT.json

SRC is the folder `src` of a copy of KernelBench. The evaluator is called as that project's
`scripts/eval_from_generations.py` does: 5 correctness trials, 100 timed ones by CUDA events,
backend cuda, fp32. What its static checker says, which other scripts of it ask first, is noted
beside it. The package imports `openai` and `litellm`, which must be installed; nothing of it is
replaced.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

TRIALS, TIMED_TRIALS = 5, 100


def main(arguments: list[str]) -> None:
    source, arch, problem, solution, build_dir, result = arguments
    sys.path.insert(0, source)
    started = time.perf_counter()
    import torch
    from kernelbench.eval import eval_kernel_against_ref
    from kernelbench.kernel_static_checker import validate_kernel_static
    from kernelbench.utils import set_gpu_arch

    imported_s = time.perf_counter() - started
    set_gpu_arch([arch])
    text = Path(solution).read_text()
    static_ok, errors, warnings = validate_kernel_static(text, backend="cuda", precision="fp32")
    Path(build_dir).mkdir(parents=True, exist_ok=True)
    found = eval_kernel_against_ref(
        original_model_src=Path(problem).read_text(),
        custom_model_src=text,
        measure_performance=True,
        timing_method="cuda_event",
        num_correct_trials=TRIALS,
        num_perf_trials=TIMED_TRIALS,
        build_dir=build_dir,
        device=torch.device("cuda:0"),
        backend="cuda",
        precision=torch.float32,
    )
    record: dict[str, Any] = {"imported_s": imported_s, "static_ok": static_ok}
    record |= {"static_errors": errors, "static_warnings": warnings, "evaluated": found is not None}
    if found is not None:  # None: it asks to be tried again, because of a lock
        record |= {
            "compiled": found.compiled,
            "correct": found.correctness,
            "runtime_ms": found.runtime,
            "reference_ms": found.ref_runtime,
            "metadata": {key: str(value)[:300] for key, value in found.metadata.items()},
        }
    Path(result).write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
