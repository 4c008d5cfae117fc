"""How long callers have waited, by a clock that the test moves."""

from __future__ import annotations

import threading

from kvstore.member.blocked_time import BlockedTime


def test_waits_add_up_and_one_that_goes_on_counts():
    blocked = BlockedTime()
    assert blocked.total(5.0) == 0.0
    blocked.begin(10.0)
    assert blocked.total(12.0) == 2.0
    blocked.end(13.0)
    assert blocked.total(20.0) == 3.0
    blocked.begin(21.0)
    blocked.end(22.0)
    assert blocked.total(30.0) == 4.0


def test_each_thread_waits_for_itself():
    blocked = BlockedTime()
    blocked.begin(1.0)
    other = threading.Thread(target=lambda: (blocked.begin(2.0), blocked.end(5.0)))
    other.start()
    other.join()
    assert blocked.total(6.0) == 5.0 + 3.0
    blocked.end(6.0)
    assert blocked.total(9.0) == 8.0


def test_a_wait_whose_end_was_cut_off_is_over_when_the_next_begins():
    blocked = BlockedTime()
    blocked.begin(1.0)
    blocked.begin(100.0)
    blocked.end(101.0)
    assert blocked.total(200.0) == 1.0
