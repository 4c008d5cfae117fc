"""The manifest of a checkpoint, and the folders of checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from written import contents, headers, write

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
from kvstore.checkpoint.manifest import (
    Manifest,
    StoredSegment,
    StoredStore,
    from_json,
    load_manifest,
    save_manifest,
    to_json,
)
from kvstore.checkpoint.tensors import TensorHeader, opened, write_tensors
from kvstore.errors import CheckpointError
from kvstore.job.valid_values import Interval
from kvstore.sealed_folders import MANIFEST, PIECE, FileRecord, record_of
from kvstore.spec import ITEMSIZE, Spec

SPECS = {"w": Spec((2, 3), "float32"), 7: Spec((), "int64"), "e": Spec((0,), "float32")}
SEGMENTS = [
    StoredSegment(0, "w", 0, 4, 9, 0),
    StoredSegment(1, "w", 4, 6, 9, 1),
    StoredSegment(2, 7, 0, 1, 9, 0),
    StoredSegment(3, "e", 0, 0, 0, 1),
]
FILES = [FileRecord(f"store-0.server-{i}.safetensors", 10, "ab" * 32) for i in range(2)]
FILES.append(FileRecord("worker-1.safetensors", 5, "cd" * 32))
GOOD = Manifest(12, 500, 2, 2, "2026-01-01T00:00:00Z", [StoredStore(1, "sync", "adam", SPECS, SEGMENTS)], FILES, {1: 2})


def test_a_manifest_comes_back_from_its_json(tmp_path: Path) -> None:
    assert from_json(to_json(GOOD)) == GOOD
    save_manifest(tmp_path, GOOD)
    assert load_manifest(tmp_path) == GOOD
    assert GOOD.nbytes == 25


def _change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *way, last = [int(step) if step.lstrip("-").isdigit() else step for step in path.split("/")]

    def change(given: dict[str, Any]) -> None:
        at: Any = given
        for step in way:
            at = at[step]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("format", "kvstore checkpoint 9", "format"),
        ("number", -1, "integer"),
        ("rounds", 1.5, "integer"),
        ("num_servers", 0, "integer"),
        ("written", "x" * 99, "time"),
        ("files/0/name", "../../etc/passwd", "name of a checkpoint"),
        ("files/0/name", "/etc/passwd", "name of a checkpoint"),
        ("files/0/name", "store-0.server-0.safetensors\n", "name of a checkpoint"),
        ("files/1/name", "store-0.server-0.safetensors", "twice"),
        ("files/0/sha256", "AB" * 32, "sha256"),
        ("parts", [[1, 9]], "integer"),
        ("stores/0/mode", "other", "mode"),
        ("stores/0/optimizer", 5, "optimizer"),
        ("stores/0/specs/0", ["complex64", [2]], "complex64"),
        ("stores/0/specs/0", ["float32", [-6]], "integer"),
        ("stores/0/keys/0", "", "1 to 1024"),
        ("stores/0/keys", ["w", "w", "e"], "twice"),
        ("stores/0/kinds", [0], "ValueError"),
        ("stores/0/segments/0/3", 3, "gap"),
        ("stores/0/segments/1/3", 7, "7"),
        ("stores/0/segments/2/5", 3, "integer"),
        ("stores/0/segments/2/0", 0, "twice"),
        ("stores/0/segments/0", [0, 0], "ValueError"),
        ("stores", {"a": 1}, "TypeError"),
    ],
)
def test_what_does_not_hold_together_is_refused(path: str, value: Any, said: str) -> None:
    given = json.loads(to_json(GOOD))
    _change(path, value)(given)
    with pytest.raises(CheckpointError, match=said):
        from_json(json.dumps(given))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": "kvstore checkpoint 1"}', "[" * 100_000])
def test_other_files_are_no_manifests(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: damaged"):
        load_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_manifest(tmp_path)


def test_safetensors_reads_what_was_written_of_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {f"{dtype}": torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)) for dtype in ITEMSIZE}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "large": torch.rand(PIECE // 4 + 3)}
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, headers(tensors), contents(tensors), {"number": "3"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in loaded
    )
    assert record == (path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert record_of(path) == record
    with opened(path) as file:
        assert file.metadata() == {"number": "3"}


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> object:
        yield b"\0" * 4
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "a", headers({"x": torch.zeros(2)}), broken(), {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.*missing"):
        record_of(tmp_path / "gone")
    (tmp_path / "bad").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"bad.*damaged"), opened(tmp_path / "bad"):
        pass


def test_two_tensors_of_one_name_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    headers = [TensorHeader("a", "float32", [1])] * 2
    with pytest.raises(CheckpointError, match="would both have the name 'a'"):
        write_tensors(tmp_path / "out", headers, [b"0000", b"1111"], {})
    assert not list(tmp_path.iterdir())


# ---- folders of checkpoints

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
    assert meetings <= 4 * 32


def test_rounds_that_become_much_slower_put_a_checkpoint_off_by_a_few_of_them() -> None:
    """As when a worker is started again: before, the next meeting was half of the interval away, in fast rounds."""
    schedule = CheckpointSchedule(Interval(0, 1.0), 0, 0.0)
    rounds, now, meeting = 0, 0.0, schedule.first()
    while rounds < meeting or not schedule.due(rounds, now):
        if rounds >= meeting:
            meeting = schedule.next(rounds, now)
        rounds, now = rounds + 1, now + (0.003 if now < 0.1 else 0.06)
    assert now < 2.0


def test_never() -> None:
    schedule = CheckpointSchedule(Interval(), 5, 0.0)
    assert schedule.first() == NEVER
    assert not schedule.due(NEVER, 1e9)
