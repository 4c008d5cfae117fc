"""Who waits for whom: where members are, waits that never end, and the straggler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from asking import Door
from made_reports import server_report, worker_report
from rendezvous import LIMIT, Job, Member

from kvstore import wire
from kvstore.wire.guests import MOST_LOCATED, UNASKED
from servers.scheduler import inquiries
from servers.scheduler.deadlocks import Deadlocks
from servers.scheduler.inquiries import ANSWER_S
from servers.scheduler.straggling import MOST_LINES, SETTLED_S, TOGETHER_S, Reports

# ---- where members are: who is asked, and what is said of those who answer, and of those who do not


BESIDE = b"beside worker 1"


def ask(job: Job, asker: Member, *ranks: int, role: str = "worker") -> list[tuple[Any, Any]]:
    return job.say(asker, wire.Locate(asker.me(), role, list(ranks)))


def answer(job: Job, member: Member, number: int, place: str = "train.py:41 in load", doing: str = "") -> list[Any]:
    return job.handle(member.beats, wire.Stacks(member.node, number, place, doing, [["MainThread", [place]]]))


def time_over(job: Job) -> list[tuple[Any, Any]]:
    """What is sent because members have not answered in time."""
    job.now += ANSWER_S
    assert job.scheduler.observing.inquiries.due() <= job.now
    return job.named(job.scheduler.tick(job.now))


def the_place(outbox: list[tuple[Any, Any]]) -> str:
    ((_, reply),) = outbox
    assert isinstance(reply, wire.Located)
    assert len(reply.places) == 1
    return str(reply.places[0])


def test_a_member_is_asked_over_its_heartbeats_link_and_its_answer_is_passed_on():
    job, w0, w1, w2, _ = Job(workers=3).and_members()
    assert ask(job, w0, 1, 2) == [(w1, wire.Where(1)), (w2, wire.Where(2))]
    assert answer(job, w2, 2, "train.py:7 in step", "waits for a lock (threading.py:320 in wait)") == []
    ((whom, located),) = answer(job, w1, 1)
    assert (whom, located.seq, located.ranks) == (w0, w0.seq, [1, 2])
    assert located.places == [
        "is at train.py:41 in load",
        "is at train.py:7 in step, which waits for a lock (threading.py:320 in wait)",
    ]
    assert not located.buffers, "members do not show them"
    assert job.scheduler.observing.inquiries.due() is None
    assert job.tick() == []


def test_servers_are_asked_like_workers():
    job, w0, _, s0 = Job().and_members()
    assert ask(job, w0, 0, role="server") == [(s0, wire.Where(1))]
    assert the_place(answer(job, s0, 1)) == "is at train.py:41 in load"


def test_several_questions_about_a_member_are_asked_once():
    job, w0, w1, w2, _ = Job(workers=3).and_members()
    assert ask(job, w0, 1) == [(w1, wire.Where(1))]
    assert ask(job, w2, 1) == []
    assert [whom for whom, _ in answer(job, w1, 1)] == [w0, w2]
    assert ask(job, w0, 1) == [(w1, wire.Where(2))], "and again when it is asked later"


def test_a_question_that_is_repeated_over_another_link_is_answered_there():
    job, w0, w1, _ = Job().and_members()
    question = wire.Locate(w0.me(), "worker", [1])
    assert job.say(w0, question) == [(w1, wire.Where(1))]
    assert job.handle(b"a new link", question) == []
    assert [whom for whom, _ in answer(job, w1, 1)] == [b"a new link"]


def test_a_member_answers_for_itself_alone_and_only_what_it_was_asked():
    job, w0, w1, _ = Job(door=Door()).and_members()
    assert answer(job, w1, 1) == [], "nobody has asked"
    ask(job, w0, 1)
    assert answer(job, w1, 2) == []
    for node in (wire.Node("worker", 0, 1), wire.Node("worker", 1, 2), wire.Node("worker", 9, 1)):
        assert job.handle(w1.beats, wire.Stacks(node, 1, "elsewhere", "", [])) == []
    assert the_place(answer(job, w1, 1)) == "is at train.py:41 in load"


def test_an_answer_over_a_link_with_another_key_does_not_count():
    keys = {b"link of worker 101": "one", b"heartbeat of worker 101": "one", b"a stranger": "another"}
    job, w0, w1, _ = Job(door=Door(keys)).and_members()
    ask(job, w0, 1)
    assert job.handle(b"a stranger", wire.Stacks(w1.node, 1, "elsewhere", "", [])) == []
    assert the_place(answer(job, w1, 1)) == "is at train.py:41 in load"


def test_only_members_may_ask():
    job = Job()
    ((whom, reply),) = job.handle(
        b"a stranger", wire.Locate(wire.Sender(wire.Node("worker", 5, 1), 1, 0), "worker", [0])
    )
    assert (whom, reply.kind) == (b"a stranger", "UsageError")


@pytest.mark.parametrize(
    ("state", "words"),
    [("left", "has left the job"), ("unknown", "is not known"), ("unheard", "has not been heard yet")],
)
def test_who_cannot_be_asked_is_told_of_at_once(state, words):
    job, w0, w1, _ = Job(start=state != "unheard").and_members()
    if state == "left":
        job.say(w1, w1.leave())
    if state == "unheard":
        for member in job.everyone:
            job.say(member, member.join())
            member.incarnation = 1
    assert the_place(ask(job, w0, 7 if state == "unknown" else 1)) == words


def test_a_member_that_beats_and_does_not_answer():
    job, w0, w1, _ = Job().and_members()
    ask(job, w0, 1)
    job.now += ANSWER_S / 2
    assert job.beat(w1) == [wire.Alive()]
    assert the_place(time_over(job)) == "is alive, and has not said in 1.5 s where it is"


def test_a_process_that_is_there_and_whose_heartbeat_is_silent_is_in_a_call_that_keeps_the_interpreters_lock():
    job, w0, w1, _ = Job().and_members()
    job.now += 4
    job.handle(BESIDE, wire.ProcessAlive(w1.node))
    assert ask(job, w0, 1) == [(w1, wire.Where(1)), (BESIDE, wire.Where(1))]
    assert the_place(time_over(job)) == (
        "is in a call that keeps the interpreter's lock, it seems: no heartbeat for 6 s"
    )


def test_what_the_process_beside_a_silent_member_knows_is_told():
    job, w0, w1, _ = Job().and_members()
    job.handle(BESIDE, wire.ProcessAlive(w1.node))
    ask(job, w0, 1)
    stopped = wire.Stacks(w1.node, 1, "train.py:41 in load", "is stopped by a signal", [])
    assert job.handle(BESIDE, stopped) == [], "its own answer may still come"
    assert the_place(time_over(job)) == (
        "is stopped by a signal: no sign of life for 2 s; at its last beat it was at train.py:41 in load"
    )


def test_the_members_own_answer_is_better_than_that_of_the_process_beside_it():
    job, w0, w1, _ = Job().and_members()
    job.handle(BESIDE, wire.ProcessAlive(w1.node))
    ask(job, w0, 1)
    job.handle(BESIDE, wire.Stacks(w1.node, 1, "train.py:1 in before", "", []))
    assert the_place(answer(job, w1, 1)) == "is at train.py:41 in load"


@pytest.mark.parametrize("pulse", [False, True])
def test_a_member_of_whom_nothing_is_heard(pulse):
    job, w0, w1, _ = Job().and_members()
    if pulse:
        job.handle(BESIDE, wire.ProcessAlive(w1.node))
        job.beat(w1)
    ask(job, w0, 1)
    busy = "" if pulse else ", or in a call that keeps the interpreter's lock"
    assert the_place(time_over(job)) == f"does not answer: no sign of life for 2 s, so stopped{busy}, or not reached"


def lost_after(job: Job, member: Member) -> str | None:
    """Why the job fails when all but ``member`` beat on."""
    for _ in range(3):
        for other in job.everyone:
            if other is not member:
                job.beat(other)
        job.tick(LIMIT / 2)
    return job.scheduler.failure


def test_a_member_that_is_lost_while_it_is_stopped_is_said_to_be():
    job, _, w1, _ = Job().and_members()
    stopped = wire.Stacks(w1.node, UNASKED, "train.py:41 in load", "is stopped by a signal", [])
    for _ in range(2):  # it is stopped, goes on, and is stopped again
        job.handle(BESIDE, wire.ProcessAlive(w1.node))
        assert job.handle(BESIDE, stopped) == []
    assert lost_after(job, w1) == (
        "worker 1 is lost: it has been silent for 12.5 s; it is stopped by a signal, and was at train.py:41 in load at "
        "its last beat"
    )


def test_what_is_known_of_a_stop_is_forgotten_when_it_is_over_and_comes_over_the_pulses_link_alone():
    job, _, w1, _ = Job().and_members()
    stopped = wire.Stacks(w1.node, UNASKED, "train.py:41 in load", "is stopped by a signal", [])
    for message in (stopped, wire.ProcessAlive(w1.node), stopped, wire.ProcessAlive(w1.node)):
        job.handle(BESIDE, message)
    job.handle(w1.peer, stopped)
    assert lost_after(job, w1) == "worker 1 is lost: it has been silent for 12.5 s"


def test_a_member_that_is_lost_meanwhile():
    job, w0, w1, _ = Job().and_members()
    ask(job, w0, 1)
    job.say(w1, w1.leave())
    assert the_place([entry for entry in time_over(job) if isinstance(entry[1], wire.Located)]) == "has left the job"


def test_the_first_members_are_asked_and_the_oldest_of_many_questions_is_answered_early(monkeypatch):
    job = Job(workers=MOST_LOCATED + 2)
    w0, w1 = job.workers[:2]
    assert len(ask(job, w0, *range(1, MOST_LOCATED + 2))) == MOST_LOCATED
    monkeypatch.setattr(inquiries, "MOST_LOOKS", 1)
    ((whom, located),) = ask(job, w1, 0, 1)[1:]
    assert (whom, located.ranks) == (w0, [*range(1, MOST_LOCATED + 1)])


def test_observers_get_the_stacks_of_those_who_have_answered():
    job, _, w1, w2, _ = Job(workers=3).and_members()
    observer = wire.Sender(wire.Node("observer", 0, 77), 1, 0)
    job.scheduler.observing.inquiries.locate(b"an observer", wire.Locate(observer, "worker", [1, 2]), job.now)
    assert answer(job, w1, 1) == [(w1, wire.Where(1)), (w2, wire.Where(2))]
    ((whom, located),) = time_over(job)
    assert whom == b"an observer"
    assert wire.decode(located.buffers) == wire.Stacks(
        w1.node, 1, "train.py:41 in load", "", [["MainThread", ["train.py:41 in load"]]]
    )


def test_others_of_the_scheduler_may_look():
    job, _, w1, _ = Job().and_members()
    seen: list[Any] = []
    job.scheduler.observing.inquiries.look("worker", [1], job.now, seen.append)
    answer(job, w1, 1)
    ((rank, sighting),) = seen[0].items()
    assert (rank, sighting.words, sighting.stacks.place) == (1, "is at train.py:41 in load", "train.py:41 in load")


def test_a_question_keeps_nobody_alive():
    job, w0, w1, s0 = Job().and_members()
    job.tick(LIMIT - 1)
    for member in (w0, s0):
        job.handle(member.beats, wire.Beat(member.node))
    ask(job, w0, 1)
    answer(job, w1, 1)
    job.tick(2)
    assert job.scheduler.failure == "worker 1 is lost: it has been silent for 11.0 s"


# ---- workers that wait for each other: when that is proven, and when it may be otherwise


def stuck(rank: int, missing: Sequence[int], prompt: int = 0, wait: int = 1) -> wire.Stuck:
    return wire.Stuck(
        wire.Node("worker", rank, 1), prompt, [wait], list(missing), f"call {rank}: needs {list(missing)}"
    )


def gone_on(rank: int) -> wire.Stuck:
    return wire.Stuck(wire.Node("worker", rank, 1), 0, [], [], "")


def told(said: list[tuple[int, wire.Message]]) -> dict[int, type[wire.Message]]:
    return {rank: type(message) for rank, message in said}


def test_workers_are_told_when_all_have_said_it_again_after_all_had_said_it():
    deadlocks = Deadlocks()
    assert deadlocks.take(stuck(0, [1])) == []
    assert deadlocks.take(stuck(1, [0])) == [(0, wire.StillStuck(1)), (1, wire.StillStuck(1))]
    assert deadlocks.take(stuck(1, [0], prompt=1)) == []
    text = (
        "workers 0, 1 wait for each other: worker 0 is in call 0: needs [1]; worker 1 is in call 1: needs [0]. "
        "All workers must make the same calls, in the same order"
    )
    assert deadlocks.take(stuck(0, [1], prompt=1)) == [(0, wire.Deadlock([1], text)), (1, wire.Deadlock([1], text))]


def test_nobody_is_told_while_one_that_is_needed_does_not_wait():
    deadlocks = Deadlocks()
    for prompt in (0, 1):
        assert deadlocks.take(stuck(0, [1, 2], prompt)) == []
        assert deadlocks.take(stuck(1, [0, 2], prompt)) == []


def test_one_that_was_started_again_gives_way_to_the_others():
    deadlocks = Deadlocks()

    def again(prompt: int) -> wire.Stuck:
        return replace(stuck(1, [0], prompt), node=wire.Node("worker", 1, 2))

    deadlocks.take(stuck(0, [1]))
    deadlocks.take(again(0))
    deadlocks.take(stuck(0, [1], prompt=1))
    assert told(deadlocks.take(again(1))) == {1: wire.Deadlock}


def test_nobody_is_told_if_one_has_gone_on_since():
    deadlocks = Deadlocks()
    deadlocks.take(stuck(0, [1]))
    deadlocks.take(stuck(1, [0]))
    deadlocks.take(gone_on(1))
    assert deadlocks.take(stuck(0, [1], prompt=1)) == []


def test_who_waits_in_another_call_by_then_is_prompted_anew():
    deadlocks = Deadlocks()
    deadlocks.take(stuck(0, [1]))
    deadlocks.take(stuck(1, [0]))
    assert deadlocks.take(stuck(0, [1], prompt=1, wait=2)) == [(0, wire.StillStuck(2)), (1, wire.StillStuck(2))]
    assert deadlocks.take(stuck(1, [0], prompt=1)) == [(1, wire.StillStuck(2))], "said before the second prompt came"
    assert deadlocks.take(stuck(1, [0], prompt=2)) == []
    assert set(told(deadlocks.take(stuck(0, [1], prompt=2, wait=2))).values()) == {wire.Deadlock}


def test_who_has_not_heard_the_prompt_hears_it_again():
    deadlocks = Deadlocks()
    deadlocks.take(stuck(0, [1]))
    deadlocks.take(stuck(1, [0]))
    assert deadlocks.take(stuck(0, [1])) == [(0, wire.StillStuck(1))]


def test_groups_of_their_own_do_not_disturb_each_other():
    deadlocks = Deadlocks()
    for rank, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        deadlocks.take(stuck(rank, [other]))
    assert deadlocks.take(stuck(0, [1], prompt=1)) == []
    assert deadlocks.take(stuck(2, [3], prompt=2)) == []
    assert told(deadlocks.take(stuck(1, [0], prompt=1))) == {0: wire.Deadlock, 1: wire.Deadlock}
    assert told(deadlocks.take(stuck(3, [2], prompt=2))) == {2: wire.Deadlock, 3: wire.Deadlock}


def test_who_waits_behind_a_circle_is_told_who_is_in_it():
    deadlocks = Deadlocks()
    for prompt in (0, 1):
        deadlocks.take(stuck(1, [2], prompt))
        deadlocks.take(stuck(2, [1], prompt))
    deadlocks = Deadlocks()
    deadlocks.take(stuck(1, [2]))
    deadlocks.take(stuck(0, [1]))
    assert told(deadlocks.take(stuck(2, [1]))) == {1: wire.StillStuck, 2: wire.StillStuck}
    assert told(deadlocks.take(stuck(0, [1]))) == {0: wire.StillStuck, 1: wire.StillStuck, 2: wire.StillStuck}
    deadlocks.take(stuck(1, [2], prompt=2))
    deadlocks.take(stuck(2, [1], prompt=2))
    said = deadlocks.take(stuck(0, [1], prompt=2))
    assert not said, "the two were told, and have no wait any more"


def test_the_scheduler_takes_it_over_the_link_of_the_workers_beats_only():
    job, w0, w1 = Job(2, 1).and_workers()
    assert job.handle(w0.beats, stuck(0, [1])) == []
    assert job.handle(w0.beats, stuck(1, [0])) == []
    assert job.handle(w1.beats, stuck(1, [0])) == [(w0, wire.StillStuck(1)), (w1, wire.StillStuck(1))]


# ---- the straggler of a running job, by a clock that the test moves


FETCH = ["train.py:9 in <module>", "torch/utils/data/dataloader.py:700 in __next__"]
BACKWARD = ["train.py:12 in <module>", "torch/autograd/graph.py:800 in _engine_run_backward"]
WAITS = ["train.py:14 in <module>", "kvstore/client/dist.py:200 in pushpull"]


class Run:
    """Rounds of 100 ms, of three workers, who report each second.

    Attributes:
        late: the worker that is awaited for half of each round; None for nobody.
        read: whether workers say how long they wait for data.
        slow_line: whether who is late waits as long as the others.
        frames: where workers are, when they are asked.
        asked: how often each worker has been asked.
        sharing: workers that share an aggregator: servers see them together.
        news: what has been said, each with the time since the run began.
    """

    def __init__(self, read: bool = False) -> None:
        self.job = Job(3, 1)
        self.began = self.job.now
        self.late: int | None = None
        self.read = read
        self.slow_line = False
        self.frames = dict.fromkeys(range(3), WAITS)
        self.asked = [0, 0, 0]
        self.sharing: tuple[int, ...] = ()
        self.news: list[tuple[float, str]] = []
        self._blocked, self._input, self._alone, self._last = ([0.0] * 3 for _ in range(4))
        self._rounds = 0

    def pass_s(self, seconds: int, late: int | None) -> None:
        """Let time pass, in steps of a tenth of a second."""
        for _ in range(10 * seconds):
            self._rounds += 1
            for rank in range(3):
                self._blocked[rank] += 0.0 if late is None or (rank == late and not self.slow_line) else 0.05
                self._input[rank] += 0.05 if rank == late else 0.0
            last = self._rounds % 3 if late is None else late
            for rank in self.sharing if last in self.sharing else (last,):
                self._last[rank] += 1
                self._alone[rank] += 0.0 if late is None else 0.05
            if self._rounds % 10 == 0:
                self._report()
            self.answer(self.job.tick(0.1))
            self.news += [(round(self.job.now - self.began, 1), line) for line in self.job.scheduler.take_news()]

    def _report(self) -> None:
        for rank, member in enumerate(self.job.workers):
            self.job.beat(member)
            self.job.handle(member.beats, self._worker_report(rank))
        (server,) = self.job.servers
        self.job.beat(server)
        alone = [round(1e6 * seconds) for seconds in self._alone]
        counts = {"waves": self._rounds, "came_last": list(map(int, self._last)), "alone_us": alone}
        self.job.handle(server.beats, server_report(at=self.job.now, **counts))

    def _worker_report(self, rank: int) -> wire.WorkerReport:
        blocked, read = round(1e6 * self._blocked[rank]), round(1e6 * self._input[rank]) if self.read else -1
        return worker_report(rank, at=self.job.now, rounds=self._rounds, blocked_us=blocked, input_us=read)

    def answer(self, outbox: list[tuple[Member, wire.Message]]) -> None:
        for whom, message in outbox:
            if isinstance(message, wire.Where):
                self.asked[whom.rank] += 1
                frames = self.frames[whom.rank]
                self.job.handle(whom.beats, wire.Stacks(whom.node, message.number, frames[-1], "", [["main", frames]]))


def test_even_rounds_name_nobody_and_ask_nobody():
    run = Run()
    run.pass_s(60, None)
    assert (run.news, run.asked) == ([], [0, 0, 0])


def test_a_straggler_is_named_within_ten_seconds_and_once():
    run = Run(read=True)
    run.pass_s(20, None)
    run.pass_s(60, 1)
    ((at, line),) = run.news
    assert at <= 30.0
    assert "worker 1 is slow: it came last in" in line
    assert "It reads its input for longer" in line
    assert [text for _, text in run.job.scheduler.observing.events.after(0)[1]][-1] == line


def test_workers_of_a_host_are_named_together_if_it_stays_unclear_which_one_it_is():
    clear, unclear = Run(read=True), Run(read=True)
    unclear.sharing = 1, 2
    for run in (clear, unclear):
        run.pass_s(30, 1)
    ((first, _),), ((at, line),) = clear.news, unclear.news
    assert first + TOGETHER_S <= at <= 10.0
    assert "workers 1 and 2, which share an aggregator, are slow: they" in line


def test_a_slow_line_has_to_go_on_for_a_while():
    busy, slow, unclear = Run(read=True), Run(read=True), Run(read=True)
    slow.slow_line = unclear.slow_line = True
    busy.pass_s(30, 1)
    slow.pass_s(30, 1)
    ((first, _),), ((at, line),) = busy.news, slow.news
    assert first < at <= 10.0
    assert "Its messages take long to arrive" in line
    unclear.pass_s(round(SETTLED_S), 1)  # the others' reports do not show yet what the servers' do
    unclear.slow_line = False
    unclear.pass_s(30, 1)
    assert "It reads its input for longer" in unclear.news[0][1]


def test_looks_say_what_reports_do_not():
    for frames, words in (
        (BACKWARD, "It computes for longer than the others: it waits"),
        (FETCH, "It reads its input for longer"),
    ):
        run = Run()
        run.frames[1] = frames
        run.pass_s(30, 1)
        ((at, line),) = run.news
        assert at <= 10.0
        assert words in line
        assert f"40 of 40 looks found it at {frames[-1]}" in line or "looks found it at" in line
        assert run.asked == [40, 40, 0], "it and one other, and only so often"


def test_without_answers_the_cause_is_one_of_two():
    run = Run()
    run.answer = lambda outbox: None  # type: ignore[method-assign]
    run.pass_s(30, 1)
    ((at, line),) = run.news
    assert at <= 10.0
    assert "It computes, or reads its input, for longer than the others" in line


def test_it_is_said_when_it_is_over_and_who_is_next_but_not_too_often():
    run = Run(read=True)
    run.pass_s(20, 1)
    run.pass_s(40, None)
    run.pass_s(20, 2)
    named, over, other = run.news
    assert "worker 1 is slow: it came last in" in named[1]
    assert over[1] == "worker 1 holds nobody up any more"
    assert "worker 2 is slow: it came last in" in other[1]
    run = Run(read=True)
    for _ in range(6):
        run.pass_s(10, 1)
        run.pass_s(10, 2)
    assert len(run.news) == MOST_LINES


def test_of_each_member_the_latest_report_and_one_of_some_seconds_ago():
    reports = Reports()
    for second in range(30):
        reports.take(worker_report(rank=1, rounds=second), 100.0 + second)
        reports.take(server_report(rank=1, rounds=2 * second), 100.0 + second)
    before, latest = reports.of(wire.Node("worker", 1, 1))
    assert (before.rounds, latest.rounds) == (23, 29)
    before, latest = reports.of(wire.Node("server", 1, 1))
    assert (before.rounds, latest.rounds) == (46, 58)


def test_one_report_is_one_and_another_process_begins_anew():
    reports = Reports()
    assert reports.of(wire.Node("worker", 0, 1)) == ()
    first = worker_report(rank=0)
    reports.take(first, 1.0)
    assert reports.of(wire.Node("worker", 0, 1)) == (first,)
    successor = replace(first, node=wire.Node("worker", 0, 2))
    reports.take(successor, 2.0)
    assert reports.of(wire.Node("worker", 0, 1)) == ()
    assert reports.of(wire.Node("worker", 0, 2)) == (successor,)


def test_many_reports_take_the_memory_of_few():
    reports = Reports()
    for beat in range(10_000):
        reports.take(worker_report(rank=0, rounds=beat), beat / 100)
    assert reports.kept == 7 + 4
    assert [report.rounds for report in reports.of(wire.Node("worker", 0, 1))] == [9300, 9999]


def test_a_member_is_believed_over_the_link_of_its_beats_alone():
    job, w0, w1, s0 = Job().and_members()
    honest = worker_report(rank=0, rounds=5)
    assert job.handle(w0.beats, honest) == []
    assert job.scheduler.observing.reports.of(w0.node) == (honest,)
    forged = worker_report(rank=1, rounds=5)
    for link in (w0.beats, b"a stranger"):
        assert job.handle(link, forged) == []
    assert job.handle(w1.beats, replace(forged, node=wire.Node("worker", 1, 9))) == []
    assert job.handle(s0.beats, worker_report(role="server", rank=0)) == [], "a worker's report of a server"
    assert job.handle(w1.beats, server_report(role="worker", rank=1)) == []
    assert job.scheduler.observing.reports.of(w1.node) == job.scheduler.observing.reports.of(s0.node) == ()


def test_slow_rounds_are_compared_over_longer_times():
    reports = Reports()
    for second in range(301):
        reports.take(worker_report(rank=0, at=second, rounds=second // 10), float(second))
        reports.take(server_report(rank=0, at=second, rounds=9, waves=second // 10), float(second))
    for node in (wire.Node("worker", 0, 1), wire.Node("server", 0, 1)):
        assert [report.at for report in reports.over(node, 3.0) or ()] == [297, 300]
        assert [report.at for report in reports.over(node, 3.0, fewest=20) or ()] == [90, 300]
        assert [report.at for report in reports.over(node, 3.0, fewest=1000) or ()] == [0, 300]
    assert reports.over(wire.Node("worker", 1, 1), 3.0) is None
    for second in range(301, 2000):
        reports.take(worker_report(rank=0, at=second), float(second))
    assert [report.at for report in reports.over(wire.Node("worker", 0, 1), 3.0, fewest=1) or ()] == [1410, 1999]
