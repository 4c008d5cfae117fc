"""Workers that were started again, told through a scheduler: who lets them in, and where they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asking import Door, sent, text_of
from rendezvous import LIMIT, Member, Sparing, joined, logged

from kvstore import wire
from servers.scheduler.logged import Record


def enter(member: Member, store: int = 0, first: int = 7) -> wire.Enter:
    return wire.Enter(member.me(), store, first)


def admitted(sponsor: Member, newcomer: Member, passed: tuple[int, int] = (0, 0), **more: Any) -> wire.Admitted:
    stores, (barriers, joins) = more.get("stores", [0]), passed
    columns = ([each] * len(stores) for each in (barriers, joins))
    ids, clocks, counts = [5, 6], [3, 4], [2] + [0] * (len(stores) - 1)
    return wire.Admitted(
        sponsor.me(), newcomer.rank, newcomer.start, stores, *columns, counts, ids, clocks, more.get("state", "s")
    )


PATIENCE = 60.0


class Returning(Sparing):
    """A job in which workers come back. Below the least it waits for them.

    Attributes:
        told: what everybody has been told since ``forget``.
    """

    def __init__(self, workers: int = 3, servers: int = 1, least: int = 1, **how: Any) -> None:
        super().__init__(workers, servers, least, patience_s=PATIENCE, **how)

    def pass_time(self, seconds: float, *silent: int) -> list[tuple[Any, Any]]:
        """Let time pass in which all but some workers are heard; return what everybody is told at its end."""
        end, told = self.now + seconds, []
        while self.now < end:
            self.now = min(end, self.now + LIMIT / 4)
            for each in (*self.servers, *(each for rank, each in enumerate(self.workers) if rank not in silent)):
                self.beat(each)
            told = self.named(self.scheduler.tick(self.now))
        return told

    def again(self, rank: int) -> Member:
        """Start a lost worker again, and let it join."""
        member = self.workers[rank].again()
        self.gone.append(self.workers[rank])
        self.workers[rank] = member
        told = self.say(member, member.join())
        member.incarnation, member.rank = member.start, rank
        assert [said for whom, said in told if isinstance(said, wire.Welcome)] or self.scheduler.failure, told
        self.told = told
        self.beat(member)
        return member

    def back(self, rank: int) -> Member:
        self.lose(rank)
        return self.again(rank)

    def waits(self, rank: int) -> tuple[Member, wire.Enter]:
        """A worker is lost, comes back, and asks to be let in."""
        member = self.back(rank)
        asked = enter(member)
        self.told = self.say(member, asked)
        return member, asked

    def let_in(self, rank: int, by: int = 0, passed: tuple[int, int] = (0, 0)) -> Member:
        member, _ = self.waits(rank)
        sponsor = self.workers[by]
        self.told = self.say(sponsor, admitted(sponsor, member, passed))
        return member


def news_of(told: list[tuple[Any, Any]], kind: type) -> list[tuple[Any, Any]]:
    return [(whom, said) for whom, said in told if isinstance(said, kind)]


# ---- its seat


def test_it_takes_the_seat_and_all_are_told_that_it_has_come_and_is_still_lost() -> None:
    job = Returning(3, 2, replicas=1, aggregated=[[0, 1]])
    present = job.scheduler.members.present
    member = job.back(2)
    ((_, welcome),) = news_of(job.told, wire.Welcome)
    assert (welcome.rank, welcome.incarnation) == (2, 2)
    rosters = news_of(job.told, wire.Roster)
    assert {(roster.lost[0], roster.deaths[0], roster.came[0], roster.starts[0]) for _, roster in rosters} == {
        (2, 1, 2, 2)
    }
    assert {whom for whom, _ in rosters} >= {*job.servers, *job.standbys, *job.aggregators, *job.workers[:2]}
    assert job.scheduler.lost_workers == {2}
    assert job.scheduler.members.present == present
    assert job.scheduler.take_news()[-1] == "worker 2 has been started again, and is to be let in"
    job.say(member, member.join())
    assert job.scheduler.take_news() == [], "a repeat is no news"
    assert job.lose(2) != [], "without a number the process that is there is meant"


def test_a_later_start_shows_that_the_one_before_has_died() -> None:
    job = Returning()
    job.again(2)
    assert job.scheduler.lost_workers == {2}
    assert any(
        "worker 2 has been started again; the job goes on with 2 of 3" in line for line in job.scheduler.take_news()
    )


def test_late_news_of_the_death_is_of_the_process_before() -> None:
    job = Returning()
    job.back(2)
    job.scheduler.take_news()
    job.handle(b"launcher", wire.Lost("worker", 2, "was killed", 1, False))
    assert job.scheduler.take_news() == []
    job.handle(b"launcher", wire.Lost("worker", 2, "was killed", 2, False))
    assert job.scheduler.take_news() == ["worker 2 was killed; the job goes on with 2 of 3 workers"]


def test_one_that_was_silent_and_has_come_since_is_given_up_no_more() -> None:
    job = Returning()
    while not job.scheduler.lost_workers:
        for each in (*job.workers[:2], *job.servers):
            job.beat(each)
        job.tick(LIMIT / 4)
    assert job.scheduler.given_up == ["start 1 of worker 2"]
    job.again(2)
    assert job.scheduler.given_up == []


def test_one_that_has_come_counts_among_those_that_are_left() -> None:
    job = Returning(3, least=2)
    job.back(2)
    job.lose(1)
    assert job.scheduler.failure is None, "worker 2 may be let in"
    job.lose(1, final=True)
    assert job.scheduler.failure is None
    job.lose(2, final=True)
    assert job.scheduler.failure == (
        "worker 2 was killed by SIGKILL; 1 of 3 workers are left, and the job needs 2 (--min-workers)"
    )
    assert job.scheduler.cause == "start 2 of worker 2"


def test_no_seat_is_taken_twice_nor_by_another_key_nor_where_workers_are_not_spared() -> None:
    job = Returning(door=Door({b"link of worker 102": "two", b"heartbeat of worker 102": "two"}))
    impostor = Member("worker", 900, 2)
    impostor.start = 2
    assert "has its 3 workers already" in text_of(_answer(job, impostor), "UsageError")
    assert job.scheduler.lost_workers == set()
    job.lose(2)
    assert "another key" in text_of(_answer(job, impostor), "UsageError")
    first = Member("worker", 901, 2)
    assert "workers already" in text_of(_answer(job, first), "UsageError"), "start 1 has been"
    fixed = Returning(least=0)
    late = fixed.workers[2].again()
    assert "workers already" in text_of(_answer(fixed, late), "UsageError")


def _answer(job: Sparing, member: Member) -> Any:
    ((_, said),) = job.say(member, member.join())
    return said


def test_one_that_had_left_in_order_and_is_started_again_has_failed_after_that() -> None:
    """The launcher does so if its exit code says so, and that may come later."""
    job = Returning()
    w2 = job.workers[2]
    job.say(w2, w2.leave())
    job.again(2)
    assert job.scheduler.lost_workers == {2}


def test_it_has_no_aggregator_any_more() -> None:
    job = Returning(3, aggregated=[[0, 1]])
    job.lose(1)
    member = job.workers[1].again()
    member.aggregator = 0
    ((_, welcome),) = news_of(job.say(member, member.join()), wire.Welcome)
    assert welcome.rank == 1
    assert job.scheduler.members.find("worker", 1).aggregator == -1  # type: ignore[union-attr]


# ---- its sponsor


def test_the_lowest_rank_that_is_in_lets_it_in_and_is_told_again_at_each_heartbeat() -> None:
    job = Returning(4)
    member, asked = job.waits(0)
    notice = wire.Newcomer(0, 2, 0, 7)
    assert news_of(job.told, wire.Newcomer) == [(job.workers[1], notice)]
    assert notice in job.beat(job.workers[1])
    assert notice not in job.beat(job.workers[2])
    text = "waits for worker 1 to let it in, before the next push like its own"
    said = job.reply(member, member.explain(asked.seq))
    assert (said.text, said.missing) == (text, [1])
    assert job.reply(member, member.explain(asked.seq - 1)).text == ""
    told = job.say(job.workers[1], admitted(job.workers[1], member, (2, 1)))
    assert news_of(told, wire.Entered) == [(member, wire.Entered(asked.seq, [0], [2], [1], [2], [5, 6], [3, 4], "s"))]
    assert news_of(told, wire.Ack) == [(job.workers[1], wire.Ack(job.workers[1].seq))]
    assert {(*roster.lost, *roster.came, *roster.starts) for _, roster in news_of(told, wire.Roster)} == {(0, 2)}
    assert {whom for whom, _ in news_of(told, wire.Roster)} == {*job.workers, *job.servers}
    assert job.scheduler.lost_workers == set()
    assert notice not in job.beat(job.workers[1])


def test_another_newcomer_that_is_not_in_lets_nobody_in() -> None:
    job = Returning()
    job.waits(0)
    assert [whom for whom, _ in news_of(job.told, wire.Newcomer)] == [job.workers[1]]
    job.waits(1)
    assert [whom for whom, _ in news_of(job.told, wire.Newcomer)] == [job.workers[2]]


def test_one_whose_sponsor_dies_has_to_come_anew_for_some_servers_may_know_of_it() -> None:
    job = Returning(4)
    first, _ = job.waits(3)
    told = job.lose(0)
    assert job.scheduler.lost_workers == {0, 3}
    ((_, said),) = news_of(told, wire.Failure)
    assert text_of(said, "NodeLost") == "worker 3 was about to be let in by worker 0, which is lost"
    lines = job.scheduler.take_news()
    assert "worker 3 was about to be let in by worker 0, which is lost; the job goes on with 2 of 4 workers" in lines
    assert {tuple(roster.deaths) for _, roster in news_of(told, wire.Roster)} >= {(1, 2)}
    assert "was given up" in text_of(job.reply(first, first.barrier()), "NodeLost")
    again = job.again(3)
    told = job.say(again, enter(again))
    assert [whom for whom, _ in news_of(told, wire.Newcomer)] == [job.workers[1]]
    assert job.say(job.workers[1], admitted(job.workers[1], first)) == [(job.workers[1], wire.Ack(job.workers[1].seq))]
    assert 3 in job.scheduler.lost_workers, "it was let in that is dead"
    told = job.say(job.workers[1], admitted(job.workers[1], again))
    assert len(news_of(told, wire.Entered)) == 1


def test_two_whose_sponsor_dies_come_anew_both() -> None:
    job = Returning(4)
    job.waits(2)
    job.waits(3)
    told = job.lose(0)
    assert [roster.came for _, roster in news_of(told, wire.Roster)][-1] == []
    assert job.scheduler.lost_workers == {0, 2, 3}


def await_workers(member: Member) -> wire.AwaitWorkers:
    return wire.AwaitWorkers(member.me())


def test_below_the_least_the_sponsor_stands_still_until_one_waits_for_it_or_enough_are_in() -> None:
    job = Returning(3, least=3)
    w0, w1, _ = job.workers
    job.lose(2)
    assert job.scheduler.take_news() == [
        "worker 2 was killed by SIGKILL; the job waits: 2 of 3 workers are left, and it needs 3 (--min-workers)"
    ]
    asked = await_workers(w0)
    assert job.say(w0, asked) == []
    said = job.reply(w0, w0.explain(asked.seq))
    assert said.missing == [2]
    assert said.text == (
        "waits for worker 2 to come back: 2 of 3 workers are left, and the job needs 3 (--min-workers)"
    )
    member = job.again(2)
    assert not news_of(job.told, wire.GoOn), "its program has not come so far"
    told = job.say(member, enter(member, 0, 7))
    assert news_of(told, wire.GoOn) == [(w0, wire.GoOn(asked.seq, 2, 2, 0, 7))]
    again = await_workers(w0)
    assert job.reply(w0, again) == wire.GoOn(again.seq, 2, 2, 0, 7), "it waits at another place than this"
    waits = await_workers(w1)
    assert job.say(w1, waits) == []
    told = job.say(w0, admitted(w0, member))
    assert news_of(told, wire.GoOn) == [(w1, wire.GoOn(waits.seq))]
    later = await_workers(w0)
    assert job.reply(w0, later) == wire.GoOn(later.seq), "enough are in"
    assert job.pass_time(2 * PATIENCE) == []
    assert job.scheduler.failure is None


def test_when_nobody_has_come_until_the_patience_ends_the_job_fails_and_names_who_is_missing() -> None:
    job = Returning(3, least=2)
    job.lose(2)
    job.lose(1)
    job.pass_time(PATIENCE, 1, 2)
    assert job.scheduler.failure is None
    told = job.pass_time(LIMIT / 4, 1, 2)
    text = (
        "1 of 3 workers are left, and the job needs 2 (--min-workers): worker 1, worker 2 have not come back within "
        "60 s (KVSTORE_PATIENCE_S)"
    )
    assert {said.text for _, said in news_of(told, wire.JobFailed)} == {text}
    assert job.scheduler.cause == "start 1 of worker 1"


def test_at_the_end_of_a_job_nobody_is_waited_for() -> None:
    job = Returning(3, least=3)
    w0, w1, _ = job.workers
    job.lose(2)
    asked = await_workers(w1)
    job.say(w1, asked)
    assert news_of(job.say(w0, w0.leave()), wire.GoOn) == [(w1, wire.GoOn(asked.seq))]
    job.pass_time(2 * PATIENCE, 0, 2)
    assert job.scheduler.failure is None


def test_one_whose_sponsor_dies_below_the_least_has_another_chance() -> None:
    job = Returning(3, least=2)
    job.waits(2)
    job.lose(0)
    assert job.scheduler.failure is None
    assert job.scheduler.lost_workers == {0, 2}


def test_one_whose_sponsor_leaves_in_order_has_another_and_at_last_nobody() -> None:
    job = Returning()
    member, asked = job.waits(2)
    told = job.say(job.workers[0], job.workers[0].leave())
    assert [whom for whom, _ in news_of(told, wire.Newcomer)] == [job.workers[1]]
    told = job.say(job.workers[1], job.workers[1].leave())
    ((whom, said),) = news_of(told, wire.Failure)
    assert (whom, said.seq) == (member, asked.seq)
    assert text_of(said, "NodeLost") == "no worker is left that could let this one in: the others have ended"
    assert job.beat(member)[0] == wire.Alive()
    later = enter(member)
    assert "no worker is left" in text_of(job.reply(member, later), "NodeLost")


def test_one_that_dies_while_it_waits_is_not_let_in() -> None:
    job = Returning()
    first, _ = job.waits(2)
    job.lose(2)
    assert not [said for said in job.beat(job.workers[0]) if isinstance(said, wire.Newcomer)]
    assert job.say(job.workers[0], admitted(job.workers[0], first)) == [(job.workers[0], wire.Ack(job.workers[0].seq))]
    assert job.scheduler.lost_workers == {2}
    third = job.again(2)
    assert third.start == 3
    told = job.say(third, enter(third))
    assert news_of(told, wire.Newcomer) == [(job.workers[0], wire.Newcomer(2, 3, 0, 7))]


def test_one_that_ends_in_order_before_it_is_in_is_missed_by_nobody() -> None:
    """Its program may find that there is nothing to do."""
    job = Returning(3)
    w0, w1, _ = job.workers
    member = job.back(2)
    assert job.say(member, member.leave())[0] == (member, wire.Ack(member.seq))
    told = [job.tick(1.0) for _ in range(3)]
    assert told == [[]] * 3
    barrier = w0.barrier()
    job.say(w0, barrier)
    assert news_of(job.say(w1, w1.barrier()), wire.Ack) != []
    for worker in (w0, w1):
        told = job.say(worker, worker.leave())
    assert news_of(told, wire.Stop)


def test_the_job_is_over_when_one_that_is_not_in_is_the_last_to_end() -> None:
    job = Returning(2)
    w0, _ = job.workers
    member = job.back(1)
    job.say(w0, w0.leave())
    job.tick(1.0)
    told = job.say(member, member.leave())
    assert news_of(told, wire.Stop)
    job.tick(1.0)
    assert job.tick(1.0) == []


def test_one_that_gives_up_while_it_waits_is_not_let_in() -> None:
    job = Returning(3)
    member, _ = job.waits(2)
    job.say(member, member.leave())
    assert not [said for said in job.beat(job.workers[0]) if isinstance(said, wire.Newcomer)]
    job.say(job.workers[0], admitted(job.workers[0], member))
    assert job.scheduler.lost_workers == {2}
    job.lose(0)
    assert job.scheduler.failure is None


# ---- barriers, joins and keys


def test_barriers_go_on_from_its_sponsors_place() -> None:
    job = Returning()
    w0, w1, _ = job.workers
    job.lose(2)
    for number in (1, 2):
        job.say(w0, w0.barrier(number))
        job.say(w1, w1.barrier(number))
    job.say(w1, w1.barrier(3))
    member = job.again(2)
    for number in (1, 2, 3, 4):
        barrier = member.barrier(number)
        assert job.reply(member, barrier) == wire.Ack(barrier.seq), "its program passes those before it is in"
    job.say(member, enter(member))
    job.say(w0, admitted(w0, member, (3, 0)))
    first = w0.barrier(3)
    assert [whom for whom, _ in news_of(job.say(w0, first), wire.Ack)] == [w1, w0], "it is not in barrier 3"
    w1_waits = w1.barrier(4)
    job.say(w1, w1_waits)
    said = job.reply(w1, w1.explain(w1_waits.seq))
    assert said.missing == [0, 2]
    assert job.say(w0, w0.barrier(4)) == []
    assert [whom for whom, _ in job.say(member, member.barrier(4))] == [w1, w0, member]


def test_a_barrier_that_waits_for_the_newcomer_ends_when_it_dies() -> None:
    job = Returning(2)
    w0 = job.workers[0]
    job.let_in(1, passed=(1, 0))
    assert job.say(w0, w0.barrier(2)) == []
    assert [whom for whom, said in job.lose(1) if isinstance(said, wire.Ack)] == [w0]
    job.again(1)
    assert news_of(job.say(w0, w0.barrier(3)), wire.Ack) != []


def test_it_has_called_join_as_often_as_its_sponsor() -> None:
    job = Returning()
    w0, w1, _ = job.workers
    job.lose(2)
    for worker in (w0, w1):
        job.say(worker, worker.pause(1))
    member = job.again(2)
    job.say(member, enter(member))
    job.say(w0, admitted(w0, member, (0, 1)))
    barrier = w1.barrier()
    assert job.say(w1, barrier) == []
    job.say(w0, w0.pause(2))
    assert text_of(job.reply(w1, w1.barrier(2)), "UsageError"), "worker 0 is inside"
    job.say(w1, w1.pause(2))
    assert text_of(job.reply(member, member.barrier(3)), "UsageError"), "both are inside"
    job.say(member, member.pause(2))
    for worker in (w0, w1):
        assert job.say(worker, worker.barrier(3)) == []
    assert len(job.say(member, member.barrier(3))) == 3


def test_stores_that_its_sponsor_has_not_made_wait_for_it_from_the_beginning() -> None:
    job = Returning(2)
    w0 = job.workers[0]
    job.say(w0, w0.barrier(store=0))
    member, _ = job.waits(1)
    job.say(w0, w0.barrier(store=1))
    job.say(w0, admitted(w0, member, (1, 0), stores=[0]))
    assert job.say(w0, w0.barrier(1, store=2)) == []
    assert job.say(w0, w0.barrier(2, store=1)) == []


def test_worker_0_gives_no_first_value_that_is_there_and_gives_those_that_are_not_once_it_is_in() -> None:
    job = Returning(2)
    w0, w1 = job.workers
    job.say(w0, w0.declare("a"))
    job.say(w0, wire.Ready(w0.me(), 0, ["a"]))
    w0 = job.back(0)
    placed = job.reply(w0, w0.declare("a"))
    assert (len(placed.ids), placed.first) == (1, False)
    waits = w0.declare("b")
    assert job.say(w0, waits) == [], "worker 1 gives it"
    placed = job.reply(w1, w1.declare("b"))
    assert placed.first
    told = job.say(w1, wire.Ready(w1.me(), 0, ["b"]))
    assert {(whom, said.seq) for whom, said in told} == {(w1, w1.seq), (w0, waits.seq)}
    waits = w1.declare("c")
    assert job.reply(w1, waits).first
    asked = enter(w0)
    job.say(w0, asked)
    job.say(w1, admitted(w1, w0))
    assert job.reply(w0, w0.declare("d")).first
    assert job.say(w1, w1.declare("e")) == []


def test_the_declaration_of_one_that_is_let_in_as_the_first_may_wait() -> None:
    job = Returning(2)
    w1 = job.workers[1]
    w0 = job.back(0)
    waits = w0.declare("a")
    assert job.say(w0, waits) == []
    asked = enter(w0)
    job.say(w0, asked)
    told = job.say(w1, admitted(w1, w0))
    ((whom, said),) = news_of(told, wire.Placed)
    assert (whom, said.seq, said.first) == (w0, waits.seq, True)


def test_it_declares_anew_what_the_process_before_it_waited_for() -> None:
    job = Returning(3)
    w0, w1, w2 = job.workers
    job.say(w2, w2.declare("a"))
    w2 = job.back(2)
    first, last = w1.declare("a"), w2.declare("a")
    job.say(w1, first)
    job.say(w2, last)
    job.say(w0, w0.declare("a"))
    told = job.say(w0, wire.Ready(w0.me(), 0, ["a"]))
    assert [(whom, said.seq) for whom, said in told] == [(w0, w0.seq), (w1, first.seq), (w2, last.seq)]


def test_nobody_is_let_in_to_a_job_that_all_others_have_left() -> None:
    job = Returning(2)
    w0, w1 = job.workers
    job.say(w0, w0.leave())
    again = w1.again()
    job.gone.append(w1)
    job.workers[1] = again
    told = job.say(again, again.join())
    ((_, said),) = news_of(told, wire.Failure)
    assert text_of(said, "NodeLost") == "the job has ended: all other workers have left"
    assert news_of(told, wire.Stop)


def test_where_all_that_were_in_are_lost_the_job_fails_by_name() -> None:
    job = Returning(2)
    job.back(0)
    job.lose(1)
    assert job.scheduler.failure == (
        "worker 1 is lost, and no worker is left that could let those in that were started again"
    )
    assert job.scheduler.cause == "start 1 of worker 1"


# ---- a successor of the scheduler


@pytest.mark.parametrize("when", range(6))
def test_a_successor_goes_on_at_any_place(when: int) -> None:
    records: list[Record] = []
    logs, scheduler = logged(records, least=1)
    workers, _ = joined(logs)
    again = workers[2].again()
    heard: list[Any] = []

    def say(member: Member, message: wire.Message) -> None:
        heard.extend(said for _, said in logs.handle(member.peer, sent(message), 2.0))

    def joins() -> None:
        say(again, again.join())
        again.incarnation, again.seq = 2, 1

    asked: list[wire.Enter] = []

    def enters() -> None:
        asked.append(enter(again))
        say(again, asked[0])

    steps: list[Callable[[], None]] = [
        lambda: say(Member("launcher", 1, 0), wire.Lost("worker", 2, "was killed", 1, False)),
        joins,
        enters,
        lambda: say(workers[0], admitted(workers[0], again)),
        lambda: None,
    ]
    for number, step in enumerate(steps):
        if number == when:
            logs, scheduler = logged([], least=1)
            logs.replay(records, 20.0)
            for member in workers[:2]:
                logs.handle(member.beats, sent(wire.Beat(member.node)), 20.0)
            if asked:
                say(again, asked[0])
        step()
    assert scheduler.lost_workers == set()
    assert [said.seq for said in heard if isinstance(said, wire.Entered)][-1:] == [asked[0].seq]
    barriers = [(member, member.barrier(1)) for member in (*workers[:2], again)]
    for member, barrier in barriers:
        say(member, barrier)
    assert [said for said in heard if isinstance(said, wire.Ack)][-3:] == [wire.Ack(each.seq) for _, each in barriers]


# ---- workers that are added


def test_one_that_is_added_is_lost_until_it_is_let_in_and_is_known_by_its_key() -> None:
    job = Returning(2, max_workers=3, door=Door({b"link of worker 300": "three", b"heartbeat of worker 300": "three"}))
    (w0, w1), added = job.workers, Member("worker", 300, 2)
    job.gone.append(added)
    ((_, welcome), *told) = job.say(added, added.join())
    assert (welcome.rank, welcome.incarnation, welcome.num_workers) == (2, 2, 2)
    added.rank, added.incarnation = 2, 2
    (server,) = job.servers
    assert (server, wire.Roster(1, [], [2], [1], [2], [2], ["three"])) in told
    assert job.scheduler.take_news() == ["worker 2 has been added, and is to be let in"]
    job.beat(added)
    first = w0.barrier()
    job.say(w0, first)
    assert news_of(job.say(w1, w1.barrier()), wire.Ack) != [], "nobody waits for it"
    told = job.say(added, enter(added))
    assert news_of(told, wire.Newcomer) == [(w0, wire.Newcomer(2, 2, 0, 7))]
    told = job.say(w0, wire.Admitted(w0.me(), 2, 2, [0], [1], [0], [2], [5, 6], [3, 4], "s"))
    assert len(news_of(told, wire.Entered)) == 1
    for worker in (w0, w1):
        assert job.say(worker, worker.barrier(2)) == []
    assert len(news_of(job.say(added, added.barrier(2)), wire.Ack)) == 3
    another = Member("worker", 301, 3)
    assert "the job has its 3 workers already" in text_of(_answer(job, another), "UsageError")
    job.handle(b"launcher", wire.Lost("worker", 2, "was killed", 1, False))
    assert job.scheduler.take_news() == ["worker 2 was killed; the job goes on with 2 of 3 workers"]
    assert job.scheduler.lost_workers == {2}
    for worker in (w0, w1):
        told = job.say(worker, worker.leave())
    assert news_of(told, wire.Stop), "the job is over without it"


def test_no_worker_is_added_before_the_job_has_begun_nor_beyond_the_most() -> None:
    job = Returning(2, max_workers=3, start=False)
    added = Member("worker", 300, 2)
    job.say(job.workers[0], job.workers[0].join())
    assert job.say(added, added.join()) == [], "it may be worker 1: all but its rank says so"
    fixed = Returning(2)
    assert "has its 2 workers already" in text_of(_answer(fixed, Member("worker", 300, 2)), "UsageError")
