"""Workers that die while the job goes on, told through a scheduler: who is told of it, and who waits no more."""

from __future__ import annotations

from typing import Any

import pytest
from asking import sent, text_of
from rendezvous import LIMIT, Job, Member, Sparing, joined, logged

from kvstore import wire
from servers.scheduler.departures import Departures
from servers.scheduler.logged import (
    Came,
    LiveRecords,
    Record,
    RecordPacker,
    beginning,
    unpack,
)
from servers.scheduler.members import MemberState
from servers.scheduler.stores import Barriers, Stores


def rosters(told: list[tuple[Any, Any]]) -> list[tuple[Any, list[int], list[int]]]:
    """What members other than workers are told."""
    return [
        (whom, said.departed, said.lost)
        for whom, said in told
        if isinstance(said, wire.Roster) and whom.role != "worker"
    ]


def test_servers_and_aggregators_are_told_of_a_loss_at_once_and_the_job_goes_on() -> None:
    job = Sparing(3, 2, replicas=1, aggregated=[[0, 1]])
    told = job.lose(2)
    assert rosters(told) == [(each, [], [2]) for each in (*job.servers, *job.standbys, *job.aggregators)]
    assert {w for w, said in told if isinstance(said, wire.Roster)} >= set(job.workers[:2]), "workers are told, too"
    assert job.scheduler.failure is None
    assert job.scheduler.take_news() == ["worker 2 was killed by SIGKILL; the job goes on with 2 of 3 workers"]
    assert job.lose(2) == [], "it is known"
    assert [each for _, _, each in rosters(job.lose(1))] == [[1, 2]] * 5
    assert job.scheduler.lost_workers == {1, 2}


def test_of_an_aggregator_that_is_lost_all_are_told_and_the_job_goes_on() -> None:
    job = Sparing(3, 2, replicas=1, aggregated=[[0, 1]])
    lost = wire.Lost("aggregator", 0, "was killed by SIGKILL")
    told = [(whom, said.aggregators) for whom, said in job.handle(b"launcher", lost) if isinstance(said, wire.Roster)]
    assert {whom for whom, _ in told} >= {*job.servers, *job.standbys, *job.workers}
    assert {tuple(ranks) for _, ranks in told} == {(0,)}
    (line,) = job.scheduler.take_news()
    assert "was killed by SIGKILL; the workers of its host send to the servers themselves from now on" in line
    assert job.handle(b"launcher", lost) == [], "it is known"
    assert job.scheduler.failure is None
    (aggregator,) = job.aggregators
    (gone,) = job.beat(aggregator)
    assert (gone.text, gone.cause) == (
        "aggregator 0 was given up, and the job goes on without it",
        "start 1 of aggregator 0",
    )


def test_a_server_whose_link_was_made_anew_is_told_again() -> None:
    job = Sparing()
    job.lose(2)
    (server,) = job.servers
    server.beats = b"another link"
    assert wire.Roster(1, [], [2], [1]) in job.beat(server)


def test_below_the_least_the_job_fails_and_says_why() -> None:
    job = Sparing(3, least=2)
    job.lose(2)
    told = job.lose(1)
    text = "worker 1 was killed by SIGKILL; 1 of 3 workers are left, and the job needs 2 (--min-workers)"
    assert {said.text for _, said in told if isinstance(said, wire.JobFailed)} == {text}
    assert job.scheduler.failure == text
    assert job.scheduler.cause == "start 1 of worker 1"


def test_without_a_least_any_loss_ends_the_job_as_ever() -> None:
    job = Job(3)
    job.handle(b"launcher", wire.Lost("worker", 2, "was killed"))
    assert job.scheduler.failure == "worker 2 was killed"
    assert job.scheduler.cause == ""


def test_before_all_have_joined_a_loss_ends_the_job() -> None:
    job = Sparing(start=False)
    job.say(job.workers[0], job.workers[0].join())
    job.lose(0)
    assert job.scheduler.failure == "worker 0 was killed by SIGKILL"


def test_one_that_is_silent_is_lost_and_told_so_when_it_comes_back() -> None:
    job = Sparing()
    w0, w1, w2, server = job.everyone
    for _ in range(5):
        for member in (w0, w1, server):
            job.beat(member)
        told = job.tick(LIMIT / 4)
        if told:
            break
    assert rosters(told) == [(server, [], [2])]
    assert job.scheduler.failure is None
    (said,) = job.beat(w2)
    assert isinstance(said, wire.JobFailed)
    assert "was given up, and the job goes on without it" in said.text
    assert text_of(job.reply(w2, w2.barrier()), "NodeLost") == "worker 2 was given up, and the job goes on without it"
    assert job.reply(w2, w2.leave()) == wire.Ack(w2.seq)
    assert job.scheduler.failure is None
    assert job.scheduler.given_up == ["start 1 of worker 2"], "launch.py waits for it no more"
    job.lose(2)
    assert job.scheduler.given_up == ["start 2 of worker 2"], "it has ended after all; another may be on its way"


def test_one_that_fails_by_an_exception_of_its_own_is_lost_and_answered() -> None:
    job = Sparing()
    w2, server = job.workers[2], job.servers[0]
    told = job.say(w2, w2.leave("ValueError: x"))
    assert (w2, wire.Ack(w2.seq)) in told
    assert rosters(told) == [(server, [], [2])]
    assert job.lose(2, "exited with code 1") == []
    assert job.scheduler.failure is None


@pytest.mark.parametrize("known", [False, True])
def test_one_that_left_just_before_its_exit_code_came_has_failed(known: bool) -> None:
    job = Sparing(farewell_s=5.0)
    w2, server = job.workers[2], job.servers[0]
    job.say(w2, w2.leave())
    if known:
        for _ in range(4):
            for member in (*job.workers[:2], server):
                job.beat(member)
            told = job.tick(2.0)
            if told:
                break
        assert rosters(told) == [(server, [2], [])]
    present = job.scheduler.members.present
    assert rosters(job.lose(2, "exited with code 1")) == [(server, [], [2])]
    assert job.scheduler.members.everyone[2].state is MemberState.LOST
    assert job.scheduler.members.present == present, "it is gone once"
    assert job.scheduler.members.lost == 1
    for member in (*job.workers[:2], server):
        job.beat(member)
    assert rosters(job.tick(LIMIT / 2)) == [], "its departure is announced no more"


def test_when_all_others_have_left_the_job_is_over() -> None:
    job = Sparing(2)
    w0, _w1, server = job.everyone
    job.lose(1)
    told = job.say(w0, w0.leave())
    assert (server, wire.Stop()) in told
    job.say(server, server.leave())
    assert job.scheduler.finished


# ---- what waits for it


def test_a_barrier_to_which_all_others_have_come_is_over() -> None:
    job = Sparing()
    w0, w1, _ = job.workers
    asked = [(worker, worker.barrier()) for worker in (w0, w1)]
    for worker, barrier in asked:
        assert job.say(worker, barrier) == []
    acks = [(whom, said) for whom, said in job.lose(2) if isinstance(said, wire.Ack)]
    assert acks == [(worker, wire.Ack(barrier.seq)) for worker, barrier in asked]
    again = job.say(w0, asked[0][1])
    assert again == [(w0, wire.Ack(asked[0][1].seq))], "a repeat has the same answer"


def test_a_barrier_to_which_it_had_come_waits_for_those_who_live() -> None:
    job = Sparing()
    w0, w1, w2 = job.workers
    first = w0.barrier()
    for worker, barrier in ((w2, w2.barrier()), (w0, first)):
        assert job.say(worker, barrier) == []
    assert not [said for _, said in job.lose(2) if isinstance(said, wire.Ack)]
    assert job.reply(w0, w0.explain(first.seq)).text == "waits at the barrier for worker 1 (has not come yet)"
    last = w1.barrier()
    assert job.say(w1, last) == [(w0, wire.Ack(first.seq)), (w1, wire.Ack(last.seq))]


def test_a_barrier_that_it_comes_to_when_it_is_back_does_without_it() -> None:
    """It would stand there for one that lives."""
    job = Sparing()
    w0, w1, w2 = job.workers
    job.lose(2)
    first = w0.barrier()
    assert job.say(w0, first) == []
    assert text_of(job.reply(w2, w2.barrier()), "NodeLost")
    last = w1.barrier()
    assert job.say(w1, last) == [(w0, wire.Ack(first.seq)), (w1, wire.Ack(last.seq))]


def test_barriers_of_stores_made_later_do_without_it() -> None:
    job = Sparing(2)
    w0, _ = job.workers
    job.lose(1)
    barrier = w0.barrier(store=3)
    assert job.reply(w0, barrier) == wire.Ack(barrier.seq)


def test_a_barrier_at_which_only_the_lost_one_waits_is_forgotten() -> None:
    barriers = Barriers(range(3))
    lone = Member("worker", 1, 2).barrier()
    assert barriers.arrive(b"2", lone) == []
    assert barriers.lose(2) == []
    assert barriers.unfinished() == []
    assert barriers.arrive(b"0", Member("worker", 1, 0).barrier()) == []
    assert len(barriers.arrive(b"1", Member("worker", 1, 1).barrier())) == 2


def test_a_store_that_all_others_have_closed_is_forgotten() -> None:
    departures = Departures(0.0)
    stores = Stores(range(3), 1, departures)
    for ordinal in (1, 2):
        stores.open(ordinal)
    for rank in (0, 1):
        stores.close(rank, 0)
    departures.lose(2)
    stores.lose(2)
    assert stores.open(3) == 0, "its number is free"
    for rank in (0, 1):
        stores.close(rank, 1)
    assert stores.open(4) == 1


def test_join_ends_without_it() -> None:
    job = Sparing()
    w0, w1, _w2 = job.workers
    job.say(w0, w0.pause())
    barrier = w1.barrier()
    job.lose(2)
    assert text_of(job.reply(w1, barrier), "UsageError"), "worker 0 is inside"
    job.say(w1, w1.pause())
    first, last = w0.barrier(2), w1.barrier(2)
    assert job.say(w0, first) == [], "all are out"
    assert job.say(w1, last) == [(w0, wire.Ack(first.seq)), (w1, wire.Ack(last.seq))]


# ---- a successor


def test_a_successor_knows_of_a_loss_by_report_and_by_silence() -> None:
    records: list[Record] = []
    first, scheduler = logged(records, least=1)
    workers, server = joined(first)
    first.handle(b"launcher", sent(wire.Lost("worker", 2, "was killed")), 2.0)
    for now in (4.0, 8.0, 10.9, 11.5):
        for member in (workers[0], server):
            first.handle(member.beats, sent(wire.Beat(member.node)), now)
        first.tick(now)
    assert scheduler.lost_workers == {1, 2}
    again, successor = logged([], least=1)
    again.replay(records, 20.0)
    assert successor.lost_workers == {1, 2}
    barrier = workers[0].barrier()
    assert [reply for _, reply in again.handle(b"new", sent(barrier), 20.0)] == [wire.Ack(barrier.seq)]
    outbox = again.handle(b"beats", sent(wire.Beat(server.node)), 20.0)
    assert [said.lost for _, said in outbox if isinstance(said, wire.Roster)] == [[1, 2]]


def test_the_log_is_trimmed_of_barriers_to_which_it_did_not_come() -> None:
    lost: set[int] = set()
    live, packer = LiveRecords(3, lost), RecordPacker()

    def add(rank: int, number: int, seq: int) -> None:
        me = wire.Sender(wire.Node("worker", rank, 1), seq, seq)
        record = Came(0.0, b"link", "", wire.Barrier(me, store=0, number=number))
        live.add(packer.pack(record), record)

    def barriers() -> list[int]:
        begins = beginning(3)
        left = [record for record, _ in unpack(begins + live.trim(), begins, RecordPacker()) if record is not None]
        return [record.message.number for record in left if isinstance(record, Came)]  # type: ignore[attr-defined]

    for rank in (0, 1):
        add(rank, 1, 2)
    add(2, 2, 3)
    for rank in (0, 1):
        add(rank, 2, 3)
    assert barriers() == [1, 1, 2, 2, 2]
    lost.add(2)
    for rank in (0, 1):
        add(rank, 3, 4)
    assert barriers() == [3, 3], "all who live have their answers to the others"
