from __future__ import annotations

import os

import pytest

from servers.reading.pace import ARRIVAL_S, BURST_S, DEBT_S, FOLLOW_SHARE, IDLE_SHARE, IdleCores, ReaderPace
from servers.requests.replies import Outbox


class Desk:
    """Work of so many seconds a piece."""

    def __init__(self, piece_s: float) -> None:
        self.busy = True
        self.taken = self.followed = 0
        self.follows = False  # whether the work is for followers
        self.pieces = 0
        self.spent = 0.0
        self.now = 0.0
        self._piece_s = piece_s

    def step(self, nbytes: int) -> Outbox:
        self.pieces += 1
        self.spent += self._piece_s
        self.now += self._piece_s
        return []


def run(desk: Desk, pace: ReaderPace, seconds: float) -> float:
    """Do the work when it is due; return which share of the time it took."""
    begin, spent = desk.now, desk.spent
    while desk.now < begin + seconds:
        due = pace.due()
        assert due is not None
        if due <= desk.now:
            pace.do()
        else:
            desk.now = due
    return (desk.spent - spent) / (desk.now - begin)


def pace_of(desk: Desk, share: float, idle: tuple[float, int] = (0.0, 2)) -> ReaderPace:
    return ReaderPace(desk, share, lambda: desk.now, lambda: desk.spent, lambda: idle)


MORE = 0.01 + IDLE_SHARE


@pytest.mark.parametrize(
    ("idle", "expected"), [((0.0, 2), 0.01), ((1.2, 2), 0.01), ((1.9, 2), MORE), ((15.0, 32), 0.01), ((17.0, 32), MORE)]
)
def test_readers_get_a_share_of_the_time(idle: tuple[float, int], expected: float) -> None:
    desk = Desk(0.0001)
    assert run(desk, pace_of(desk, 0.01, idle), 50.0) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("share", "expected"), [(0.0025, FOLLOW_SHARE), (0.1, 0.1)])
def test_followers_get_a_share_of_their_own_where_that_is_more(share: float, expected: float) -> None:
    desk = Desk(0.0001)
    desk.follows = True
    assert run(desk, pace_of(desk, share), 50.0) == pytest.approx(expected, rel=0.1)


def test_messages_of_followers_are_charged_by_their_share() -> None:
    desk = Desk(0.0)
    pace = pace_of(desk, FOLLOW_SHARE / 10)
    desk.taken = desk.followed = int(2 * BURST_S / ARRIVAL_S)
    assert pace.due() == desk.now
    desk.taken = desk.followed = int(20 * BURST_S / ARRIVAL_S)
    due = pace.due()
    assert due is not None
    assert due > desk.now


def test_long_pieces_are_paid_for() -> None:
    desk = Desk(0.04)
    assert run(desk, pace_of(desk, 0.01), 1000.0) <= 0.0101


def test_a_pause_that_nobody_asked_for_is_not_paid_for_in_full() -> None:
    desk = Desk(10.0)
    pace = pace_of(desk, 0.01)
    pace.do()
    waits = 0.0
    while (due := pace.due()) is not None and due > desk.now:
        waits, desk.now = waits + due - desk.now, due
    assert waits < 1.1 * DEBT_S / 0.01


def test_without_readers_nothing_is_due() -> None:
    desk = Desk(0.0)
    desk.busy = False
    assert pace_of(desk, 0.01).due() is None


def test_only_so_much_is_saved_up() -> None:
    desk = Desk(0.001)
    pace = pace_of(desk, 0.01)
    desk.now = 1e6
    while pace.due() == desk.now or pace.due() == 1e6:
        pace.do()
        if desk.pieces > 100:
            break
    assert desk.pieces <= 2 * BURST_S / 0.001


def test_what_is_due_keeps_its_time_until_it_is_done() -> None:
    desk = Desk(0.0001)
    pace = pace_of(desk, 0.01)
    since = pace.due()
    desk.now += 1.0
    assert pace.due() == since
    pace.do()
    assert pace.due() == desk.now


def test_messages_are_charged() -> None:
    desk = Desk(0.0)
    pace = pace_of(desk, 0.01)
    desk.taken = int(2 * BURST_S / ARRIVAL_S)
    due = pace.due()
    assert due is not None
    assert due > desk.now


def test_idle_cores_are_counted_where_this_process_may_run() -> None:
    now, ticks = [0.0], [0]
    hz = os.sysconf("SC_CLK_TCK")

    def read() -> str:
        return f"cpu 0 0 0 9 0\ncpu0 1 1 1 {ticks[0]} {ticks[0]}\ncpu1 1 1 1 {5 * ticks[0]} 0\nintr 5\n"

    idle = IdleCores(lambda: now[0], read, lambda: {0})
    assert idle() == (0.0, 1)
    now[0], ticks[0] = 2.0, hz // 2
    assert idle() == (pytest.approx(0.5), 1)


@pytest.mark.parametrize("text", ["", "cpu0\n", "cpu0 a b c d e\n"])
def test_without_counts_no_core_is_idle(text: str) -> None:
    idle = IdleCores(lambda: 0.0, lambda: text, lambda: {0})
    assert [idle()[0], idle()[0]] == [0.0, 0.0]
