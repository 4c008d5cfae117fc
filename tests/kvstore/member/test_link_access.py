"""The use of links: by one thread at a time, and whole again after an exception."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from waiting import LONG

from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.member.link_access import LinkAccess


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
