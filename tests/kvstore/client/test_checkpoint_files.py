"""One checkpoint, from servers' answers to the manifest: what is missing or elsewhere makes none."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from placed import entries_for
from played_session import PlayedSession
from waiting import LONG

from kvstore import wire
from kvstore.checkpoint.folders import begin, listed, part_of, promise_of
from kvstore.checkpoint.manifest import load_manifest
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.client.checkpoint_files import CheckpointInProgress, SavedStore, ask
from kvstore.client.entries import Entries, SegmentColumns
from kvstore.errors import ServerError
from kvstore.manifests import FileRecord
from kvstore.spec import Spec


class Case:
    """A checkpoint of one array of four elements, cut across two servers."""

    def __init__(self, directory: Path, parts: tuple[int, ...] = (), timeout_s: float = 0.05) -> None:
        columns = SegmentColumns(*(np.array(column, np.int64) for column in ([2], [4, 5], [0, 1], [0, 2], [2, 4])))
        entries = Entries.of(["w"], [0], [Spec((4,), "float32")], columns)
        self.folder = begin(directory, 1)
        self.outcome: bool | None = None
        self.over = threading.Event()
        store = SavedStore(3, 2, "sync", entries, [9])
        self.saving = CheckpointInProgress(self.folder, 1, 9, 2, 2, [store], parts, 3, timeout_s, self._ended)

    def _ended(self, whole: bool) -> None:
        self.outcome = whole
        self.over.set()

    def write(self, server: int) -> FileRecord:
        header = TensorHeader(f"{4 + server}/value", "float32", [2])
        return write_tensors(self.folder / f"store-3.server-{server}.safetensors", [header], [bytes(8)], {})

    def answer(self, server: int, record: FileRecord, optimizer: str = "sgd") -> None:
        captured = wire.Captured(1, record.nbytes, record.sha256, [9], optimizer, f"/there/{server}")
        self.saving.take((0, server), captured)

    def ended(self) -> bool:
        assert self.over.wait(20)
        assert self.saving.join(20)
        return bool(self.outcome)


def test_the_manifest_is_written_when_all_servers_have_answered(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.answer(0, case.write(0))
    assert case.saving.open
    assert not listed(tmp_path)[0].whole
    case.answer(1, case.write(1))
    assert case.ended()
    manifest = load_manifest(case.folder)
    assert [(part.id, part.start, part.stop, part.clock) for part in manifest.stores[0].segments] == [
        (4, 0, 2, 9),
        (5, 2, 4, 9),
    ]
    assert manifest.stores[0].ordinal == 2


def test_files_that_worker_0_does_not_see_make_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path)
    case.answer(0, case.write(0))
    case.answer(1, FileRecord("elsewhere", 5, "ab" * 32))
    assert not case.ended()
    assert "server 1 has written /there/1, and worker 0 does not find it" in caplog.text
    assert listed(tmp_path) == []


def test_a_part_that_is_given_up_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, (1,), timeout_s=LONG)
    promise_of(case.folder, 1).touch()
    case.answer(0, case.write(0))
    case.answer(1, case.write(1))
    assert case.saving.open
    promise_of(case.folder, 1).unlink()
    assert not case.ended()
    assert "worker 1 could not write" in caplog.text
    assert case.saving.failed


def test_a_part_that_comes_takes_its_promise_with_it(tmp_path: Path) -> None:
    case = Case(tmp_path, (1,), timeout_s=LONG)
    promise_of(case.folder, 1).touch()
    case.answer(0, case.write(0))
    case.answer(1, case.write(1))
    write_tensors(part_of(case.folder, 1), [], [], {"state": "{}"})
    assert case.ended()
    assert {path.suffix for path in case.folder.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("parts", [(), (1,)])
def test_an_optimizer_that_changes_or_a_worker_that_says_nothing(tmp_path: Path, parts: tuple[int, ...]) -> None:
    case = Case(tmp_path, parts)
    for rank in parts:
        promise_of(case.folder, rank).touch()
    case.answer(0, case.write(0))
    case.answer(1, case.write(1), "sgd" if parts else "adam")
    assert not case.ended()
    assert listed(tmp_path) == []


def test_a_server_that_fails_gives_it_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path)
    with caplog.at_level(logging.ERROR):
        case.saving.fail(ServerError("disk full"))
        case.saving.fail(ServerError("again"))
        assert not case.ended()
    assert "no checkpoint 1, and training goes on: disk full" in caplog.text
    assert "again" not in caplog.text


class Begun:
    """A checkpoint of an array that is cut across two servers; none of them has written its file."""

    def __init__(self, directory: Path) -> None:
        self.outcomes: list[bool] = []
        self.over = threading.Event()
        self.session = PlayedSession(answer=self._answer)
        entries = entries_for({"cut": Spec((6,), "float32")}, servers=2, bound=5)
        self.stores = [SavedStore(7, 1, "sync", entries, [9])]
        self.saving = CheckpointInProgress(begin(directory, 1), 1, 9, 2, 2, self.stores, (), 3, 0.05, self._ended)

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        return wire.Ack(request.seq) if isinstance(request, wire.Capture) else None

    def _ended(self, whole: bool) -> None:
        self.outcomes.append(whole)
        self.over.set()


def test_all_servers_note_their_segments_before_any_file_is_awaited(tmp_path: Path) -> None:
    begun = Begun(tmp_path)
    answers = ask(begun.session, begun.saving, begun.stores)  # type: ignore[arg-type]
    kinds = [(peer, type(message)) for peer, message in begun.session.asked]
    both = [b"server 0", b"server 1"]
    assert kinds == [(peer, kind) for kind in (wire.Capture, wire.AwaitCapture) for peer in both]
    captures = [message for _, message in begun.session.asked[:2]]
    expected = begun.stores[0].captures()
    assert [(message.ids, message.clocks) for message in captures] == [expected[0], expected[1]]
    assert {(message.store, message.number) for _, message in begun.session.asked} == {(7, 1)}
    assert len(answers.open) == 2
    assert begun.saving.open


def test_an_error_gives_the_checkpoint_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = Begun(tmp_path)
    answers = ask(begun.session, begun.saving, begun.stores)  # type: ignore[arg-type]
    answers.fail(ServerError("disk full"))
    assert begun.over.wait(20)
    assert begun.outcomes == [False]
    assert isinstance(answers.error, ServerError)
    assert "disk full" in caplog.text
