"""Messages of checkpoints: what they refuse, and which of them a server remembers."""

from __future__ import annotations

import pytest

from kvstore import wire
from kvstore.errors import WireError

ME = wire.Sender(wire.Node("worker", 0, 1), 7, 7)


def test_each_segment_has_a_clock() -> None:
    capture = wire.Capture(ME, 0, 1, [1, 2], [3, 4])
    assert wire.decode(wire.encode(capture)) == capture
    with pytest.raises(WireError):
        wire.Capture(ME, 0, 1, [1, 2], [3])
    with pytest.raises(WireError, match="number"):
        wire.decode(wire.encode(wire.Capture(ME, 0, 0, [], [])))


def test_a_wait_for_a_file_is_not_remembered() -> None:
    assert wire.Capture.remembered
    assert not wire.AwaitCapture.remembered


def test_the_answer_says_what_the_file_has() -> None:
    captured = wire.Captured(7, 3, "a" * 64, [5, 6], None, "/checkpoints/round-3")
    assert wire.decode(wire.encode(captured)) == captured
    with pytest.raises(WireError, match="nbytes"):
        wire.decode(wire.encode(wire.Captured(7, -1, "a" * 64, [], "sgd", "file")))
