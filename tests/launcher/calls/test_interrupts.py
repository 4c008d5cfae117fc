from __future__ import annotations

import os
import selectors
import signal
import threading

from launcher.calls.interrupts import TIME_LIMIT, Interrupts
from launcher.supervision.signals import CHILD


def taken(interrupts: Interrupts) -> list[int]:
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        assert selector.select(60)
        return interrupts.take()


def test_the_first_signal_is_remembered_and_a_childs_end_is_none() -> None:
    with Interrupts(None) as interrupts:
        os.kill(os.getpid(), CHILD)
        assert taken(interrupts) == [CHILD]
        assert interrupts.first is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert taken(interrupts) == [signal.SIGTERM, signal.SIGINT]
    assert interrupts.first == signal.SIGTERM


def test_a_time_limit_comes_as_a_signal_does() -> None:
    with Interrupts(0.01) as interrupts:
        assert taken(interrupts) == [TIME_LIMIT]
    assert interrupts.first == TIME_LIMIT


def test_a_limit_that_is_not_reached_leaves_no_thread() -> None:
    before = threading.active_count()
    with Interrupts(600.0):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_elsewhere_than_in_the_main_thread_handlers_stay_and_children_may_always_have_ended() -> None:
    seen: list[object] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with Interrupts(0.01) as interrupts:
            seen.append(signal.getsignal(signal.SIGTERM) is before)
            seen.append(taken(interrupts))
            seen.append(interrupts.take())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert seen == [True, [TIME_LIMIT, CHILD], [CHILD]]
