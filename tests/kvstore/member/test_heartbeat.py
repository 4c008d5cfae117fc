"""Signs of life, of a process and from beside one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobkeys
import pytest
from inproc import InprocNetwork
from played import Played
from proc import state
from waiting import LONG, came, until

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, with_key
from kvstore.member import heartbeat as heartbeats
from kvstore.member.heartbeat import CLOCK_S, REDIAL_S, Heartbeat, Listener
from kvstore.member.pulse import LastPlace, PulseProcess, stopped
from kvstore.tracer import Tracer
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.wire.guests import UNASKED

# ---- signs of life, with a clock that moves as the heartbeat waits


INTERVAL, LIMIT = 1.0, 5.0


class Scheduler(Played):
    """Plays the far end: after each beat ``answer`` says what comes back, and may stop the heartbeat."""

    def __init__(
        self,
        answer: Callable[[int], list[Any]],
        beside: Callable[[], Any] | None = None,
        limit_s: float = LIMIT,
        report: Callable[[], wire.Message | None] | None = None,
    ) -> None:
        super().__init__(self._answer)
        self.answer = answer
        self.beats: list[tuple[float, wire.Message]] = []
        self.now = 100.0
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

    def _answer(self, peer: bytes, beat: Any) -> list[Any]:
        assert peer == b"scheduler"
        self.beats.append((self.now, beat))
        return self.answer(len(self.beats))

    def abandon(self) -> None:
        self.inbox.clear()


def beaten(
    count: int, then: Callable[[int], list[Any]] = lambda n: [wire.Alive()], limit_s: float = LIMIT
) -> Scheduler:
    """A scheduler that answers as ``then`` says and ends the heartbeat at its beat number ``count``."""

    def answer(number: int) -> list[Any]:
        if number == count:
            played.heartbeat.stop()
        return then(number)

    played = Scheduler(answer, limit_s=limit_s)
    return played


def test_it_beats_at_its_interval_and_says_who_it_is():
    played = beaten(5)
    played.run()
    assert played.beats == [(100.0 + n * INTERVAL, wire.Beat(wire.Node("worker", 3, 1))) for n in range(5)]
    assert played.lost == played.notices == []


def test_notices_are_passed_on_in_order():
    played = beaten(3, lambda n: [wire.Alive(), wire.JobFailed("x"), wire.Stop()] if n == 2 else [wire.Alive()])
    played.run()
    assert played.notices == [wire.JobFailed("x"), wire.Stop()]


def test_it_says_what_it_is_told_to_between_two_beats_and_in_order():
    notices = [wire.ProcessAlive(wire.Node("worker", 3, 1)), wire.ProcessAlive(wire.Node("worker", 4, 1))]

    def answer(number: int) -> list[Any]:
        if number == 2:  # as another thread would
            for notice in notices:
                played.heartbeat.say(notice)
        return [wire.Alive()]

    played = beaten(5, answer)
    played.run()
    assert [said for _, said in played.beats if not isinstance(said, wire.Beat)] == notices
    assert [when for when, said in played.beats if said in notices] == [101.0, 101.0], "at once"


def test_it_beats_at_once_over_a_link_that_was_made_anew():
    """The scheduler may be another process now, which says at a beat what this one has missed."""
    played = beaten(4, lambda n: [[]] if n == 2 else [wire.Alive()])
    played.run()
    assert [at for at, _ in played.beats] == [100.0, 101.0, 101.0, 102.0]
    assert played.lost == played.notices == []


def test_when_a_trace_begins_clocks_are_compared_before_the_next_beat_is_due():
    """What is noted of the first rounds may leave with that beat, and is to say how far the clocks are apart."""
    played = beaten(4, lambda n: [wire.Alive(traced=[7, 9])] if n == 2 else [])
    played.run()
    assert [at for at, _ in played.beats] == pytest.approx([100.0, 101.0, 101.0 + CLOCK_S, 101.0 + 2 * CLOCK_S])
    assert [said.sent > 0 for _, said in played.beats if isinstance(said, wire.Beat)] == [False, False, True, True]


def test_a_bad_message_is_dropped_and_counts_as_life(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        played = beaten(12, lambda n: [[b"\xc1"]])
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

    played = beaten(8, answer)
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
    played = beaten(14, lambda n: [] if n in silent and n < 10 else [wire.Alive()], limit_s=100.0)
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
    played = beaten(3, lambda n: [wire.Where(7), wire.Alive()] if n == 1 else [wire.Alive()])
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


# ---- signs of life from beside a process: real ones, and what /proc says


NODE = wire.Node("worker", 3, 1)


@pytest.fixture(params=["unix", "tcp", "curve", "zeromq", "zeromq-tcp"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    tmp_path.chmod(0o700)
    setting = "zeromq" if "zeromq" in request.param else "sockets"
    if request.param in ("unix", "zeromq"):
        return Config(root=f"ipc://{tmp_path}/scheduler", heartbeat_s=0.05, transport=setting)
    keys = CurveKeys.from_env(jobkeys.variables(1)[0]) if request.param == "curve" else None
    return Config(root="tcp://127.0.0.1:0", heartbeat_s=0.05, keys=keys, transport=setting)


@pytest.fixture
def heard(config: Config) -> Iterator[tuple[Transport, Config]]:
    """What listens where the scheduler would, and how it is reached."""
    transport = links(config)()
    try:
        root = transport.bind(config.root)
        if config.keys is not None and "?" not in root:
            root = with_key(root, config.keys.public)
        yield transport, replace(config, root=root)
    finally:
        transport.close()


def hears(transport: Transport, timeout: float = LONG) -> bool:
    received = transport.recv(timeout)
    return received is not None and wire.decode(received[1]) == wire.ProcessAlive(NODE)


def answer_of(transport: Transport, number: int) -> wire.Stacks:
    """What the process says to the question where the other is: after beats that were on their way."""
    received = came(transport)
    transport.send(received[0], wire.encode(wire.Where(number)))
    while True:
        received = came(transport)
        message = wire.decode(received[1])
        if isinstance(message, wire.Stacks):
            return message


def test_it_beats_until_it_is_ended_and_tells_where_the_process_was(heard: tuple[Transport, Config]) -> None:
    transport, config = heard
    process = PulseProcess(config, NODE)
    try:
        assert hears(transport)
        assert hears(transport)
        assert not process.ended
        assert answer_of(transport, 1) == wire.Stacks(NODE, 1, "", "", [])
        process.note_place("train.py:41 in load_batch")
        assert answer_of(transport, 2) == wire.Stacks(NODE, 2, "train.py:41 in load_batch", "", [])
        assert hears(transport)
    finally:
        process.end()
    assert process.ended


@pytest.mark.parametrize("config", ["unix"], indirect=True)
def test_it_is_no_child_of_the_process_which_may_wait_for_all_of_its_children(heard: tuple[Transport, Config]) -> None:
    transport, config = heard
    process = PulseProcess(config, NODE)
    try:
        assert hears(transport)
        assert f" {os.getpid()} " not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2][:20]
    finally:
        process.end()


BESIDE = """
import sys, time
from kvstore.job.config import Config
from kvstore.member.pulse import PulseProcess
from kvstore.wire import Node

interval_s = float(sys.argv[2])
config = Config(root=sys.argv[1], heartbeat_s=interval_s, heartbeat_timeout_s=9 * interval_s)
process = PulseProcess(config, Node("worker", 3, 1))
print(process.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def beside(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Transport, subprocess.Popen[str], int]]:
    """A process beside which another beats, what listens, and the number of that other."""
    tmp_path.chmod(0o700)
    config = Config(root=f"ipc://{tmp_path}/scheduler")
    transport = links(config)()
    try:
        transport.bind(config.root)
        words = [sys.executable, "-c", BESIDE, config.root, str(getattr(request, "param", 0.05))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield transport, process, int(process.stdout.readline())
            finally:
                process.kill()
    finally:
        transport.close()


def test_a_process_that_is_stopped_has_no_pulse(beside: tuple[Transport, subprocess.Popen[str], int]) -> None:
    transport, process, _ = beside
    first = came(transport)
    pulse = first[0]
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state(process.pid) == "T", "the process to stop")
    while wire.decode((received := transport.recv(LONG) or first)[1]) == wire.ProcessAlive(NODE):
        pass  # they were on their way
    assert wire.decode(received[1]) == wire.Stacks(NODE, UNASKED, "", "is stopped by a signal", [])
    assert transport.recv(0.5) is None
    transport.send(pulse, wire.encode(wire.Where(5)))
    received = came(transport)
    assert wire.decode(received[1]) == wire.Stacks(NODE, 5, "", "is stopped by a signal", [])
    os.kill(process.pid, signal.SIGCONT)
    assert hears(transport)


def test_it_ends_with_whom_it_beats_for_however_that_ends(beside: tuple[Transport, subprocess.Popen[str], int]) -> None:
    transport, process, pid = beside
    assert hears(transport)
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "the other to end")


@pytest.mark.parametrize("beside", [2 * LONG], indirect=True)
def test_before_the_first_heartbeat_is_due_it_imports_nothing_and_ends_with_whom_it_beats_for(
    beside: tuple[Transport, subprocess.Popen[str], int],
) -> None:
    transport, process, pid = beside
    until(lambda: "--idle" in Path(f"/proc/{pid}/cmdline").read_text(), "the shell to become the other")
    assert transport.recv(0.0) is None
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "the other to end")


def test_it_is_ended_at_once_even_where_it_has_hardly_begun(tmp_path: Path) -> None:
    config = Config(root=f"ipc://{tmp_path}/scheduler", heartbeat_s=LONG, heartbeat_timeout_s=9 * LONG)
    process = PulseProcess(config, NODE)
    process.end()
    assert process.ended
    until(lambda: not Path(f"/proc/{process.pid}").exists(), "the other to be gone")


@pytest.mark.parametrize(
    ("letter", "alive"), [("R", True), ("S", True), ("D", True), ("T", False), ("t", False), ("Z", False)]
)
def test_what_the_system_says_of_a_process(letter: str, alive: bool) -> None:
    assert (stopped(f"17 (a name (with) brackets) {letter} 1 17 17 0 -1") == "") is alive


@pytest.fixture
def ends() -> Iterator[tuple[LastPlace, LastPlace]]:
    """Who writes, and who reads."""
    writer = LastPlace()
    reader = LastPlace(os.dup(writer.fd))
    yield writer, reader
    writer.close()
    reader.close()


def test_the_latest_text_is_read(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    assert reader.read() == ""
    for text in ("train.py:41 in load_batch", "a.py:1 in f", "a.py:1 in f", "", "\u00e9" * 2):
        writer.write(text)
        assert reader.read() == text


def test_a_long_text_is_cut(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    writer.write("x" * 10_000)
    assert reader.read() == "x" * 512


def test_a_text_that_is_half_written_is_not_read(ends: tuple[LastPlace, LastPlace]) -> None:
    writer, reader = ends
    writer.write("train.py:41 in load_batch")
    os.pwrite(writer.fd, b"other", 10)
    assert reader.read() == ""
