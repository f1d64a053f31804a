"""One thin Beam transform per stage, each over a plain function of `pipelines/stages.py`.

What travels between stages is small: `stages.Item`s (an index, an id, the keys of finished
records in the store) and rejections. Records never go through a shuffle. Stage functions are
named, not passed, so that building a graph imports neither torch nor a compiler; a worker imports
them in `setup`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import PBegin, PCollection, TaggedOutput
from apache_beam.typehints.decorators import no_annotations

from pipelines.dead_letters import internal_error
from pipelines.options import RunConfig
from schemas.arrow import SCHEMAS
from schemas.codec import to_json
from schemas.records import Rejection, RejectStage
from training_export import shards

STAGES = "pipelines.stages"
REJECTED = "rejected"
PROBLEMS_PER_SHARD = 2000
"""A writer holds one shard in memory; 2,000 problems are some 200 MB of trajectories."""

Place = tuple[str, str, int]
"""A file: config, split, number. Beam encodes such a tuple to the same bytes everywhere."""


class Outcome(NamedTuple):
    """What a stage lets through, and the rejections (as JSON) it makes instead."""

    kept: PCollection
    rejected: PCollection


class StageFn(beam.DoFn):
    """Calls a stage function, which yields what it keeps and `Rejection`s.

    With a `stage`, whatever escapes the function is a bug of ours that costs this element only:
    it becomes a rejection, and the run ends with an error code. Without one, the function sees
    the whole run at once, and the exception ends the run.
    """

    def __init__(self, config: RunConfig, function: str, stage: RejectStage | None = None) -> None:
        self._config = config
        self._module, self._name = STAGES, function
        self._stage = stage

    def setup(self) -> None:
        self._function = getattr(importlib.import_module(self._module), self._name)

    @no_annotations  # Beam would read `*rest: Any` as a type that no side input has
    def process(self, element: Any, *rest: Any) -> Iterator[Any]:
        try:
            results = list(self._function(self._config, element, *rest))
        except Exception as error:
            if self._stage is None:
                raise
            item = element if isinstance(element, dict) else {"problem_id": "", "index": element}
            ids = {name: item[name] for name in ("problem_id", "index")}
            results = [internal_error(error, stage=self._stage, **ids)]
        for result in results:
            if isinstance(result, Rejection):
                yield TaggedOutput(REJECTED, to_json(result))
            else:
                yield result


def device_hints(config: RunConfig) -> dict[str, str]:
    """The resource hints of the stages that measure; the only place that sets any.

    Beam adds `max_active_bundles_per_worker` up over nested transforms, so it is set on the
    innermost step alone. With target cpu every worker is the device, and hints would only cost a
    second set of worker processes.
    """
    if config.target != "cuda":
        return {}
    return {
        "accelerator": config.accelerator,
        "min_ram": f"{2 * config.memory_limit_gib:g}GB",
        "max_active_bundles_per_worker": "1",
    }


def _outcome(steps: Any) -> Outcome:
    return Outcome(kept=steps.kept, rejected=steps.rejected)


class StageTransform(beam.PTransform):
    """A stage of the graph: what it needs to know is the settings of the run."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config

    def each(self, items: PCollection, function: str, stage: RejectStage) -> Outcome:
        """A stage that sees one element at a time."""
        step = beam.ParDo(StageFn(self.config, function, stage))
        return _outcome(items | "Run" >> step.with_outputs(REJECTED, main="kept"))

    def each_on_device(self, items: PCollection, function: str, stage: RejectStage) -> Outcome:
        """The same where the device is, fenced: slow elements are dealt out evenly before it, and a
        failure after it does not measure again."""
        step = beam.ParDo(StageFn(self.config, function, stage))
        step.with_resource_hints(**device_hints(self.config))
        spread = items | "ToDevice" >> beam.Reshuffle()
        done = spread | "Run" >> step.with_outputs(REJECTED, main="kept")
        return Outcome(
            kept=done.kept | "FromDevice" >> beam.Reshuffle(),
            rejected=done.rejected | "RejectedFromDevice" >> beam.Reshuffle(),
        )


class Candidates(StageTransform):
    """-> the index of every candidate, spread over the workers."""

    def expand(self, begin: PBegin) -> PCollection:
        indices = begin | "Indices" >> beam.Create(range(self.config.num_problems))
        return indices | "Spread" >> beam.Reshuffle()


class Compose(StageTransform):
    """Index -> composed problem."""

    def expand(self, indices: PCollection) -> Outcome:
        return self.each(indices, "compose", RejectStage.COMPOSE)


class Admit(StageTransform):
    """Composed problem -> screened problem, on the device."""

    def expand(self, items: PCollection) -> Outcome:
        return self.each_on_device(items, "admit", RejectStage.ADMIT)


class Deduplicate(StageTransform):
    """All admitted problems, in one worker -> one of each kind, none of the benchmark's."""

    def expand(self, items: PCollection) -> Outcome:
        keyed = items | "OneKey" >> beam.Map(_one_key).with_output_types(tuple[int, Any])
        together = keyed | "Together" >> beam.GroupByKey() | "Values" >> beam.Values()
        step = beam.ParDo(StageFn(self.config, "deduplicate"))
        return _outcome(together | "Run" >> step.with_outputs(REJECTED, main="kept"))


class Rollout(StageTransform):
    """Kept problem -> the keys of its trajectories, made on the device."""

    def expand(self, items: PCollection) -> Outcome:
        return self.each_on_device(items, "rollout", RejectStage.ROLLOUT)


class Rows(StageTransform):
    """Finished problem -> itself with the files its rows go to, and what configs refused."""

    def expand(self, items: PCollection) -> Outcome:
        return self.each(items, "rows", RejectStage.EXPORT)


class WriteShards(StageTransform):
    """Items and rejections -> one Parquet file per config, split and shard.

    A row's file and its place there depend on its id alone, so the files are the same whatever the
    number of workers. Every file is written, also one without rows, so that every config is there.
    """

    def expand(self, outcome: Outcome) -> PCollection:
        every = [(place, None) for place in shards.all_shards(num_shards(self.config))]
        parts = (
            outcome.kept.pipeline | "EveryFile" >> beam.Create(every),
            outcome.kept | "Place" >> beam.FlatMap(_places),
            outcome.rejected | "PlaceRejected" >> beam.Map(_rejected_place, self.config),
        )
        keyed = parts | "Merge" >> beam.Flatten()
        typed = keyed | "Key" >> beam.Map(_same).with_output_types(tuple[Place, Any])
        files = typed | "PerFile" >> beam.GroupByKey()
        return files | "Run" >> beam.ParDo(StageFn(self.config, "write_shard"))


class Finish(StageTransform):
    """Everything small -> `run.json`, the report and, last of all, the card."""

    def expand(self, parts: tuple[PCollection, PCollection, PCollection]) -> PCollection:
        once = parts[0].pipeline | "Once" >> beam.Create([None])
        step = beam.ParDo(StageFn(self.config, "finish"), *map(beam.pvalue.AsList, parts))
        return once | "Run" >> step


def num_shards(config: RunConfig) -> dict[str, int]:
    """Files per split of each config."""
    return dict.fromkeys(SCHEMAS, math.ceil(config.num_problems / PROBLEMS_PER_SHARD))


def _one_key(item: Any) -> tuple[int, Any]:
    return 0, item


def _same(pair: tuple[Place, Any]) -> tuple[Place, Any]:
    return pair


def _places(item: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    for name, split, number in item["files"]:
        yield (name, split, number), item


def _rejected_place(row: dict[str, Any], config: RunConfig) -> tuple[Place, Any]:
    number = shards.shard_of(shards.row_id("rejected", row), num_shards(config)["rejected"])
    return ("rejected", "train", number), row
