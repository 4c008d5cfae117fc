"""Signs of life, with a clock that moves as the heartbeat waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from inproc import InprocNetwork

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost
from kvstore.member import heartbeat as heartbeats
from kvstore.member.heartbeat import CLOCK_S, REDIAL_S, Heartbeat, Listener
from kvstore.tracer import Tracer

INTERVAL, LIMIT = 1.0, 5.0


class Scheduler:
    """Plays the far end: after each beat ``answer`` says what comes back, and may stop the heartbeat."""

    def __init__(
        self,
        answer: Callable[[int], list[Any]],
        beside: Callable[[], Any] | None = None,
        limit_s: float = LIMIT,
        report: Callable[[], wire.Message | None] | None = None,
    ) -> None:
        self.answer = answer
        self.beats: list[tuple[float, wire.Message]] = []
        self.inbox: list[Any] = []
        self.now = 100.0
        self.closed = False
        self.notices: list[wire.Message] = []
        self.lost: list[KVStoreError] = []
        self.dialled = 0
        self.back: list[float] = []
        self.heartbeat = Heartbeat(
            lambda: self,  # type: ignore[arg-type, return-value]
            "inproc://scheduler",
            wire.Node("worker", 3, 1),
            INTERVAL,
            limit_s,
            lambda: self.now,
            Listener(
                lambda notice: self.on_notice(notice),
                self.lost.append,
                lambda: self.back.append(self.now),
                lambda window: self.heartbeat.trace(Tracer(window, lambda: self.now)),
            ),
            beside,
            report=report,
        )

    def on_notice(self, notice: wire.Message) -> None:
        self.notices.append(notice)

    def run(self) -> None:
        self.heartbeat.run()
        assert self.closed

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        assert endpoint == "inproc://scheduler"
        self.dialled += 1
        return b"scheduler"

    def send(self, peer: bytes, frames: Any, priority: int | None = None) -> None:
        assert peer == b"scheduler"
        self.beats.append((self.now, wire.decode(frames)))
        self.inbox += self.answer(len(self.beats))

    def recv(self, timeout: float) -> Any:
        if self.inbox:
            message = self.inbox.pop(0)
            return b"scheduler", message if isinstance(message, list) else wire.encode(message)
        self.now += timeout
        return None

    def interrupt(self) -> None:
        pass

    def abandon(self) -> None:
        self.inbox.clear()

    def close(self, linger: float = 0.0) -> None:
        self.closed = True


def until(count: int, then: Callable[[int], list[Any]] = lambda n: [wire.Alive()], limit_s: float = LIMIT) -> Scheduler:
    """A scheduler that answers as ``then`` says and ends the heartbeat at its beat number ``count``."""

    def answer(number: int) -> list[Any]:
        if number == count:
            played.heartbeat.stop()
        return then(number)

    played = Scheduler(answer, limit_s=limit_s)
    return played


def test_it_beats_at_its_interval_and_says_who_it_is():
    played = until(5)
    played.run()
    assert played.beats == [(100.0 + n * INTERVAL, wire.Beat(wire.Node("worker", 3, 1))) for n in range(5)]
    assert played.lost == played.notices == []


def test_notices_are_passed_on_in_order():
    played = until(3, lambda n: [wire.Alive(), wire.JobFailed("x"), wire.Stop()] if n == 2 else [wire.Alive()])
    played.run()
    assert played.notices == [wire.JobFailed("x"), wire.Stop()]


def test_it_says_what_it_is_told_to_between_two_beats_and_in_order():
    notices = [wire.ProcessAlive(wire.Node("worker", 3, 1)), wire.ProcessAlive(wire.Node("worker", 4, 1))]

    def answer(number: int) -> list[Any]:
        if number == 2:  # as another thread would
            for notice in notices:
                played.heartbeat.say(notice)
        return [wire.Alive()]

    played = until(5, answer)
    played.run()
    assert [said for _, said in played.beats if not isinstance(said, wire.Beat)] == notices
    assert [when for when, said in played.beats if said in notices] == [101.0, 101.0], "at once"


def test_it_beats_at_once_over_a_link_that_was_made_anew():
    """The scheduler may be another process now, which says at a beat what this one has missed."""
    played = until(4, lambda n: [[]] if n == 2 else [wire.Alive()])
    played.run()
    assert [at for at, _ in played.beats] == [100.0, 101.0, 101.0, 102.0]
    assert played.lost == played.notices == []


def test_when_a_trace_begins_clocks_are_compared_before_the_next_beat_is_due():
    """What is noted of the first rounds may leave with that beat, and is to say how far the clocks are apart."""
    played = until(4, lambda n: [wire.Alive(traced=[7, 9])] if n == 2 else [])
    played.run()
    assert [at for at, _ in played.beats] == pytest.approx([100.0, 101.0, 101.0 + CLOCK_S, 101.0 + 2 * CLOCK_S])
    assert [said.sent > 0 for _, said in played.beats if isinstance(said, wire.Beat)] == [False, False, True, True]


def test_a_bad_message_is_dropped_and_counts_as_life(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        played = until(12, lambda n: [[b"\xc1"]])
        played.run()
    assert played.lost == played.notices == []
    assert caplog.text.count("dropped a bad message from the scheduler") == 2  # the first and the tenth


def test_a_silent_scheduler_is_lost_once():
    played = Scheduler(lambda n: [wire.Alive()] if n <= 3 else [])
    played.run()
    (error,) = played.lost
    assert isinstance(error, NodeLost)
    assert str(error) == "the scheduler at inproc://scheduler has been silent for 6.0 s"
    assert played.now == 102.0 + 6.0


def test_a_scheduler_that_was_never_there_is_lost():
    played = Scheduler(lambda n: [])
    played.run()
    assert len(played.lost) == 1


def test_a_process_that_was_stopped_blames_nobody():
    def answer(number: int) -> list[Any]:
        if number == 3:
            played.now += 100 * LIMIT  # Ctrl-Z, a debugger
        return [] if number == 3 else [wire.Alive()]

    played = until(8, answer)
    played.run()
    assert played.lost == []


def test_on_a_machine_that_is_always_busy_a_silent_scheduler_is_lost_too():
    """Every beat comes late, so that some of the silence is this process's own; but not all of it."""

    def answer(number: int) -> list[Any]:
        played.now += 3 * INTERVAL
        return [wire.Alive()] if number <= 3 else []

    played = Scheduler(answer)
    played.run()
    assert len(played.lost) == 1
    assert len(played.beats) < 12


def test_a_heartbeat_that_fails_is_loud():
    def answer(_number: int) -> list[Any]:
        raise OSError("no more sockets")

    played = Scheduler(answer)
    played.run()
    (error,) = played.lost
    assert str(error) == "the heartbeat of worker 3 failed: OSError('no more sockets')"


def test_stop_ends_the_thread_at_once_and_may_come_twice():
    network = InprocNetwork()
    network.transport().bind("inproc://scheduler")
    node, listener = wire.Node("worker", 0, 1), Listener(print, print)
    heartbeat = Heartbeat(network.transport, "inproc://scheduler", node, 1000.0, 5000.0, lambda: 0.0, listener)
    heartbeat.start()
    heartbeat.stop()
    assert heartbeat.join(0)
    heartbeat.stop()


def test_debugpy_is_told_to_leave_its_thread_alone():
    network = InprocNetwork()
    made: list[Any] = []

    def thread(**options: Any) -> threading.Thread:
        made.append(threading.Thread(**options))
        return made[0]

    node, listener = wire.Node("worker", 0, 1), Listener(print, print)
    Heartbeat(network.transport, "inproc://scheduler", node, 1000.0, 5000.0, lambda: 0.0, listener, thread=thread)
    assert made[0].pydev_do_not_trace, "a breakpoint would stop the beats, and cost the job"


def test_it_may_be_stopped_from_its_own_thread():
    played = Scheduler(lambda n: [wire.Stop()])
    heartbeat = played.heartbeat
    played.on_notice = lambda notice: heartbeat.stop()  # type: ignore[method-assign]
    heartbeat.start()
    assert heartbeat.join(10)
    assert played.closed


def test_silence_makes_the_link_anew_until_the_scheduler_is_heard_again():
    silent = range(4, 10)
    played = until(14, lambda n: [] if n in silent and n < 10 else [wire.Alive()], limit_s=100.0)
    played.run()
    assert played.lost == []
    assert played.dialled == 1 + 1, "at the beginning, and after silence for more than three beats"
    assert len(played.back) == 1
    assert played.back[0] == played.beats[silent.stop - 1][0] + INTERVAL


def test_it_goes_on_making_the_link_anew():
    played = Scheduler(lambda n: [wire.Alive()] if n == 1 else [], limit_s=20.0)
    played.run()
    assert played.dialled == 1 + int(20.0 // (max(REDIAL_S, 3 * INTERVAL) + INTERVAL))
    assert played.back == []
    assert len(played.lost) == 1


class Beside:
    """Plays a process that beats beside this one."""

    def __init__(self) -> None:
        self.ended = False
        self.places: list[str] = []

    def note_place(self, place: str) -> None:
        self.places.append(place)

    def end(self) -> None:
        self.ended = True


def test_what_beats_beside_it_is_started_again_if_it_ends_and_ends_with_it():
    started: list[Beside] = []

    def beside() -> Beside:
        started.append(Beside())
        return started[-1]

    def answer(number: int) -> list[Any]:
        if number == 3:
            started[0].ended = True
        if number == 6:
            played.heartbeat.stop()
        return [wire.Alive()]

    played = Scheduler(answer, beside)
    played.run()
    assert len(started) == 2
    assert started[1].ended
    assert [len(other.places) for other in started] == [2, 3], "at each beat once it is there"
    assert all(" in " in place for other in started for place in other.places)


def test_a_process_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture):
    def beside() -> Any:
        raise OSError("no more processes")

    def answer(number: int) -> list[Any]:
        if number == 12:
            played.heartbeat.stop()
        return [wire.Alive()]

    played = Scheduler(answer, beside)
    with caplog.at_level(logging.WARNING):
        played.run()
    assert played.lost == []
    assert caplog.text.count("no more processes") == 2  # the first and the tenth


def test_a_report_goes_behind_each_beat():
    report = wire.ProcessAlive(wire.Node("worker", 3, 1))  # any message
    scheduler = Scheduler(
        lambda n: [wire.Alive()] if n < 6 else scheduler.heartbeat.stop() or [], report=lambda: report
    )
    scheduler.run()
    assert [type(message) for _, message in scheduler.beats] == [wire.Beat, wire.ProcessAlive] * 3
    assert [at for at, _ in scheduler.beats] == [100.0, 100.0, 101.0, 101.0, 102.0, 102.0]


def test_a_report_that_cannot_be_made_ends_nothing(caplog: pytest.LogCaptureFixture):
    def fail() -> wire.Message:
        raise RuntimeError("dictionary changed size during iteration")

    scheduler = Scheduler(lambda n: [wire.Alive()] if n < 3 else scheduler.heartbeat.stop() or [], report=fail)
    scheduler.run()
    assert [type(message) for _, message in scheduler.beats] == [wire.Beat] * 3
    assert scheduler.lost == []
    assert "a report of this process" in caplog.text


def test_the_question_where_this_process_is_is_answered_at_once_and_is_no_notice():
    played = until(3, lambda n: [wire.Where(7), wire.Alive()] if n == 1 else [wire.Alive()])
    thread = threading.Thread(target=played.run)
    thread.start()
    thread.join()
    (asked_at, stacks) = played.beats[1]
    assert asked_at == 100.0, "before the next beat"
    assert isinstance(stacks, wire.Stacks)
    assert (stacks.node, stacks.number) == (wire.Node("worker", 3, 1), 7)
    assert "in test_the_question" in stacks.place
    assert played.notices == []


def test_a_process_that_cannot_say_where_it_is_beats_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(*_args: Any) -> Any:
        raise RuntimeError("no frames")

    for name in ("where", "place_of"):
        monkeypatch.setattr(heartbeats, name, fails)
    played = Scheduler(lambda n: [wire.Where(7), wire.Alive()] if n < 4 else played.heartbeat.stop() or [], Beside)
    with caplog.at_level(logging.WARNING):
        played.run()
    assert [type(message) for _, message in played.beats] == [wire.Beat] * 4
    assert "no frames" in caplog.text
    assert played.lost == []
