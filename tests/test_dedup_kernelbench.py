"""The benchmark index and decontamination; against KernelBench itself where a copy is."""

import importlib.util
import json
import os
import re
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
from datasets import Dataset

from dedup.decontaminate import decontaminate, one_operator_apart, reduced
from dedup.join import exact_pairs
from dedup.kernelbench import (
    BUNDLED,
    BenchmarkProblem,
    build_index,
    load_index,
    main,
    write_index,
)
from dedup.rows import Row
from dedup.signature import ngrams_of
from schemas.codec import content_id
from schemas.records import RejectStage

RELU = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 1.0
def get_inputs():
    return [torch.rand(2, 3)]
def get_init_inputs():
    return []
"""


def row(operators: str, written: str = "", index: int = 0) -> Row:
    """A row with `operators`; `written` is the sequence with constant no-ops, where it differs."""
    return Row(
        problem_id=content_id(f"{operators}/{written}/{index}"),
        index=index,
        operators=tuple(operators.split()),
        ngrams=ngrams_of((written or operators).split()),
        ngrams_attributes=ngrams_of(operators.split()),
    )


INDEX = [
    BenchmarkProblem.of("level1/1", ["relu"], []),
    BenchmarkProblem.of("level2/1", ["conv2d", "relu", "add", "mul"], []),
    BenchmarkProblem.of("level2/2", ["matmul", "add", "gelu", "mul"], [3]),
    BenchmarkProblem.of("level3/1", ["conv2d", "relu"] * 8, []),
]


@pytest.mark.parametrize(
    ("candidate", "matched"),
    [
        (row("relu"), "level1/1"),
        (row("conv2d relu add mul"), "level2/1"),
        (row("relu", written="mul relu"), "level1/1"),  # a no-op added to the candidate
        (row("matmul add gelu"), "level2/2"),  # a no-op of the benchmark left out
        (row("matmul add gelu mul"), "level2/2"),  # the same with another constant
        (row("conv2d relu " * 8 + "exp"), "level3/1"),
    ],
)
def test_what_equals_the_benchmark_is_dropped_and_names_its_match(
    candidate: Row, matched: str
) -> None:
    kept, (rejected,) = decontaminate([candidate], INDEX)
    assert kept == []
    assert (rejected.stage, rejected.reason) == (RejectStage.DECONTAMINATE, "kernelbench")
    assert re.fullmatch(rf"{matched} similarity [01]\.\d+", rejected.detail)


@pytest.mark.parametrize(
    ("operators", "near_miss", "nearest"),
    [
        ("conv2d relu add", True, "level2/1"),  # dropped
        ("conv2d relu add mul exp", True, "level2/1"),  # added
        ("conv2d tanh add mul", True, "level2/1"),  # replaced
        ("conv2d view relu add mul tanh", True, "level2/1"),  # layout does not count
        ("matmul add tanh gelu", True, "level2/2"),  # linear and gelu are shared
        ("conv2d relu " * 8 + "tanh exp mul", True, "level3/1"),  # by similarity
        ("relu tanh", False, "level1/1"),  # only one operator is shared
        ("conv2d exp exp mul", False, "level2/1"),
        ("softmax", False, None),
    ],
)
def test_near_misses_are_kept_and_labelled(
    operators: str, near_miss: bool, nearest: str | None
) -> None:
    (kept,), rejected = decontaminate([row(operators)], INDEX)
    assert rejected == []
    assert (kept.near_miss, kept.kernelbench_id) == (near_miss, nearest)
    assert 0.0 <= kept.kernelbench_similarity < 0.8


def test_rows_are_accounted_for_and_an_empty_index_keeps_all() -> None:
    rows = [row(text, index=i) for i, text in enumerate(["relu", "exp", "conv2d relu add mul"])]
    kept, rejected = decontaminate(rows, INDEX)
    assert (len(kept), len(rejected)) == (1, 2)
    assert [match.kernelbench_id for match in decontaminate(rows, [])[0]] == [None] * 3
    assert decontaminate([], INDEX) == ([], [])


def edits(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    """Levenshtein distance by its definition."""
    if not left or not right:
        return len(left) + len(right)
    return min(
        edits(left[1:], right) + 1,
        edits(left, right[1:]) + 1,
        edits(left[1:], right[1:]) + (left[0] != right[0]),
    )


def test_one_operator_apart_is_edit_distance_one() -> None:
    words = [tuple(word) for word in ("abcd", "abc", "abd", "bcd", "abcde", "axcd", "xbcd", "dcba")]
    words += [tuple(word) for word in ("aabb", "abb", "abab", "ab", "ba", "abcx", "aabcd")]
    for left in words:
        for right in words:
            shared = min(len(left), len(right)) - (len(left) == len(right))
            expected = edits(left, right) == 1 and shared >= 2
            assert one_operator_apart(left, right) is expected, (left, right)


def test_reduced_counts_as_a_reader_does() -> None:
    linear, silu, mish = ["matmul", "add"], ["sigmoid", "mul"], ["softplus", "tanh", "mul"]
    operators = ["view", *linear, "transpose", *silu, *mish, "slice", "exp"]
    assert reduced(operators) == ("linear", "silu", "mish", "exp")


def test_the_bundled_index_holds_signatures_and_no_text() -> None:
    text = resources.files("dedup").joinpath(BUNDLED).read_text()
    content = json.loads(text)
    assert set(content) == {"schema_version", "benchmark", "revision", "problems"}
    assert re.fullmatch(r"[0-9a-f]{40}", content["revision"])
    for problem in content["problems"]:
        assert set(problem) == {"id", "operators", "neutral"}
        assert re.fullmatch(r"level[123]/\d+", problem["id"])
        assert re.fullmatch(r"[a-z0-9_]+( [a-z0-9_]+)*", problem["operators"])
    assert not re.search(r"import|class |def |forward|\.py|Model", text)
    levels = Counter(problem.id.split("/")[0] for problem in load_index())
    assert levels == {"level1": 100, "level2": 100, "level3": 50}


def test_the_bundled_index_is_itself_contamination() -> None:
    rows = [
        Row(
            problem_id=content_id(problem.id),
            index=i,
            operators=problem.operators,
            ngrams=problem.ngrams,
            ngrams_attributes=problem.ngrams,
        )
        for i, problem in enumerate(load_index())
    ]
    kept, rejected = decontaminate(rows, load_index())
    assert (len(kept), len(rejected)) == (0, 250)


def test_build_from_a_folder(tmp_path: Path) -> None:
    for level, number in ((1, 10), (1, 9), (3, 2), (4, 1)):
        (tmp_path / f"level{level}").mkdir(exist_ok=True)
        (tmp_path / f"level{level}" / f"{number}_Secret_title.py").write_text(RELU)
    output = tmp_path / "index.json"
    main(["build", f"--source={tmp_path}", f"--output={output}", "--revision=abc"])
    index = load_index(output)
    assert [problem.id for problem in index] == ["level1/9", "level1/10", "level3/2"]
    assert (index[0].sequence, index[0].operators) == (("relu", "mul"), ("relu",))
    assert "Secret" not in output.read_text()


def test_build_from_a_dataset_with_the_hub_columns(tmp_path: Path) -> None:
    for level in (1, 4):
        rows = [{"code": RELU, "level": level, "name": "a title", "problem_id": 7}]
        Dataset.from_list(rows).to_parquet(tmp_path / f"level_{level}.parquet")
    content = build_index(str(tmp_path))
    assert content["problems"] == [{"id": "level1/7", "operators": "relu mul", "neutral": [1]}]


def test_build_names_every_file_it_cannot_trace(tmp_path: Path) -> None:
    (tmp_path / "level1").mkdir()
    for number, code in ((1, RELU), (2, "import not_there"), (3, "x = 1")):
        (tmp_path / "level1" / f"{number}_a.py").write_text(code)
    with pytest.raises(RuntimeError, match=r"(?s)2 problems .*level1/2: Module.*level1/3: Value"):
        build_index(str(tmp_path))


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    write_index({"schema_version": 0, "problems": []}, tmp_path / "old.json")
    with pytest.raises(ValueError, match="expected index schema 1, got 0"):
        load_index(tmp_path / "old.json")


PEER = Path(os.environ.get("OPS6K_PEER_DIR", "/nonexistent")) / "KernelBench"


@pytest.mark.skipif(not PEER.is_dir(), reason="OPS6K_PEER_DIR holds no KernelBench")
@pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="level 3 imports einops")
def test_kernelbench_against_itself() -> None:
    """All 250 problems trace, the bundled index is what they give, and 165 pairs are alike."""
    content = build_index(str(PEER))
    assert len(content["problems"]) == 250
    bundled = json.loads(resources.files("dedup").joinpath(BUNDLED).read_text())
    assert content["problems"] == bundled["problems"]
    pairs = exact_pairs([ngrams_of(p["operators"].split()) for p in content["problems"]], 0.8)
    assert len(pairs) == 165
