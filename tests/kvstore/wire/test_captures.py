"""Messages of checkpoints: what they refuse, and which of them a server remembers."""

from __future__ import annotations

import pytest

from kvstore.errors import WireError
from kvstore.wire import AwaitCapture, Capture, Captured, Node, Sender, decode, encode

ME = Sender(Node("worker", 0, 1), 7, 7)


def test_each_segment_has_a_clock() -> None:
    capture = Capture(ME, 0, 1, [1, 2], [3, 4])
    assert decode(encode(capture)) == capture
    with pytest.raises(WireError):
        Capture(ME, 0, 1, [1, 2], [3])
    with pytest.raises(WireError, match="number"):
        decode(encode(Capture(ME, 0, 0, [], [])))


def test_a_wait_for_a_file_is_not_remembered() -> None:
    assert Capture.remembered
    assert not AwaitCapture.remembered


def test_the_answer_says_what_the_file_has() -> None:
    captured = Captured(7, 3, "a" * 64, [5, 6], None, "/checkpoints/round-3")
    assert decode(encode(captured)) == captured
    with pytest.raises(WireError, match="nbytes"):
        decode(encode(Captured(7, -1, "a" * 64, [], "sgd", "file")))
