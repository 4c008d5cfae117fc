"""Trackers of functions and files, and what the documentation shows of other libraries, against their signatures."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import re
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore as kv
from workers.callbacks import CSVRows, JSONLines, Log, TensorBoard, tracker_of
from workers.callbacks.trackers import LineFile, tracker_by_path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "callbacks.md"


def test_a_tracker_of_functions() -> None:
    calls: list[Any] = []
    tracker = tracker_of(lambda values, step: calls.append((values, step)), lambda: calls.append("close"))
    tracker.log({"loss": 0.5}, 1)
    tracker.close()
    tracker_of(print).close()
    assert calls == [({"loss": 0.5}, 1), "close"]


class FakeWandb(ModuleType):
    """W&B, as far as a log needs it, with the signatures of wandb 0.31."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__("wandb")
        self.calls = calls

    def init(
        self,
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        *,
        resume: bool | str | None = None,
    ) -> Any:
        self.calls.append(("init", project, id, resume))

        def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert type(data) is dict
            assert commit is None
            self.calls.append((data, step))

        def finish(exit_code: int | None = None) -> None:
            self.calls.append(("finish", exit_code))

        return SimpleNamespace(log=log, finish=finish)


class FakeMlflow(ModuleType):
    """MLflow, as far as a log needs it, with the signatures of mlflow 3.17."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__("mlflow")
        self.calls = calls

    def start_run(
        self,
        run_id: str | None = None,
        experiment_id: str | None = None,
        run_name: str | None = None,
        nested: bool = False,
    ) -> None:
        self.calls.append(("init", run_name, run_id, nested))

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
        timestamp: int | None = None,
    ) -> None:
        assert (synchronous, run_id, timestamp) == (None, None, None)
        self.calls.append((metrics, step))

    def end_run(self, status: str = "FINISHED") -> None:
        self.calls.append(("finish", None if status == "FINISHED" else status))


@pytest.mark.parametrize("fake", [FakeWandb, FakeMlflow])
def test_what_the_reference_shows_of_other_libraries_works(fake: type, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = fake(calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if f"import {module.__name__}" in block)
    names: dict[str, Any] = {}
    exec(block, names)  # of our own documentation
    (log,) = (thing for thing in names.values() if isinstance(thing, Log))
    assert calls == []
    log.log({"loss": 0.5}, step=7)
    log.close()
    assert calls[0][0] == "init"
    assert calls[1:] == [({"loss": 0.5}, 7), ("finish", None)]


def appended(path: Path, *lines: str) -> str:
    file = LineFile(path, b"{")
    for line in lines:
        file.append(line)
    file.close()
    return path.read_text()


def test_lines_are_appended_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    assert appended(path, "{1}\n", "{2}\n") == "{1}\n{2}\n"
    assert appended(path, "{3}\n") == "{1}\n{2}\n{3}\n"


@pytest.mark.parametrize("length", [2, 70_000, 200_000])  # within one block of what is read, and over several
def test_a_last_line_without_its_end_is_cut_off(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{1}\n{" + "x" * length)
    assert appended(path, "{2}\n") == "{1}\n{2}\n"
    path.write_text("{" + "x" * length)
    assert appended(path, "{2}\n") == "{2}\n"


@pytest.mark.parametrize("content", ["step\n", "[1]", "\n{"])
def test_somebody_elses_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(kv.UsageError, match=r"a\.jsonl has other content, .*; choose another name"):
        LineFile(path, b"{")
    assert path.read_text() == content


def test_of_a_line_that_does_not_fit_on_the_disk_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    file = LineFile(path, b"{")
    file.append("{1}\n")
    write, room = os.write, [2]

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(fd, data[: room.pop()])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space left"):
            file.append("{22}\n")
    file.append("{3}\n")
    file.close()
    assert path.read_text() == "{1}\n{3}\n"


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_line_is_an_object_also_of_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tracker = JSONLines(path)
    tracker.log({"loss": 0.1, "epoch": 3, 'a"b': 1e-300}, 50)
    tracker.log({"nan": math.nan, "up": math.inf, "down": -math.inf}, 51)
    tracker.close()
    first, second = rows(path)
    assert first.pop("wall_time") > second.pop("wall_time") - 60
    assert first == {"step": 50, "loss": 0.1, "epoch": 3, 'a"b': 1e-300}
    assert second == {"step": 51, "nan": None, "up": math.inf, "down": -math.inf}


def write_for_ever(paths: tuple[Path, Path], tells: int) -> None:
    trackers = [JSONLines(paths[0]), CSVRows(paths[1])]
    for step in count():
        for tracker in trackers:
            tracker.log({"loss": step / 7, f"value {step // 50 % 40}": step}, step)
        if step == 300:
            os.write(tells, b"on")


def test_a_writer_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    paths = tmp_path / "run.jsonl", tmp_path / "run.csv"
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(paths, tells)
        finally:
            os._exit(1)
    os.close(tells)
    assert os.read(told, 2) == b"on"
    os.close(told)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    texts = [path.read_text() for path in paths]
    assert all(text.endswith("\n") for text in texts)
    fields = [line.split(",") for line in texts[1].splitlines()]
    assert {len(row) for row in fields} == {len(fields[0])}
    for steps in ([int(row["step"]) for row in rows(paths[0])], [int(row[0]) for row in fields[1:]]):
        assert steps == list(range(len(steps)))
        assert len(steps) > 300


@pytest.mark.parametrize(("path", "kind"), [("a/run.jsonl", JSONLines), ("run.csv", CSVRows), ("runs/", TensorBoard)])
def test_a_path_stands_for_a_tracker(path: str, kind: type) -> None:
    factory = tracker_by_path(path)
    assert isinstance(factory, partial)
    assert (factory.func, factory.args) == (kind, (path,))


@pytest.mark.parametrize("path", ["run.txt", "runs", Path("runs/"), ""])
def test_another_end_is_an_error(path: str | Path) -> None:
    with pytest.raises(kv.UnknownName, match=r"end it in \.jsonl \(JSON lines\), \.csv, or / \(a folder"):
        tracker_by_path(path)


# ---- Rows of CSV


def write_rows(path: Path, *calls: Mapping[str, float], start: int = 0) -> None:
    tracker = CSVRows(path)
    for step, values in enumerate(calls, start):
        tracker.log(values, step)
    tracker.close()


def read(path: Path) -> list[dict[str, float]]:
    """What a reader of CSV sees, without the times and without empty fields."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}
    found = [{name: float(text) for name, text in zip(rows[0], row, strict=True) if text} for row in rows[1:]]
    return [{name: value for name, value in row.items() if name != "wall_time"} for row in found]


def test_new_names_are_new_columns_also_when_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.csv"
    write_rows(path, {"loss": 0.25}, {"accuracy": 0.5}, {"loss": 0.125, "epoch": 1})
    write_rows(path, {"accuracy": 0.75, "top, 5": 1.0}, start=3)
    assert path.read_text().splitlines()[0] == 'step,wall_time,loss,accuracy,epoch,"top, 5"'
    assert read(path) == [
        {"step": 0, "loss": 0.25},
        {"step": 1, "accuracy": 0.5},
        {"step": 2, "loss": 0.125, "epoch": 1},
        {"step": 3, "accuracy": 0.75, "top, 5": 1.0},
    ]
    assert [file.name for file in path.parent.iterdir()] == ["run.csv"]


def test_nothing_is_rewritten_while_names_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write_rows(path, {"loss": 1.0})
    inode = path.stat().st_ino
    write_rows(path, {"loss": 2.0}, {"loss": math.inf}, {"loss": math.nan}, start=1)
    assert path.stat().st_ino == inode
    assert [repr(row["loss"]) for row in read(path)] == ["1.0", "2.0", "inf", "nan"]


def test_a_row_without_its_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write_rows(path, {"loss": 1.0}, {"loss": 2.0})
    path.write_bytes(path.read_bytes()[:-3])
    write_rows(path, {"loss": 3.0}, start=1)
    assert read(path) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 3.0}]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "run.csv")
    write_rows(link, {"loss": 1.0})
    assert link.is_symlink()
    assert read(link) == [{"step": 0, "loss": 1.0}]


@pytest.mark.parametrize("content", ["time,loss\n1,2\n", "step,wall_times\n1,2\n"])
def test_somebody_elses_csv_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(content)
    with pytest.raises(kv.UsageError, match="choose another name"):
        CSVRows(path)
    assert path.read_text() == content


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=4)
CALLS = st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=4), max_size=6)


@settings(max_examples=10, deadline=None)
@given(CALLS, CALLS)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, calls: list[dict[str, float]], more: list[dict[str, float]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "run.csv"
    write_rows(path, *calls)
    write_rows(path, *more, start=len(calls))
    if calls or more:
        assert read(path) == [{"step": step, **values} for step, values in enumerate([*calls, *more])]


# ---- TensorBoard's event files, read back record by record with their checksums


def masked_crc(data: bytes) -> int:
    """The checksum of TFRecord: CRC-32C (Castagnoli), rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        header, (length,) = data[at : at + 8], struct.unpack_from("<Q", data, at)
        content = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 8) == (masked_crc(header),)
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc(content),)
        yield content
        at += 16 + length


def events(path: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    return [Event.FromString(record) for record in records(path.read_bytes())]


def shown(folder: Path) -> list[tuple[str, int, float]]:
    """The scalars that TensorBoard shows: of an earlier file, none from where a later one begins anew."""
    from tensorboardX.proto.event_pb2 import SessionLog

    scalars: list[tuple[str, int, float]] = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in events(path):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                scalars = [scalar for scalar in scalars if scalar[1] < event.step]
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return scalars


def write(folder: Path, *losses: float, start: int = 0) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    tracker = TensorBoard(folder)
    for step, loss in enumerate(losses, start):
        tracker.log({"batch/loss": loss, "epoch": 1}, step)
    tracker.close()


def test_scalars_come_back(tmp_path: Path) -> None:
    write(tmp_path / "runs", 0.5, 0.25)
    (path,) = (tmp_path / "runs").iterdir()
    assert events(path)[0].file_version == "brain.Event:2"
    assert shown(tmp_path / "runs") == [
        ("batch/loss", 0, 0.5),
        ("epoch", 0, 1.0),
        ("batch/loss", 1, 0.25),
        ("epoch", 1, 1.0),
    ]


def test_a_tracker_without_values_makes_no_file(tmp_path: Path) -> None:
    write(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_what_a_resumed_run_makes_again_is_hidden(tmp_path: Path) -> None:
    write(tmp_path / "first", 0.5, 0.25, 0.125)
    (tmp_path / "first").rename(tmp_path / "second")  # as if another process had written it
    write(tmp_path / "second", 0.75, start=1)
    losses = [scalar for scalar in shown(tmp_path / "second") if scalar[0] == "batch/loss"]
    assert losses == [("batch/loss", 0, 0.5), ("batch/loss", 1, 0.75)]


def test_a_tracker_that_is_opened_again_in_the_same_second_hides_and_replaces_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0.5, 0.25)
    write(tmp_path, 0.125, start=1)
    assert [value for name, _, value in shown(tmp_path) if name == "batch/loss"] == [0.5, 0.25, 0.125]


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(kv.UsageError, match=r"pip install 'torch-kvstore\[tensorboard\]'"):
        TensorBoard(tmp_path)
