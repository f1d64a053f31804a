"""`python -m pipelines.ops6k` over the stage functions of `tests/tiny_stages.py`, for tests that
kill it.

The moments that matter most, such as those in which the output folder is claimed, are too short to
be met by the clock. With TINY_KILL_BEFORE="claim:3" the command kills its process group, by the
same signal as kill -9, just before the third change it makes to the folder while claiming it;
"work" and "export" are the other two phases. It takes one worker: others are processes of Beam's.
"""

import collections
import os
import signal
import sys
from typing import Any

from pipelines import ops6k, runner, transforms

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def phase(file: str) -> str:
    """What a file or folder below the output is changed for."""
    if file in ("", ".store") or file.startswith((".ops6k", "..ops6k.", ".store/runs")):
        return "claim"
    return "work" if file.startswith((".store/", "done.log")) else "export"


def kill_before(moment: str, folder: str) -> None:
    """End everything before the n-th change below `folder` in a phase, given as "phase:n"."""
    name, _, number = moment.partition(":")
    changes: collections.Counter[str] = collections.Counter()

    def hear(event: str, about: tuple[Any, ...]) -> None:
        made = event in ("os.mkdir", "os.rename", "os.remove")
        if not made and not (event == "open" and about[2] & WRITING):
            return
        path = str(about[1 if event == "os.rename" else 0])  # of a rename, the new name
        if path != folder and not path.startswith(f"{folder}/"):
            return
        changes[phase(path[len(folder) + 1 :])] += 1
        if changes[name] == int(number):
            os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hear)


if __name__ == "__main__":
    if moment := os.environ.get("TINY_KILL_BEFORE"):
        kill_before(moment, next(a for a in sys.argv if a.startswith("--output="))[9:])
    transforms.STAGES = "tests.tiny_stages"
    sys.exit(runner.main(sys.argv[1:], ops6k.build))
