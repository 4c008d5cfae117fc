"""A reader's key is good for reads alone; see ``test_guest_links``."""

from __future__ import annotations

import pytest
from asking import Door, sender

from kvstore import wire
from servers.requests.guest_links import ReaderLinks


def requests(role: str = "reader") -> list[wire.Request]:
    return [
        wire.Connect(sender(-1, role=role)),
        wire.ReadValues(sender(0, role=role), 0, [1], 0, [-1], 0),
        wire.Leave(sender(0, role=role), None),
    ]


def test_readers_may_connect_read_and_leave() -> None:
    links = ReaderLinks(1)
    assert [links.refusal(b"a", request) for request in requests()] == [None] * 3


@pytest.mark.parametrize("request_", requests("observer"))
def test_over_their_links_nobody_else_speaks(request_: wire.Request) -> None:
    links = ReaderLinks(1, "the readers' key", Door({b"a": "the readers' key"}))
    assert links.concerns(b"a", request_)
    [(_, refused)] = links.refusal(b"a", request_) or []
    assert isinstance(refused, wire.Failure)
    assert "the readers' key, which is good for reading alone" in refused.text
