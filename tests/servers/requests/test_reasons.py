"""What a request waits for, as it is answered."""

from __future__ import annotations

from kvstore import wire
from servers.requests.reasons import Reason


def test_a_reason_is_an_answer_with_the_workers_in_order() -> None:
    assert Reason("waits for both", {4, 1}).reply(7) == wire.Explanation(7, "waits for both", [1, 4])
    assert Reason().reply(7) == wire.Explanation(7, "", [])


def test_a_long_reason_is_cut() -> None:
    assert len(Reason("x" * (wire.MAX_REASON + 1)).reply(1).text) == wire.MAX_REASON
