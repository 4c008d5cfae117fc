"""Whole jobs in virtual time with aggregators: the same values as without, and loud when one dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Worker, floats
from hosting import describe, floats_in, values
from inproc import InprocNetwork
from simulation.job import SimulatedJob
from simulation.network import Weather
from simulation.programs import add
from simulation.runs import HOSTS, Plan, carry_out, verdict

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import JOB_FAILED_EXIT
from servers.aggregator.aggregator_process import SILENT_S, STALL_S, Upstream
from servers.aggregator.exchanges import Exchange, push
from servers.aggregator.gathering import HostSegments, Pushed
from servers.requests.reasons import Reason


@pytest.mark.parametrize(
    "plan",
    [
        *(Plan(1, mode, hosts=HOSTS[0]) for mode in ("sync", "async", "ssp")),
        Plan(1, hosts=HOSTS[1]),
        Plan(2, compression={"type": "fp16"}, hosts=HOSTS[0]),
        Plan(3, uneven=True, hosts=HOSTS[1]),
        Plan(4, pieces=True, hosts=HOSTS[0]),
    ],
)
def test_a_job_with_aggregators_is_exact(plan: Plan) -> None:
    assert verdict(plan, carry_out(plan)) == "exact"


def test_an_aggregator_that_dies_ends_the_job_by_name() -> None:
    outcome = carry_out(Plan(5, hosts=HOSTS[0], crashes=(("aggregator 1", 200),)))
    assert outcome.errors
    assert all("aggregator 1" in str(error) for error in outcome.errors.values())
    assert outcome.exit_codes["aggregator 0"] == JOB_FAILED_EXIT


def test_sums_are_in_a_fixed_order() -> None:
    results = [SimulatedJob(seed, workers=4, hosts=HOSTS[0]).run(add).results for seed in range(3)]
    assert len({tuple(map(tuple, result)) for result in results}) == 1
    assert len({tuple(values) for values in results[0]}) == 1


def test_a_host_sends_one_gradient_and_is_sent_one_value_however_many_workers_it_has() -> None:
    size, rounds = 20_000, 5

    def train(store: DistStore) -> None:
        out = torch.zeros(size)
        store.init("w", out)
        for _ in range(rounds):
            store.pushpull("w", torch.ones(size), out)
            assert out.tolist() == [4.0] * size

    def crossed(hosts: tuple[tuple[int, ...], ...]) -> int:
        """Bytes between hosts if each server is on one with two workers."""
        job = SimulatedJob(0, Weather(cut=0.0, repeat=0.0), workers=4, hosts=hosts, bigarray_bound=1000)
        outcome = job.run(train)
        assert not outcome.errors
        members = [
            {"server 0", "worker 0", "worker 1", "aggregator 0"},
            {"server 1", "worker 2", "worker 3", "aggregator 1"},
        ]
        return sum(
            nbytes
            for (source, target), nbytes in job.network.traffic.items()
            for here in members
            if source in here and target not in here and target != "scheduler"
        )

    once = 2 * 2 * (4 * size // 2) * rounds  # each way, of two hosts, half of the array
    assert crossed(HOSTS[0]) < 1.2 * once
    assert crossed(()) > 1.9 * once


ME = wire.Node("aggregator", 0, 1)


class Line:
    def __init__(self, window: int = 1 << 20) -> None:
        network = InprocNetwork()
        self.servers = [network.transport(), network.transport()]
        for rank, server in enumerate(self.servers):
            server.bind(f"inproc://{rank}")
        self.transport = network.transport()
        self.now = 0.0
        self.explained: list[tuple[bytes, int, str]] = []
        self.upstream = Upstream(
            self.transport,
            ME,
            ["inproc://0", "inproc://1"],
            window,
            lambda: self.now,
            lambda *told: self.explained.append(told),
        )
        segments = HostSegments()
        segments.add(describe(Worker(0), {1: ("a", 0, 2), 2: ("b", 1, 2)}))
        self.lists = {number: segments.listed([number]) for number in (1, 2)}

    def exchange(self, number: int = 1, clock: int = 1, **fields: Any) -> Exchange:
        message = Worker(0).push({number: floats(1, 2)}, clock)
        asker = Pushed(b"link", wire.Push(**{**vars(message), **fields}))
        return push(self.lists[number], [asker], message.buffers, passes=False)

    def heard(self, server: int) -> list[tuple[bytes, Any]]:
        """What a server has heard since it was last asked, without greetings."""
        messages = []
        while (received := self.servers[server].recv(0)) is not None:
            message = wire.decode(received[1])
            if not isinstance(message, wire.Here):
                messages.append((received[0], message))
        return messages

    def answer(self, server: int, peer: bytes, reply: Any) -> list[tuple[Exchange, Any]] | None:
        self.servers[server].send(peer, wire.encode(reply))
        received = self.transport.recv(0)
        assert received is not None
        return self.upstream.take(*received)


def test_a_request_goes_to_its_server_and_its_answer_comes_with_it():
    line = Line()
    exchange = line.exchange(2)
    line.upstream.send(exchange)
    assert line.heard(0) == []
    ((peer, message),) = line.heard(1)
    assert (message.node, message.ranks, message.ids) == (ME, [0], [2])
    assert line.answer(1, peer, wire.Ack(message.seq)) == [(exchange, wire.Ack(message.seq))]
    assert line.answer(1, peer, wire.Ack(message.seq)) == [], "a repeat"


def test_an_error_is_an_answer():
    line = Line()
    exchange = line.exchange()
    line.upstream.send(exchange)
    ((peer, message),) = line.heard(0)
    ((answered, reply),) = line.answer(0, peer, wire.Failure(message.seq, "Mismatch", "no")) or []
    assert (answered, reply.kind, reply.text) == (exchange, "Mismatch", "no")


def test_what_workers_send_is_left_to_others():
    line = Line()
    line.transport.bind("inproc://here")
    worker = line.servers[0]
    peer = worker.connect("inproc://here")
    worker.send(peer, wire.encode(wire.Ack(1)))
    received = line.transport.recv(0)
    assert received is not None
    assert line.upstream.take(*received) is None


def test_values_come_in_their_turn_and_what_stalls_is_hurried():
    line = Line(window=8)
    for clock in (1, 2, 3):
        line.upstream.send(line.exchange(1, clock, want=True, priority=clock))
    assert [message.clocks for _, message in line.heard(0)] == [[1]]
    line.upstream.tick()
    assert line.upstream.due() == STALL_S
    line.now = STALL_S / 2  # a tick before it is time does not begin the wait anew
    assert line.upstream.tick() == []
    assert line.upstream.due() == STALL_S
    line.now = STALL_S
    line.upstream.tick()
    assert [message.clocks for _, message in line.heard(0)] == [[3], [2]]
    assert line.upstream.due() is None


def test_a_server_says_what_a_request_waits_for():
    line = Line()
    exchange = line.exchange()
    line.upstream.send(exchange)
    line.upstream.explain(exchange, b"worker", 9)
    (_, (peer, question)) = line.heard(0)
    assert (type(question), question.about) == (wire.Explain, exchange.seq)
    assert line.answer(0, peer, wire.Explanation(question.seq, "waits for worker 5", [5])) == []
    assert line.explained == [(b"worker", 9, Reason("waits for worker 5", [5]))]


def test_a_server_that_says_nothing_is_named():
    line = Line()
    exchange = line.exchange(2)
    line.upstream.send(exchange)
    line.upstream.explain(exchange, b"worker", 9)
    line.now = SILENT_S + 1
    line.upstream.tick()
    assert line.explained == [(b"worker", 9, Reason("waits for server 1, which does not answer"))]


def test_a_server_that_is_elsewhere_is_asked_there():
    line = Line()
    exchange = line.exchange(1)
    line.upstream.send(exchange)
    ((before, message),) = line.heard(0)
    line.servers[1].bind("inproc://elsewhere")
    line.upstream.move(0, "inproc://elsewhere")
    assert line.upstream.tick() == []
    ((peer, again),) = line.heard(1)
    assert again.seq == message.seq
    line.servers[0].send(before, wire.encode(wire.Ack(message.seq)))
    assert line.transport.recv(0) is None, "the old link is dropped"
    assert line.answer(1, peer, wire.Ack(again.seq)) == [(exchange, wire.Ack(again.seq))]
    assert line.heard(0) == []


def test_links_are_made_anew_and_what_has_no_answer_is_sent_again():
    line = Line()
    exchange = line.exchange(1, want=True)
    line.upstream.send(exchange)
    ((before, message),) = line.heard(0)
    line.upstream.renew()
    assert line.upstream.tick() == []
    ((peer, again),) = line.heard(0)
    assert (again.seq, peer != before) == (message.seq, True)
    assert line.answer(0, before, values(5, 6)) == [], "the old link is not listened to"
    ((answered, reply),) = line.answer(0, peer, wire.Values(again.seq, buffers=values(7, 8).buffers)) or []
    assert (answered, floats_in(reply)) == (exchange, [7, 8])
