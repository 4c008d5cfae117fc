from __future__ import annotations

from pathlib import Path

import pytest
import torch
from written import write

from kvstore.checkpoint.folders import (
    NEVER,
    CheckpointSchedule,
    begin,
    folder_of,
    found,
    listed,
    prepare,
    prune,
    remove,
)
from kvstore.errors import CheckpointError
from kvstore.job.valid_values import Interval
from kvstore.sealed_folders import MANIFEST

ARRAYS = {"w": torch.ones(3)}


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    assert found(tmp_path / "not yet") is None
    write(tmp_path, 3, ARRAYS)
    write(tmp_path, 11, ARRAYS)
    write(tmp_path, 12, ARRAYS, whole=False)
    (tmp_path / "checkpoint-x").mkdir()
    assert [folder[::2] for folder in listed(tmp_path)] == [(3, True), (11, True), (12, False)]
    assert found(tmp_path) == folder_of(tmp_path, 11)
    assert found(folder_of(tmp_path, 3)) == folder_of(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"checkpoint-00000012: no whole.*checkpoint-00000011"):
        found(folder_of(tmp_path, 12))


def test_a_directory_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    prepare(tmp_path / "new" / "run7")
    assert list((tmp_path / "new" / "run7").iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run7"):
        with pytest.raises(CheckpointError, match="no checkpoint can be written there"):
            prepare(path)


def test_a_number_is_used_once(tmp_path: Path) -> None:
    begin(tmp_path / "new", 1)
    with pytest.raises(FileExistsError):
        begin(tmp_path / "new", 1)


def test_old_checkpoints_go_and_so_does_what_was_left_unfinished(tmp_path: Path) -> None:
    for number in (1, 2, 4, 9):
        write(tmp_path, number, ARRAYS, whole=number != 2)
    write(tmp_path, 5, ARRAYS)
    prune(tmp_path, 2, 5)
    assert [folder.number for folder in listed(tmp_path)] == [4, 5, 9]  # 9 may be another's, under way


def test_files_of_others_stay(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, ARRAYS)
    (folder / "notes.txt").write_text("mine")
    remove(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert not (folder / MANIFEST).exists()


def test_rounds_are_counted_from_the_first_of_all() -> None:
    schedule = CheckpointSchedule(Interval(100), 250, 0.0)
    assert schedule.first() == 300
    assert schedule.due(300, 1.0)
    assert schedule.next(300, 1.0) == 400
    assert not schedule.due(301, 1.0)
    assert schedule.due(437, 1.0), "a meeting that came late"
    assert schedule.next(437, 1.0) == 500


@pytest.mark.parametrize("round_s", [0.001, 0.1, 3.0, 100.0])
def test_a_time_takes_few_meetings_and_is_kept_to_a_round(round_s: float) -> None:
    schedule = CheckpointSchedule(Interval(0, 60.0), 0, 0.0)
    made, meetings, meeting = [], 0, schedule.first()
    for rounds in range(1, int(600 / round_s)):
        if rounds < meeting:
            continue
        now, meetings = rounds * round_s, meetings + 1
        if schedule.due(rounds, now):
            made.append(now)
        meeting = schedule.next(rounds, now)
        if len(made) == 4:
            break
    gaps = [after - before for before, after in zip([0.0, *made], made, strict=False)]
    assert all(60 <= gap <= max(60.0, round_s) + 2 * round_s + 1e-6 for gap in gaps)
    assert meetings <= 4 * 20


def test_never() -> None:
    schedule = CheckpointSchedule(Interval(), 5, 0.0)
    assert schedule.first() == NEVER
    assert not schedule.due(NEVER, 1e9)
