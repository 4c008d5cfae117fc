"""The I/O lock: one thread at a time, senders before receivers, and no thread that an exception has thrown out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from waiting import LONG, until

from kvstore.member.link_access import IOLock, under_way


class Interrupts:
    """Counts how often whoever waits for messages was told to return."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(LONG)
    return results[0]


def test_one_thread_has_it_and_another_does_not() -> None:
    lock = IOLock(Interrupts())
    assert not lock.entered
    assert lock.acquire(LONG)
    assert lock.entered
    assert in_thread(lambda: (lock.try_acquire(), lock.entered)) == (False, False)
    lock.release()
    assert not lock.entered
    assert in_thread(lambda: (lock.try_acquire(), lock.release(), lock.entered)) == (True, None, False)


def test_a_sender_interrupts_who_has_it_and_gives_up_at_its_deadline() -> None:
    interrupts = Interrupts()
    lock = IOLock(interrupts)
    assert lock.acquire(LONG)
    assert interrupts.count == 0, "nobody was in the way"
    assert in_thread(lambda: lock.acquire(0.01)) is False
    assert interrupts.count == 1
    lock.release()
    assert lock.try_acquire(), "a sender that has given up is in nobody's way"
    lock.release()


def test_whoever_receives_lets_a_sender_go_first() -> None:
    interrupts = Interrupts()
    lock = IOLock(interrupts)
    assert lock.acquire(LONG)
    done: list[bool] = []

    def send() -> None:
        done.append(lock.acquire(LONG))
        lock.release()

    sender = threading.Thread(target=send)
    sender.start()
    until(lambda: interrupts.count == 1, "the sender to wait")
    assert in_thread(lock.try_acquire) is False
    lock.release()
    sender.join(LONG)
    assert done == [True]
    assert lock.try_acquire()
    lock.release()


def test_let_go_gives_back_whatever_there_is() -> None:
    lock = IOLock(Interrupts())
    lock.let_go()
    for _ in range(3):  # an exception may have come between taking it and noting that
        assert lock.acquire(LONG)
    lock.let_go()
    assert not lock.entered
    assert in_thread(lambda: (lock.acquire(0.0), lock.release()))[0] is True


def test_a_sleeper_is_woken_when_it_is_given_back() -> None:
    lock = IOLock(Interrupts())
    for give_back in (lock.release, lock.let_go):
        assert lock.acquire(LONG)
        awake = threading.Event()

        def sleep(awake: threading.Event = awake) -> None:
            lock.sleep(LONG)
            awake.set()

        thread = threading.Thread(target=sleep)
        thread.start()
        until(lambda: lock.sleepers == 1, "the other to sleep")
        assert not awake.is_set()
        give_back()
        assert awake.wait(LONG)
        thread.join(LONG)


def test_who_would_sleep_while_it_is_free_does_not() -> None:
    lock = IOLock(Interrupts())
    lock.sleep(LONG)
    assert not lock.entered


def test_wake_interrupts_and_rouses() -> None:
    interrupts = Interrupts()
    lock = IOLock(interrupts)
    assert lock.acquire(LONG)
    thread = threading.Thread(target=lambda: lock.sleep(LONG))
    thread.start()
    until(lambda: lock.sleepers == 1, "the other to sleep")
    lock.wake()
    thread.join(LONG)
    assert not thread.is_alive()
    assert interrupts.count == 1
    lock.release()


def test_under_way_sees_calls_further_out_and_not_the_one_that_asks() -> None:
    def ask() -> bool:
        return under_way(ask.__code__)

    def nested(depth: int) -> bool:
        return under_way(nested.__code__) if depth == 0 else nested(depth - 1)

    assert not ask()
    assert not nested(0)
    assert nested(1)
