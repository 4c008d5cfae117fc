"""The use of links: by one thread at a time, and whole again after an exception."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from waiting import LONG, until

from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.member.link_access import IOLock, LinkAccess, under_way


class PlayedLinks:
    """Links that are in doubt when a test says so, and count how often they are recovered."""

    def __init__(self) -> None:
        self.in_doubt = False
        self.blamed: BaseException | None = None
        self.recovered = 0
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()

    def recover(self) -> None:
        self.recovered += 1
        self.in_doubt = False


def access(answer_s: float = LONG) -> tuple[LinkAccess, PlayedLinks]:
    links: Any = PlayedLinks()
    return LinkAccess(links, answer_s), links


@contextmanager
def used(by: LinkAccess) -> Iterator[None]:
    """Another thread uses the links for as long as the block takes."""
    entered, over = threading.Event(), threading.Event()

    def use() -> None:
        entered.set()
        over.wait(LONG)

    thread = threading.Thread(target=by.alone, args=(use,))
    thread.start()
    assert entered.wait(LONG)
    try:
        yield
    finally:
        over.set()
        thread.join(LONG)


def test_what_the_action_returns_is_returned() -> None:
    alone, links = access()
    assert alone.alone(divmod, 7, 3) == (2, 1)
    links.in_doubt = True
    assert alone.alone(lambda: links.recovered) == 1, "links in doubt are recovered before they are used"


def test_a_call_in_the_middle_of_another_is_refused_and_the_other_goes_on() -> None:
    alone, _ = access()

    def nested() -> str:
        with pytest.raises(UsageError, match="in the middle of another call"):
            alone.alone(print)
        return "done"

    assert alone.alone(nested) == "done"
    assert alone.alone(nested) == "done"


def test_an_exception_leaves_whole_links_and_the_garbage_collector_as_it_was() -> None:
    alone, links = access()

    def fail() -> None:
        gc.disable()
        links.in_doubt = True
        raise KeyboardInterrupt

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        alone.alone(fail)
    assert gc.isenabled()
    assert (links.in_doubt, links.recovered) == (False, 1)
    with used(alone):
        """Another thread gets the lock: the exception has released it."""


def test_an_error_that_links_have_given_to_its_operation_is_not_raised_again() -> None:
    alone, links = access()

    def fail() -> None:
        links.blamed = OSError("no such peer")
        raise links.blamed

    assert alone.alone(fail) is None
    assert links.blamed is None


def test_who_yields_neither_calls_nor_interrupts() -> None:
    alone, links = access()
    calls: list[int] = []
    with used(alone):
        assert alone.alone(calls.append, 1, yielding_s=0.0) is None
        assert not links.interrupted.is_set()
    assert calls == []
    alone.alone(calls.append, 1, yielding_s=0.0)
    assert calls == [1]


def test_a_thread_that_keeps_the_links_too_long_is_an_error_of_who_waits() -> None:
    alone, links = access(0.0)
    with (
        used(alone),
        pytest.raises(DeadlineExceeded, match=r"another thread .* used the links for 0 s"),
    ):
        alone.alone(print)
    assert links.interrupted.is_set()


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
