"""`python -m pipelines.ops6k` over the stage functions of `tests/tiny_stages.py`, for tests that
kill it."""

import sys

from pipelines import ops6k, runner, transforms

if __name__ == "__main__":
    transforms.STAGES = "tests.tiny_stages"
    sys.exit(runner.main(sys.argv[1:], ops6k.build))
