"""Asking for captures: each server has its own segments, and files that come later end the checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from placed import entries_for
from played_session import PlayedSession

from kvstore import wire
from kvstore.checkpoint.folders import begin
from kvstore.client.checkpoint_files import CheckpointInProgress, SavedStore, ask
from kvstore.errors import ServerError
from kvstore.spec import Spec


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
