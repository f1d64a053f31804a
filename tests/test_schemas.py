"""Records round-trip through JSON and refuse impossible states; Arrow schemas keep their form."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pyarrow as pa
import pytest

from schemas import arrow, records
from schemas.codec import content_id, content_key, from_json, to_json
from schemas.records import Interval, Layer, Measurement, Solution, VerdictStatus
from tests import factories

KEPT = factories.kept(3)
WON = factories.verdict()
ALL_RECORDS = [
    KEPT.problem,
    KEPT.admission,
    factories.refused(KEPT.problem.problem_id),
    KEPT.neighbour,
    factories.neighbour("x", kernelbench_id=None),
    factories.environment(driver="570", toolkit="13.0"),
    WON,
    *(factories.verdict(status) for status in VerdictStatus if status is not VerdictStatus.CORRECT),
    factories.measurement(),
    factories.interval(2.0),
    factories.check(error=None, budget=None, detail="nothing to compare"),
    factories.solution(),
    factories.turn(4, layer=Layer.HARDWARE, gain=1.25),
    factories.trajectory(KEPT, WON),
    factories.trajectory(KEPT),
    factories.rejection(),
    factories.rejection(kind=records.TrajectoryKind.REFERENCE, stage=records.RejectStage.ROLLOUT),
]


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda r: type(r).__name__)
def test_round_trip_through_json_text(record: Any) -> None:
    text = json.dumps(to_json(record), allow_nan=False)
    assert from_json(type(record), json.loads(text)) == record


def test_every_record_is_tested_frozen_and_keyword_only() -> None:
    classes = {
        c for c in vars(records).values() if isinstance(c, type) and dataclasses.is_dataclass(c)
    }
    nested = {  # inside the others
        records.Attribution,
        records.DeviceState,
        records.Isolation,
        records.SourceFile,
        records.ToolCall,
    }
    assert classes == {type(record) for record in ALL_RECORDS} | nested
    for cls in classes:
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert all(field.kw_only for field in dataclasses.fields(cls))


def test_from_json_names_the_keys_that_do_not_fit() -> None:
    value = to_json(factories.interval(2.0))
    with pytest.raises(ValueError, match=r"Interval: expected keys .*'low'.* got .*'lower'"):
        from_json(Interval, {"lower": 1.0, "point": 2.0, "high": 3.0})
    with pytest.raises(ValueError, match="Interval"):
        from_json(Interval, value | {"extra": 1})


def test_whole_numbers_come_back_as_floats() -> None:
    back = from_json(Interval, {"low": 1, "point": 2, "high": 3})
    assert [type(v) for v in dataclasses.astuple(back)] == [float] * 3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: factories.problem(problem_id="0" * 16), "not the hash of its code"),
        (lambda: factories.problem(ops=()), "at least one op"),
        (lambda: factories.admission("x", headroom=None), "times measured"),
        (lambda: factories.measurement(1.0, samples_ms=()), "without samples"),
        (lambda: factories.measurement(float("nan")), "finite and positive"),
        (lambda: Measurement(median_ms=1.0, samples_ms=(-1.0,), clock="wall"), "finite"),
        (lambda: Interval(low=2.0, point=1.0, high=1.0), "not an interval"),
        (lambda: Interval(low=0.0, point=1.0, high=1.0), "not an interval"),
        (lambda: Interval(low=1.0, point=1.0, high=float("inf")), "not an interval"),
        (lambda: factories.verdict(solution=None), "every measurement"),
        (lambda: factories.verdict(aa_control=None), "every measurement"),
        (lambda: factories.verdict(checks=()), "all of them passed"),
        (
            lambda: factories.verdict(checks=(factories.check(passed=False),)),
            "all of them passed",
        ),
        (
            lambda: factories.verdict(
                VerdictStatus.UNMEASURED, speedup_eager=factories.interval(2.0)
            ),
            "carries no speedup",
        ),
        (lambda: factories.trajectory(solution=factories.solution()), "or neither"),
        (
            lambda: factories.trajectory(
                solution=factories.solution(), verdict=factories.verdict(VerdictStatus.INCORRECT)
            ),
            "only a correct solution",
        ),
    ],
)
def test_impossible_states_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_ids_are_hashes_of_content() -> None:
    assert content_id("a") == "ca978112ca1bbdca"  # sha256("a"), known from elsewhere
    one = Solution.of({"b": "2", "a": "1"})
    assert one == Solution.of({"a": "1", "b": "2"})
    assert one.solution_id != Solution.of({"a": "1", "b": "2"}, form="paper").solution_id
    assert content_key("x", {"b": 1, "a": 2}) == content_key("x", {"a": 2, "b": 1})
    assert content_key("x", "y") != content_key("xy")
    assert factories.solution().text("kernels/relu.cpp").startswith("extern")


def _fields(kind: pa.DataType | pa.Schema) -> list[pa.Field]:
    if isinstance(kind, pa.Schema):
        return list(kind)
    if pa.types.is_list(kind):
        return _fields(kind.value_type)
    return list(kind) if pa.types.is_struct(kind) else []


def _all_fields(kind: pa.DataType | pa.Schema) -> list[pa.Field]:
    return [f for field in _fields(kind) for f in (field, *_all_fields(field.type))]


@pytest.mark.parametrize("config", arrow.SCHEMAS)
def test_schemas_keep_their_form(config: str) -> None:
    schema = arrow.SCHEMAS[config]
    assert schema.metadata[b"schema_version"] == str(records.SCHEMA_VERSION).encode()
    assert all(arrow.describe(field) for field in schema), "every column says what it holds"
    for field in _all_fields(schema):
        assert field.name == field.name.lower()
        assert not pa.types.is_map(field.type)
    assert schema.names[0].endswith("_id")
    last = {"problems": "code", "ppo_warmup": "prompt", "rl": "prompt", "rejected": "kind"}
    assert schema.names[-1] == last.get(config, "messages")


def test_messages_are_the_same_everywhere() -> None:
    kinds = {arrow.SCHEMAS[c].field("messages").type for c in ("trajectories", "sft", "critic")}
    assert len(kinds) == 1
    call = kinds.pop().value_type.field("tool_calls").type.value_type
    assert call.field("function").type.field("arguments").type == pa.string()
