"""How long callers have waited, by a clock that the test moves."""

from __future__ import annotations

import threading

from kvstore.member.mutual_waits import BlockedTime


def wait(blocked: BlockedTime, began: float, ended: float) -> None:
    waits = blocked.here()
    waits.over_s += ended - began


def test_waits_add_up_and_one_that_goes_on_counts():
    blocked = BlockedTime()
    assert blocked.total(5.0) == 0.0
    wait(blocked, 10.0, 13.0)
    assert blocked.total(20.0) == 3.0
    blocked.here().since = 21.0
    assert blocked.total(25.0) == 7.0


def test_each_thread_waits_for_itself():
    blocked = BlockedTime()
    blocked.here().since = 1.0
    other = threading.Thread(target=wait, args=(blocked, 2.0, 5.0))
    other.start()
    other.join()
    assert blocked.total(6.0) == 5.0 + 3.0
    blocked.here().since = 0.0
    assert blocked.total(9.0) == 3.0


def test_a_wait_that_begins_while_it_is_counted_is_not_counted_below_zero() -> None:
    blocked = BlockedTime()
    blocked.here().since = 7.5
    assert blocked.total(7.0) == 0.0
