"""Unanswered requests, and the use of links by one thread at a time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LONG, until

from kvstore import wire
from kvstore.errors import DeadlineExceeded, KVStoreError, ServerError, UsageError, WireError
from kvstore.member.link_access import IOLock, LinkAccess, under_way
from kvstore.member.outstanding import Effect, Outstanding, PendingRequest, Question
from kvstore.member.window import Window, WindowSize
from kvstore.ticket import Operation
from kvstore.transport.memory import ScatteredFrame

# ---- unanswered requests: which reply belongs to which, what fails, and that exceptions leave nothing half done


S0, S1 = b"server 0", b"server 1"


BARRIER = {"store": 0, "number": 0}


def added(
    outstanding: Outstanding, operation: Operation, *peers: bytes, take: Callable[[Any], None] | None = None
) -> list[PendingRequest]:
    requests: list[PendingRequest] = [Question(peer, operation, wire.Barrier, BARRIER, take) for peer in peers]
    outstanding.number(requests)
    outstanding.add(requests)
    return requests


def test_an_operation_is_done_when_all_its_requests_are() -> None:
    outstanding, operation = Outstanding(), Operation("push", ["w"])
    one, two = added(outstanding, operation, S0, S1)
    assert len(outstanding) == 2
    outstanding.settle(two, wire.Ack(two.seq), None)
    assert not operation.done()
    assert outstanding.of(operation) == {one.seq: S0}
    assert outstanding.requests_of(operation) == [one]
    outstanding.settle(one, wire.Ack(one.seq), None)
    assert operation.done()
    assert operation.wait() is None
    assert len(outstanding) == 0


def test_sequence_numbers_grow_and_done_is_below_the_oldest_open_one() -> None:
    outstanding, operation = Outstanding(), Operation("push")
    assert outstanding.done == 1
    one, two, three = added(outstanding, operation, S0, S0, S0)
    assert [one.seq, two.seq, three.seq] == [1, 2, 3]
    assert list(outstanding) == [one, two, three]
    outstanding.settle(two, wire.Ack(2), None)
    assert outstanding.done == 1
    outstanding.settle(one, wire.Ack(1), None)
    assert outstanding.done == 3
    outstanding.settle(three, wire.Ack(3), None)
    assert outstanding.done == 4


def test_who_waits_for_a_file_does_not_have_other_answers_kept() -> None:
    outstanding, operation = Outstanding(), Operation("checkpoint")
    waits = Question(S0, operation, wire.AwaitCapture, {"store": 0, "number": 1})
    outstanding.number([waits])
    outstanding.add([waits])
    assert outstanding.done == 2
    (one,) = added(outstanding, operation, S0)
    assert (one.seq, outstanding.done) == (2, 2)
    outstanding.settle(one, wire.Ack(2), None)
    assert outstanding.done == 3
    assert outstanding.find(S0, waits.seq) is waits


def test_numbers_that_were_not_used_are_given_again() -> None:
    outstanding, operation = Outstanding(), Operation("push")
    refused = Question(S0, operation, wire.Barrier, BARRIER)
    outstanding.number([refused])
    (made,) = added(outstanding, operation, S0)
    assert (refused.seq, made.seq) == (1, 1)
    assert outstanding.find(S0, 1) is made


def test_a_repeat_and_a_strangers_answer_find_nothing() -> None:
    outstanding, operation, taken = Outstanding(), Operation("pull"), []
    (request,) = added(outstanding, operation, S0, take=taken.append)
    assert outstanding.find(S1, request.seq) is None
    assert outstanding.find(S0, request.seq + 1) is None
    assert outstanding.find(S0, request.seq) is request
    outstanding.settle(request, wire.Values(request.seq, buffers=[]), None)
    assert outstanding.find(S0, request.seq) is None
    assert taken == [wire.Values(request.seq, buffers=[])]
    assert operation.done()


def test_a_failure_is_not_handed_to_whoever_takes_the_answer() -> None:
    outstanding, failed, taken = Outstanding(), [], []
    operation = Operation("pull", ["w"], None, failed.append)
    (request,) = added(outstanding, operation, S0, take=taken.append)
    outstanding.settle(request, wire.Ack(request.seq), ServerError("no"))
    assert taken == []
    assert failed == [operation]
    assert repr(operation) == "<Operation pull of 'w' failed>"
    for _ in range(2):
        with pytest.raises(ServerError, match="no"):
            operation.wait()
    assert operation.raised


def test_an_answer_that_cannot_be_taken_fails_the_operation() -> None:
    outstanding, operation = Outstanding(), Operation("pull")

    def take(reply: Any) -> None:
        raise WireError("of another length")

    (request,) = added(outstanding, operation, S0, take=take)
    outstanding.settle(request, wire.Ack(request.seq), None)
    assert operation.done()
    with pytest.raises(WireError, match="of another length"):
        operation.wait()


def test_whatever_goes_wrong_while_an_answer_is_taken_is_the_operations() -> None:
    outstanding, operation = Outstanding(), Operation("pull")
    (request,) = added(outstanding, operation, S0, take=lambda reply: [][0])
    outstanding.settle(request, wire.Ack(request.seq), None)
    with pytest.raises(KVStoreError, match="IndexError") as caught:
        operation.wait()
    assert isinstance(caught.value.__cause__, IndexError)


def test_what_is_the_callers_is_copied_once_the_call_is_over() -> None:
    """A message that refers to arrays of the caller's is whole when they change."""

    class Push(PendingRequest):
        early = False

        def message(self, sender: wire.Sender) -> wire.Message:
            return wire.Barrier(sender, **BARRIER)

    array = bytearray(b"values")
    push = Push(S0, Operation("push"))
    assert push.borrows, "it has not been made yet, and will read what is the caller's"
    push.frames = [b"head", ScatteredFrame([memoryview(array), memoryview(b"!")])]
    assert push.borrows
    push.own()
    assert not push.borrows
    array[:] = b"others"
    assert [bytes(frame) for frame in push.frames] == [b"head", b"values!"]  # type: ignore[arg-type]


# ---- exceptions at any moment


class Interrupt(Exception):
    """What the handler of a signal raises."""


class Counting(Question):
    """Its answer adds to a column, as values and counts do: what is to be after it is worked out before."""

    __slots__ = ("column",)

    def __init__(self, peer: bytes, operation: Operation, column: list[int]) -> None:
        super().__init__(peer, operation, wire.Barrier, BARRIER)
        self.column = column

    def take(self, reply: Any) -> Effect:
        after = self.column[0] + 1
        return lambda: self.column.__setitem__(0, after)


def interrupted(action: Callable[[], None], after: int) -> bool:
    """Call ``action``; raise at its line number ``after``, of this package's. Return whether it came so far."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "kvstore" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines > after:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_requests_are_added_all_or_not_at_all() -> None:
    after, made = 0, []
    while True:
        outstanding, operation, clock = Outstanding(), Operation("push"), [0]
        requests: list[PendingRequest] = [Question(peer, operation, wire.Barrier, BARRIER) for peer in (S0, S1)]
        outstanding.number(requests)

        def add(outstanding=outstanding, requests=requests, clock=clock) -> None:
            outstanding.add(requests, lambda: clock.__setitem__(0, 1))

        came = interrupted(add, after)
        outstanding.finish()
        assert not outstanding.in_doubt
        assert (len(outstanding), len(operation.open), outstanding.done, clock) in ((0, 0, 1, [0]), (2, 2, 1, [1]))
        (later,) = added(outstanding, operation, S0)
        assert later.seq == len(outstanding)
        made.append(len(outstanding) == 3)
        if not came:
            break
        after += 1
    assert made == sorted(made), "first it is not made, and from some line on it is"
    assert made[0] is False
    assert made[-1] is True


def test_an_answer_counts_once_or_not_at_all() -> None:
    after, done = 0, []
    while True:
        outstanding, operation, column = Outstanding(), Operation("push"), [0]
        request = Counting(S0, operation, column)
        outstanding.number([request])
        outstanding.add([request])

        def settle(outstanding=outstanding, request=request) -> None:
            outstanding.settle(request, wire.Ack(request.seq), None)

        came = interrupted(settle, after)
        outstanding.finish()
        assert (len(outstanding), operation.open, column) in ((0, set(), [1]), (1, {1}, [0]))
        done.append(not operation.open)
        if outstanding.find(S0, 1) is not None:  # it is asked again, and answered again
            settle()
        assert (len(outstanding), operation.open, column) == (0, set(), [1])
        if not came:
            break
        after += 1
    assert set(done) == {True, False}


def test_what_fits_goes_and_the_rest_waits_for_answers():
    window: Window[str] = Window(WindowSize(10, 10))
    for number, name in enumerate("abc"):
        window.add(number, 4, 0, name)
    assert window.ready() == ["a", "b"]
    assert window.ready() == []
    window.answered(0)
    assert window.ready() == ["c"]
    assert not len(window)


def test_a_higher_priority_overtakes_what_is_not_on_its_way():
    window: Window[str] = Window(WindowSize(1, 1))
    for number, (name, priority) in enumerate([("last", -9), ("middle", -5), ("other middle", -5), ("first", 0)]):
        window.add(number, 1, priority, name)
    seen = []
    for number in (3, 1, 2, 0):
        seen += window.ready()
        window.answered(number)
    assert seen == ["first", "middle", "other middle", "last"]


def test_until_the_first_answer_less_may_go():
    window: Window[str] = Window(WindowSize(most=3, first=1))
    for number, name in enumerate("abcde"):
        window.add(number, 1, 0, name)
    assert window.ready() == ["a"]
    window.answered(7)
    assert window.ready() == [], "that was not the answer to one of these"
    window.answered(0)
    assert window.ready() == ["b", "c", "d"]
    for number in (1, 2, 3):
        window.answered(number)
    assert window.ready() == ["e"]
    window.add(5, 1, 0, "f")
    assert window.ready() == ["f"], "something is on its way"
    window.answered(4)
    window.answered(5)
    for number, name in enumerate("gh", 6):
        window.add(number, 1, 0, name)
    assert window.ready() == ["g"], "nothing was on its way when these came"


def test_something_larger_than_the_window_goes_alone():
    window: Window[str] = Window(WindowSize(10, 10))
    window.add(1, 99, 0, "large")
    window.add(2, 1, 0, "small")
    assert window.ready() == ["large"]
    window.answered(1)
    assert window.ready() == ["small"]


def test_the_urgent_ones_do_not_wait_for_others():
    window: Window[str] = Window(WindowSize(1, 1))
    for number, name in enumerate(["a", "b1", "c", "b2"]):
        window.add(number, 1, -number, name)
    assert window.ready() == ["a"]
    assert window.urgent(lambda name: name.startswith("b")) == ["b1", "b2"]
    assert window.urgent(lambda name: name.startswith("b")) == []
    window.answered(0)
    assert window.ready() == [], "what was urgent is on its way too"
    window.answered(1)
    window.answered(3)
    assert window.ready() == ["c"]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 3), st.booleans()), max_size=20), st.integers(0, 12))
def test_everything_goes_once(requests: list[tuple[int, int, bool]], most: int):
    window: Window[int] = Window(WindowSize(most, most))
    sizes: dict[int, int] = {}
    on_way: list[int] = []
    gone: list[int] = []
    for number, (nbytes, priority, answer) in enumerate(requests):
        sizes[number] = nbytes
        window.add(number, nbytes, priority, number)
        on_way += window.ready()
        assert sum(sizes[one] for one in on_way) <= most or len(on_way) == 1
        if answer and on_way:
            gone.append(on_way.pop(0))
            window.answered(gone[-1])
    while on_way or len(window):
        on_way += window.ready()
        gone.append(on_way.pop(0))
        window.answered(gone[-1])
    assert sorted(gone) == sorted(sizes)


# ---- the use of links: by one thread at a time, and whole again after an exception


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
    with used(alone), pytest.raises(DeadlineExceeded, match=r"another thread .* used the links for 0 s"):
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
