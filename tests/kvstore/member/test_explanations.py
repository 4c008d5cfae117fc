"""Explanations in words."""

from __future__ import annotations

from kvstore.member.explanations import Explanations
from kvstore.wire import Explanation


def test_each_peer_is_named_once_with_what_it_said() -> None:
    explanations = Explanations([b"server 1", b"server 0", b"server 1", b"the scheduler"])
    explanations.take(b"server 0", Explanation(1, "waits for worker 2"))
    explanations.take(b"the scheduler", Explanation(2, ""))
    assert explanations.known == (
        "server 1 does not answer; server 0 waits for worker 2; the scheduler has not answered yet",
        ("server 1",),
    )
