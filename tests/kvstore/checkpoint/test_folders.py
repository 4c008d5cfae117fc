from __future__ import annotations

from pathlib import Path

import pytest
import torch
from written import write

from kvstore.checkpoint.folders import begin, folder_of, found, listed, prepare, prune, remove
from kvstore.checkpoint.manifest import MANIFEST
from kvstore.errors import CheckpointError

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
