"""Outputs arrive bit by bit, and a writer cannot make the reader read what it did not expect."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verification.machine import _scratch_root
from verification.workers import transport
from verification.workers.transport import Mailbox, describe, flatten_outputs

VALUES = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(7).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(6).view(2, 3),
    "scalar": torch.tensor(2.5),
    "transposed": torch.randn(4, 6).t(),
    "empty": torch.empty(0, 3),
    "NaN": torch.tensor([float("nan"), float("inf"), -0.0]),
    "several pieces": torch.arange(5000),
}


@pytest.fixture(params=["files", "mapped"])
def sides(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mailbox, Mailbox]:
    """(reader, writer); `mapped` is what a GPU does, with a driver that agrees to everything."""
    monkeypatch.setattr(transport, "STAGING_BYTES", 4096)
    transport._staging.cache_clear()
    both = Mailbox(str(tmp_path), "cpu"), Mailbox(str(tmp_path), "cpu")
    if request.param == "mapped":
        monkeypatch.setattr(transport, "_register", lambda mapped: True)
        monkeypatch.setattr(transport, "_unregister", lambda mapped: None)
        for side in both:
            side._direct = True
    return both


@pytest.mark.parametrize("name", VALUES)
def test_what_is_put_is_taken(sides: tuple[Mailbox, Mailbox], name: str) -> None:
    reader, writer = sides
    value = VALUES[name]
    reader.make(0, value.nbytes)
    assert writer.put(0, value) == describe(value)
    taken = reader.take(0, value)
    assert taken.shape == value.shape
    assert taken.dtype == value.dtype
    assert taken.contiguous().view(-1).view(torch.uint8).tolist() == (
        value.contiguous().view(-1).view(torch.uint8).tolist()
    )


def test_a_later_output_replaces_the_earlier_one_and_may_be_larger(
    sides: tuple[Mailbox, Mailbox],
) -> None:
    reader, writer = sides
    for size in (10, 10, 3, 20_000):
        value = torch.randn(size)
        reader.make(0, value.nbytes)
        if size == 20_000:
            writer = Mailbox(str(reader._folder), "cpu")  # the next solution's process
        writer.put(0, value)
        assert torch.equal(reader.take(0, value), value)


def test_an_output_larger_than_expected_is_described_and_not_written(
    sides: tuple[Mailbox, Mailbox],
) -> None:
    reader, writer = sides
    reader.make(0, 16)
    large = torch.randn(1000)
    described = {"shape": [1000], "dtype": "float32", "contiguous": True}
    assert writer.put(0, large) == described
    assert (reader._folder / "output.0").stat().st_size == 16


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    reader = Mailbox(str(tmp_path), "cpu")
    reader.make(0, 400)
    (tmp_path / "output.0").write_bytes(b"short")
    with pytest.raises(ValueError, match="a file of 5"):
        reader.take(0, torch.empty(100))


def test_where_the_driver_refuses_the_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_register", lambda mapped: False)
    reader, writer = Mailbox(str(tmp_path), "cpu"), Mailbox(str(tmp_path), "cpu")
    reader._direct = writer._direct = True
    value = torch.randn(100)
    reader.make(0, value.nbytes)
    writer.put(0, value)
    assert torch.equal(reader.take(0, value), value)


def test_only_plain_tensors_are_outputs() -> None:
    class Lazy(torch.Tensor):
        pass

    assert flatten_outputs(torch.ones(1))[0] == "tensor"
    assert flatten_outputs((torch.ones(1), torch.ones(2)))[0] == "tuple of 2"
    for wrong in (Lazy(), [1.0], {"a": torch.ones(1)}, None):
        with pytest.raises(TypeError):
            flatten_outputs(wrong)


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """Where a machine has its files; pages of a disk's cannot be registered everywhere."""
    with tempfile.TemporaryDirectory(dir=_scratch_root()) as folder:
        yield folder


@pytest.mark.gpu
def test_on_a_gpu_outputs_go_by_dma(memory_folder: str) -> None:
    reader, writer = Mailbox(memory_folder, "cuda:0"), Mailbox(memory_folder, "cuda:0")
    for size in (1000, 3000):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            value = (torch.randn(size, 7, device="cuda") * 100).to(dtype)
            reader.make(0, value.nbytes)
            writer._forget(0)
            writer.put(0, value)
            assert torch.equal(reader.take(0, value), value)
    assert reader._direct
    assert writer._direct


def test_a_writer_that_resizes_files_gains_nothing(sides: tuple[Mailbox, Mailbox]) -> None:
    reader, writer = sides
    value, file = torch.randn(100), reader._folder / "output.0"
    reader.make(0, value.nbytes)
    for size in (0, 1 << 20):
        os.truncate(file, size)
        reader.renew()
        assert file.stat().st_size == value.nbytes
        writer = Mailbox(str(reader._folder), "cpu")
        writer._direct = reader._direct
        writer.put(0, value)
        assert torch.equal(reader.take(0, value), value)
    os.truncate(file, 1 << 20)
    assert reader.take(0, value).nbytes == value.nbytes


def test_an_empty_output_has_a_file_that_anybody_may_write(tmp_path: Path) -> None:
    Mailbox(str(tmp_path), "cpu").make(0, 0)
    assert (tmp_path / "output.0").stat().st_mode & 0o777 == 0o666
