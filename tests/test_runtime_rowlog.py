"""A log that was cut off anywhere is read as far as it is whole."""

from __future__ import annotations

from pathlib import Path

from pipelines.spans import seconds_per_stage
from runtime import rowlog
from runtime.lease import held_seconds


def test_rows_come_back_as_they_were_given(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    assert list(rowlog.rows(log, str, float)) == []
    rowlog.append(log, "admit", 1.5)
    rowlog.append(log, "rollout", 2.25)
    assert list(rowlog.rows(log, str, float)) == [("admit", 1.5), ("rollout", 2.25)]


def test_a_line_cut_off_anywhere_costs_no_more_than_itself_and_the_next(tmp_path: Path) -> None:
    """A full disk writes part of a row, and the next one is appended to that."""
    log = tmp_path / "log"
    row = "12.500000\t2.000000\t0.250000\tcuda-0\n"
    for cut in range(len(row)):
        log.write_text(row + row[:cut])
        rowlog.append(str(log), 12.5, 2.0, 0.25, "cuda-0")
        rowlog.append(str(log), 12.5, 2.0, 0.25, "cuda-0")
        found = list(rowlog.rows(str(log), float, float, float, str))
        whole = [one for one in found if one == (12.5, 2.0, 0.25, "cuda-0")]
        assert 2 <= len(whole) <= len(found) <= 3, cut


def test_logs_of_other_columns_are_passed_over(tmp_path: Path) -> None:
    """An older version's, in a folder that is continued: its times are not this attempt's."""
    log = tmp_path / "log"
    log.write_text("1.0\t2.0\t3.0\n")
    assert held_seconds(str(log)) == 0
    log.write_text("admit\t1.0\n")
    assert seconds_per_stage(str(log)) == {}
