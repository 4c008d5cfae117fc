"""Who may speak in whose name: cores that are told which key each link has proved, and jobs with keys and without."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from asking import Desk, Door, Worker, floats, sender, sent, text_of
from rendezvous import Job, Member
from secured import SecuredJob, Training
from threaded import ThreadedJob
from waiting import LONG, until

from kvstore import wire
from kvstore.client import DistStore
from kvstore.transport import Transport
from kvstore.transport.sockets.socket_transport import TcpTransport
from kvstore.transport.zeromq import ZmqTransport
from servers.scheduler import Scheduler
from servers.shard import Shard

# ---- a server


@pytest.fixture
def door() -> Door:
    return Door({b"own": "key 0", b"other": "key 1", b"scheduler": "key of the scheduler"})


@pytest.fixture
def shard(door: Door) -> Shard:
    return Shard(0, 2, None, door, ["key 0", "key 1"])


def said(shard: Shard, peer: bytes, message: wire.Message) -> list[Any]:
    outbox = shard.handle(peer, sent(message))
    assert all(whom == peer for whom, _ in outbox)
    return [reply for _, reply in outbox]


def test_a_server_hears_a_worker_over_links_with_its_key_only(shard: Shard, door: Door):
    worker = Worker(0)
    assert said(shard, b"own", opening := worker.open()) == [wire.Ack(opening.seq)]
    for link in (b"other", b"scheduler", b"unknown"):
        for forged in (worker.open(), worker.init({1: floats(1)}), worker.push({1: floats(1)}), worker.explain(1)):
            (reply,) = said(shard, link, forged)
            assert text_of(reply, "UsageError") == "worker 0 joined this job with another key than that of this link"
        assert said(shard, link, wire.Here(wire.Node("worker", 0, 1))) == []
    assert door.admitted == [b"own"]
    assert said(shard, b"own", first := worker.init({1: floats(1)})) == [wire.Ack(first.seq)], (
        "nothing has been noted of them"
    )


def test_a_server_that_was_told_no_key_hears_nobody_who_has_one(door: Door):
    shard, worker = Shard(0, 2, None, door, ["key 0"]), Worker(1)
    (reply,) = said(shard, b"other", worker.open())
    assert "another key" in text_of(reply, "UsageError")


def test_what_a_worker_says_first_makes_a_link_its_own(shard: Shard, door: Door):
    assert said(shard, b"own", wire.Here(wire.Node("worker", 0, 1))) == []
    assert door.admitted == [b"own"]
    for stranger in (
        wire.Here(wire.Node("worker", 2, 1)),
        wire.Here(wire.Node("worker", 1, 0)),
        wire.Here(wire.Node("server", 0, 1)),
    ):
        assert said(shard, b"other", stranger) == []
    assert said(shard, b"other", wire.Alive()) == []
    assert door.admitted == [b"own"]


def test_who_is_refused_stays_a_stranger():
    door = Door()
    shard = Shard(0, 1, None, door)
    (reply,) = said(shard, b"link", Worker(1).open())
    assert text_of(reply, "UsageError").endswith("is neither a worker nor an aggregator of this job")
    assert door.admitted == []


def test_a_repeat_draws_no_answer_away():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    push = a.push({1: floats(1)}, want=True)
    assert desk.shard.handle(a.peer, sent(push)) == []
    assert desk.shard.handle(b"forger", sent(wire.Here(wire.Node("worker", 0, 1)))) == []
    assert desk.shard.handle(b"forger", sent(push)) == []
    answers = dict(desk.shard.handle(b.peer, sent(b.push({1: floats(2)}))))
    assert a.peer in answers


def test_an_aggregator_speaks_for_its_own_workers_over_links_with_its_key():
    door = Door({b"host": "key a0", b"other": "key a1", b"worker": "key 0"})
    shard = Shard(0, 2, None, door, ["key 0", "key 1"], [[0], [1]], ["key a0", "key a1"])
    worker, host = Worker(0), Worker(0, role="aggregator")
    for message in (worker.open(), worker.init({1: floats(0)})):
        assert said(shard, b"worker", message) == [wire.Ack(message.seq)]
    assert said(shard, b"host", wire.Here(host.node)) == []
    for link in (b"other", b"worker", b"unknown"):
        (reply,) = said(shard, link, host.push({1: floats(1)}, ranks=[0]))
        assert text_of(reply, "UsageError") == "aggregator 0 joined this job with another key than that of this link"
    (reply,) = said(shard, b"host", host.push({1: floats(1)}, ranks=[1]))
    assert "it speaks for worker 0 only" in text_of(reply, "UsageError")
    (reply,) = said(shard, b"host", Worker(0).pull([1]))
    assert "worker 0 joined this job with another key" in text_of(reply, "UsageError")
    assert said(shard, b"host", host.push({1: floats(1)}, ranks=[0])) == []
    assert door.admitted == [b"worker", b"host"]


def test_a_server_hears_a_worker_that_was_added_once_it_is_told_its_key(door: Door):
    door.keys |= {b"added": "key 2"}
    shard = Shard(0, 2, None, door, ["key 0", "key 1"], min_workers=1, max_workers=3)
    added = Worker(2, 2)
    opening = added.open()
    for link in (b"added", b"other"):
        assert said(shard, link, opening) == [], "the scheduler may be about to say who it is"
    outbox = shard.depart(*wire.Roster(1, [], [2], [1], [2], [2], ["key 2"]).told)
    assert outbox[0] == (b"added", wire.Ack(opening.seq))
    assert [text_of(reply, "UsageError") for link, reply in outbox if link == b"other"] == [
        "worker 2 joined this job with another key than that of this link"
    ]
    assert "is neither a worker" in text_of(said(shard, b"added", Worker(3, 2).open())[0], "UsageError")


# ---- a scheduler


class KeyedJob(Job):
    """A job in which each member's links have proved a key of its own."""

    def __init__(self, *, start: bool = True, aggregated: list[list[int]] | None = None) -> None:
        self.door = Door({b"scheduler's": "key of the scheduler", b"nobody's": "key of nobody yet"})
        super().__init__(start=False, aggregated=aggregated or [])
        for member in self.everyone:
            self.door.keys |= dict.fromkeys((member.peer, member.beats), f"key of {member.nonce}")
        aggregators = len(self.aggregators)
        self.scheduler = Scheduler(2, 1, 10.0, 0.0, self.door, "key of the scheduler", num_aggregators=aggregators)
        self.tick()
        if start:
            self.start()

    def forged(self, message: wire.Message, link: bytes = b"") -> list[Any]:
        peer = link or self.workers[1].peer
        outbox = self.scheduler.handle(peer, sent(message), self.now)
        return [(whom, sent(reply)) for whom, reply in outbox]


def test_servers_are_told_the_workers_keys_and_workers_are_not():
    job, w0, w1, server = KeyedJob(start=False).and_members()
    for member in (server, w1):
        assert job.say(member, member.join()) == []
    welcomes = dict(job.say(w0, w0.join()))
    assert welcomes[server].worker_keys == ["key of 100", "key of 101"]
    assert welcomes[w0].worker_keys == welcomes[w1].worker_keys == []
    assert [isinstance(welcome, wire.Welcome) for welcome in welcomes.values()] == [True] * 3


def test_an_aggregator_is_told_the_keys_of_its_own_workers():
    job = KeyedJob(start=False, aggregated=[[1]])
    *others, last = job.everyone
    for member in others:
        assert job.say(member, member.join()) == []
    welcomes = dict(job.say(last, last.join()))
    (aggregator,) = job.aggregators
    assert welcomes[aggregator].worker_keys == ["", "key of 101"]
    assert welcomes[aggregator].aggregator_keys == []
    assert welcomes[job.servers[0]].worker_keys == ["key of 100", "key of 101"]
    assert welcomes[job.servers[0]].aggregator_keys == [f"key of {aggregator.nonce}"]


def test_whoever_joins_again_must_have_the_same_key():
    job, w0, w1, server = KeyedJob(start=False).and_members()
    job.say(w0, w0.join())
    ((_, reply),) = job.forged(w0.join())
    assert text_of(reply, "UsageError") == "a process with another key has asked to join in this name"
    ((_, reply),) = job.forged(wire.Leave(sender(-1, 2, incarnation=w0.nonce), error="bye"))
    assert text_of(reply, "UsageError") == "worker -1 is not a member of this job"
    assert job.say(w1, w1.join()) == []
    assert {whom for whom, _ in job.say(server, server.join())} == {w0, w1, server}


def test_with_one_key_one_member_joins_at_a_time():
    job, w0, w1, server = KeyedJob(start=False).and_members()
    job.say(w0, w0.join())
    ((_, reply),) = job.handle(w0.peer, w1.join())
    assert text_of(reply, "UsageError").startswith("a member has joined with this public key already")
    job.say(w0, wire.Leave(sender(-1, 2, incarnation=w0.nonce), error="bye"))
    assert job.handle(w0.peer, w1.join()) == []
    assert job.handle(w1.peer, w0.join()) == []
    assert len(job.say(server, server.join())) == 3


def test_a_member_is_heard_over_links_with_its_key_only(caplog: pytest.LogCaptureFixture):
    job = KeyedJob()
    w0 = job.workers[0]
    admitted = list(job.door.admitted)
    for forged in (w0.barrier(), w0.leave(), w0.declare("w")):
        ((_, reply),) = job.forged(forged)
        assert text_of(reply, "UsageError") == "worker 0 joined this job with another key than that of this link"
    assert job.forged(wire.Here(wire.Node("worker", 0, 1))) == []
    ((_, reply),) = job.forged(wire.Beat(wire.Node("worker", 0, 1)))
    assert isinstance(reply, wire.JobFailed)
    assert job.door.admitted == admitted
    assert "dropped a Barrier in the name of worker 0 (1 so far): it came over a link with another key" in caplog.text
    assert job.reply(w0, asked := w0.pause()) == wire.Ack(asked.seq), "it is still there"


@pytest.mark.parametrize("what", [wire.Beat, wire.ProcessAlive])
def test_forged_signs_of_life_keep_nobody_alive(what: type[wire.Beat | wire.ProcessAlive]):
    job = KeyedJob()
    others = job.everyone[1:]
    for _ in range(4):
        job.tick(4.0)
        for member in others:
            job.beat(member)
        job.forged(what(wire.Node("worker", 0, 1)))
        if job.scheduler.failure:
            break
    assert job.scheduler.failure is not None
    assert job.scheduler.failure.startswith("worker 0 is lost")


def test_a_pulse_from_beside_a_member_keeps_it_alive_and_draws_no_notice_to_it():
    job = KeyedJob()
    w0, *others = job.everyone
    job.door.keys[b"pulse"] = "key of 100"
    for _ in range(4):
        job.tick(4.0)
        for member in others:
            job.beat(member)
        assert job.forged(wire.ProcessAlive(wire.Node("worker", 0, 1)), b"pulse") == []
    assert job.scheduler.failure is None
    told = {whom for whom, _ in job.handle(w0.peer, w0.leave("it failed"))}
    assert told == {w0, *others}


@pytest.mark.parametrize(
    ("link", "about", "believed"),
    [
        (b"scheduler's", ("worker", 0), True),
        (b"scheduler's", ("scheduler", 0), True),
        (b"link of worker 100", ("worker", 0), True),
        (b"link of worker 101", ("worker", 0), False),
        (b"link of server 20", ("worker", 0), False),
        (b"link of worker 101", ("scheduler", 0), False),
        (b"nobody's", ("worker", 0), False),
    ],
)
def test_who_may_report_that_a_member_has_ended(link: bytes, about: tuple[str, int], believed: bool):
    """The launcher has all keys, and uses that of the member, or the scheduler's."""
    job = KeyedJob()
    job.forged(wire.Lost(*about, "exited with code 7"), link)
    assert (job.scheduler.failure is not None) == believed


@pytest.mark.parametrize(("link", "believed"), [(b"nobody's", True), (b"link of worker 100", False)])
def test_who_may_report_that_one_has_ended_that_has_not_joined(link: bytes, believed: bool):
    job = KeyedJob(start=False)
    job.say(job.workers[0], job.workers[0].join())
    job.forged(wire.Lost("worker", 1, "exited with code 7"), link)
    assert (job.scheduler.failure is not None) == believed


def test_without_keys_anybody_may_report():
    job = Job()
    job.handle(b"anybody", wire.Lost("worker", 0, "exited with code 7"))
    assert job.scheduler.failure == "worker 0 exited with code 7"


def test_the_links_of_who_has_given_up_joining_are_dropped():
    door = Door()
    scheduler, early = Scheduler(2, 1, 10.0, 0.0, door), Member("worker", 100, 0)
    assert scheduler.handle(early.peer, sent(early.join()), 0.0) == []
    assert door.admitted == [early.peer]
    scheduler.handle(early.peer, sent(wire.Leave(sender(-1, 2, incarnation=early.nonce), error="bye")), 0.0)
    assert door.refused == [early.peer]


# ---- real links


class Forger:
    """Says things over links of its own, and notes what it is told.

    Args:
        transport: to make the links with.
        endpoints: where to.
    """

    def __init__(self, transport: Transport, *endpoints: str) -> None:
        self._transport = transport
        self._links = [transport.connect(endpoint) for endpoint in endpoints]

    def say(self, *messages: wire.Message) -> list[Any]:
        """Say all of it over each link; return what came back within a moment after the last."""
        for link in self._links:
            for message in messages:
                self._transport.send(link, wire.encode(message))
        told = []
        while (received := self._transport.recv(LONG if not told else 0.2)) is not None:
            if received[1]:
                told.append(wire.decode(received[1]))
        return told


def test_a_member_that_speaks_in_anothers_name_changes_nothing(caplog: pytest.LogCaptureFixture):
    with SecuredJob() as job, caplog.at_level(logging.WARNING):
        transport = ZmqTransport(keys=job.keys["worker 1"])
        forger, worker = Forger(transport, *job.places.values()), Worker(0)
        worker.seq = 1000
        try:
            with Training(job):
                told = forger.say(
                    wire.Here(wire.Node("worker", 0, 1)),
                    worker.push({1: floats(1)}, 7, want=True),
                    worker.explain(3),
                    wire.Leave(worker.me(), error="forged"),
                    wire.Lost("worker", 0, "was never lost"),
                )
        finally:
            transport.close()
        failures = {reply.text for reply in told if isinstance(reply, wire.Failure)}
        assert failures == {"worker 0 joined this job with another key than that of this link"}
        assert {type(reply) for reply in told} <= {wire.Failure, wire.Explanation}, (
            "the scheduler explains to whoever asks"
        )
    assert set(job.exit_codes.values()) == {0}
    assert "in the name of worker 0" in caplog.text
    assert "a report that worker 0 was never lost" in caplog.text


def test_a_report_with_the_key_of_the_lost_or_of_the_scheduler_is_heard():
    for name in ("worker 0", "scheduler"):
        with SecuredJob() as job:
            transport = ZmqTransport(keys=job.keys[name])
            transport.send(
                transport.connect(job.places["scheduler"]), wire.encode(wire.Lost("worker", 0, "exited with code 7"))
            )
            try:
                until(lambda job=job: job.sessions[1].client.failure is not None, "the other worker to be told")
            finally:
                transport.close()
        assert job.exit_codes["server 0"] != 0


def test_over_plain_links_a_forger_draws_no_answer_away():
    """It cannot be told from the worker; but what the worker asks it is answered, over its own link."""
    with ThreadedJob(2, 1, kind="tcp") as job:
        go_on = threading.Event()
        asked: list[wire.Push] = []

        def work(store: DistStore) -> list[float]:
            out = torch.zeros(3)
            store.init("w", torch.zeros(3))
            if store.rank == 1:
                assert go_on.wait(LONG)
            store.pushpull("w", torch.full((3,), store.rank + 1.0), out)
            return out.tolist()

        def forge() -> None:
            links = job.sessions[0].client.links

            def waiting() -> list[wire.Push]:
                """Return the push that has left and waits for the other worker's; init's requests do not wait."""
                left = [wire.decode([bytes(f) for f in r.frames or ()]) for r in links.outstanding if r.in_flight]
                return [message for message in left if isinstance(message, wire.Push)]

            asked.extend(until(waiting, "the worker to wait"))
            transport = TcpTransport()
            link = transport.connect(links.endpoints[b"server 0"])
            try:
                transport.send(link, wire.encode(wire.Here(wire.Node("worker", 0, 1))))
                transport.send(link, wire.encode(asked[0]))
                transport.send(link, wire.encode(Worker(0).explain(asked[0].seq)))
                until(lambda: transport.recv(0.05), "the forger to be heard")
                go_on.set()
                until(lambda: transport.recv(0.05), "the forger to be answered, too")
            finally:
                transport.close()

        forger = threading.Thread(target=forge)
        forger.start()
        assert job.run(work) == [[3.0] * 3] * 2
        forger.join(LONG)
        assert not forger.is_alive()
    assert asked
