"""The main job: operator templates to Parquet, on a laptop, a GPU box or a fleet.

    python -m pipelines.ops6k --target=auto --policy=expert --num_problems=40 --seed=0 --output=out

The whole graph is `build`. Candidates = kept + rejected, always; the run prints that sum.
"""

from __future__ import annotations

import sys

import apache_beam as beam

from pipelines import runner, transforms, workshop
from pipelines.options import RunConfig


def build(p: beam.Pipeline, config: RunConfig) -> None:
    """Wire the graph. `config.target` is resolved: cpu or cuda."""
    indices = p | "Candidates" >> transforms.Candidates(config)
    composed = indices | "Compose" >> transforms.Compose(config)
    admitted = composed.kept | "Admit" >> transforms.Admit(config)
    unique = admitted.kept | "Deduplicate" >> transforms.Deduplicate(config)
    done = unique.kept | "Rollout" >> transforms.Rollout(config)
    placed = done.kept | "Rows" >> transforms.Rows(config)
    lost = [stage.rejected for stage in (composed, admitted, unique, done, placed)]
    rejected = lost | "Rejected" >> beam.Flatten()
    files = transforms.Outcome(placed.kept, rejected) | "Write" >> transforms.WriteShards(config)
    _ = (placed.kept, rejected, files) | "Finish" >> transforms.Finish(config)


if __name__ == "__main__":
    sys.exit(runner.main(sys.argv[1:], build, workshop.shared_zygote))
