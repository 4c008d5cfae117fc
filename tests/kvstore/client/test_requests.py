"""What a worker says about a store: which messages, to whom, in which order, and what follows the answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placed import entries_for
from played_session import AGGREGATOR, SCHEDULER, PlayedSession

from kvstore import wire
from kvstore.client.entries import PushClocks
from kvstore.client.plans import Plan, parcels
from kvstore.client.requests import Joining, Requests, WorkerBarriers
from kvstore.optim.optimizer import describe
from kvstore.rule import Rule
from kvstore.spec import Key, Spec
from kvstore.ticket import Operation, WaitLimits
from kvstore.values import Leaving, from_buffer, to_buffer

SPECS: dict[Key, Spec] = {"cut": Spec((6,), "float32"), "w": Spec((2,), "float32")}


def made(session: PlayedSession, rule: Rule | None = None) -> Requests:
    requests = Requests(session, 3, rule or Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    del session.asked[: 1 + len(session.servers)]
    return requests


def kinds(session: PlayedSession) -> list[tuple[bytes, type]]:
    return [(peer, type(message)) for peer, message in session.asked]


def test_a_store_is_opened_with_the_scheduler_and_then_on_all_servers() -> None:
    session = PlayedSession()
    requests = Requests(session, 3, Rule("async", staleness=2), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    assert kinds(session) == [(SCHEDULER, wire.OpenStore), (b"server 0", wire.Open), (b"server 1", wire.Open)]
    assert session.asked[0][1].ordinal == 3
    assert requests.store == 7
    assert {(message.store, message.mode, message.staleness) for _, message in session.asked[1:]} == {(7, "async", 2)}


def test_an_aggregator_opens_the_store_too_and_closes_it() -> None:
    session = PlayedSession(aggregator=True)
    requests = Requests(session, 3, Rule("async", aggregate="host"), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    assert [peer for peer, message in session.asked if isinstance(message, wire.Open)] == [*session.servers, AGGREGATOR]
    assert {message.aggregate for _, message in session.asked[1:]} == {"host"}
    session.asked.clear()
    requests.close()
    assert kinds(session) == [
        (b"server 0", wire.Close),
        (b"server 1", wire.Close),
        (AGGREGATOR, wire.Close),
        (SCHEDULER, wire.CloseStore),
    ]


def test_it_is_closed_the_other_way_round() -> None:
    session = PlayedSession()
    made(session).close()
    assert kinds(session) == [(b"server 0", wire.Close), (b"server 1", wire.Close), (SCHEDULER, wire.CloseStore)]


def test_keys_are_where_the_scheduler_says() -> None:
    def answer(_: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Declare):
            return wire.Placed(request.seq, [2, 1], [4, 5, 6], [0, 1, 0], [0, 3, 0], [3, 6, 2])
        return wire.Ack(request.seq)

    session = PlayedSession(answer=answer)
    entries = made(session).declare(["cut", "w"], [0, 1], list(SPECS.values()), 5, 100)
    ((_, message),) = session.asked
    assert (message.keys, message.shapes, message.bound, message.longest) == (["cut", "w"], [[6], [2]], 5, 100)
    assert [(s.id, s.server, s.start, s.stop) for s in entries["cut"].segments] == [(4, 0, 0, 3), (5, 1, 3, 6)]
    assert entries["w"].spec == SPECS["w"]


def test_first_values_are_on_the_servers_before_the_scheduler_hears_of_them() -> None:
    def note() -> None:
        assert kinds(session) == [(b"server 0", wire.Init), (b"server 1", wire.Init)]
        notes.append("ready")

    session, notes = PlayedSession(), []
    plan = Plan(entries_for(SPECS, servers=2, bound=5), list(SPECS), 1 << 20)
    requests = made(session)
    requests.put_values(plan, Leaving([torch.arange(6.0), torch.tensor([8.0, 9.0])]))
    requests.ready(plan.keys, note)
    assert kinds(session)[-1] == (SCHEDULER, wire.Ready)
    assert session.asked[-1][1].keys == ["cut", "w"]
    assert notes == ["ready"]
    sent = torch.cat(
        [from_buffer(buffer, "float32") for _, message in session.asked[:-1] for buffer in message.buffers]
    )
    assert sorted(sent.tolist()) == [0, 1, 2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("silent", [None, b"server 0", b"server 1"])
def test_an_optimizer_is_set_when_all_servers_have_answered(silent: bytes | None) -> None:
    def answer(peer: bytes, request: wire.Request) -> wire.Reply | None:
        return None if peer == silent and isinstance(request, wire.SetOptimizer) else wire.Ack(request.seq)

    def note() -> None:
        notes.append("set")

    session, notes = PlayedSession(answer=answer), []
    requests = made(session)
    description = describe("sgd", {"lr": 0.5, "momentum": 0.9, "lr_mult": {"w": 2.0}})
    if silent is None:
        requests.set_optimizer(1, description, note)
    else:
        with pytest.raises(AssertionError):  # it would wait
            requests.set_optimizer(1, description, note)
    assert notes == (["set"] if silent is None else [])
    message = session.asked[0][1]
    assert (message.version, message.name, message.lr) == (1, "sgd", 0.5)
    assert (message.hyper, message.lr_mult) == ([["momentum", 0.9]], [["w", 2.0]])


def test_states_go_out_and_come_back() -> None:
    stored: dict[tuple[int, str], torch.Tensor] = {}

    def answer(_: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.PutStates):
            parts = wire.unpack_arrays(request.buffers, [4 * shape[0] for shape in request.shapes])
            values = [from_buffer(part, "float32") for part in parts]
            stored.update(zip(zip(request.ids, request.names, strict=True), values, strict=True))
        if isinstance(request, wire.GetStates):
            names = [which for which in stored if which[0] in request.ids]
            return wire.OptimizerStates(
                request.seq,
                optimizer="sgd",
                ids=[number for number, _ in names],
                names=[name for _, name in names],
                shapes=[list(stored[which].shape) for which in names],
                dtypes=["float32"] * len(names),
                buffers=wire.pack_arrays([to_buffer(stored[which].clone()) for which in names]),
            )
        return wire.Ack(request.seq)

    requests = made(PlayedSession(answer=answer))
    entries = entries_for(SPECS, servers=2, bound=5)
    states = {
        (segment, "momentum_buffer"): torch.full((segment.stop - segment.start,), float(segment.id))
        for key in SPECS
        for segment in entries[key].segments
    }
    read: dict[Any, torch.Tensor] = {}
    for parcel in parcels(entries, list(SPECS), 1 << 20):
        requests.put_states(parcel.server, {which: states[which] for which in states if which[0] in parcel.segments})
        read |= requests.get_states(parcel)
    assert read.keys() == states.keys()
    assert all(torch.equal(read[which], states[which]) for which in states)
    assert requests.optimizer() == "sgd"


def test_a_barrier_goes_on_after_its_call() -> None:
    session = PlayedSession(
        answer=lambda _, request: None if isinstance(request, wire.Barrier) else wire.Ack(request.seq)
    )
    barriers, waited = WorkerBarriers(made(session)), list[Operation]()
    session.client.wait = lambda operation, timeout: waited.append(operation)  # type: ignore[attr-defined]
    barriers.wait()
    assert [(peer, message.number) for peer, message in session.asked] == [(SCHEDULER, 1)]
    assert waited[0].open
    assert str(waited[0]) == "barrier"


def test_an_aggregator_is_told_where_keys_are() -> None:
    def answer(_: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Declare):
            return wire.Placed(request.seq, [2, 1], [4, 5, 6], [0, 1, 0], [0, 3, 0], [3, 6, 2])
        return wire.Ack(request.seq)

    session = PlayedSession(answer=answer, aggregator=True)
    requests = Requests(session, 1, Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    session.asked.clear()
    requests.declare(["cut", "w"], [0, 1], list(SPECS.values()), 5, 100)
    assert kinds(session) == [(SCHEDULER, wire.Declare), (AGGREGATOR, wire.Describe)], "before anything can be pushed"
    told = session.asked[1][1]
    assert (told.keys, told.kinds, told.shapes, told.dtypes) == (["cut", "w"], [0, 1], [[6], [2]], ["float32"] * 2)
    assert (told.counts, told.ids, told.servers, told.sizes) == ([2, 1], [4, 5, 6], [0, 1, 0], [3, 3, 2])


def test_an_aggregator_hears_of_a_pause_of_all_segments() -> None:
    session = PlayedSession(
        answer=lambda peer, request: (
            wire.Resume(request.seq, 1, [5] * len(request.ids))
            if isinstance(request, wire.Pause) and peer != AGGREGATOR and peer != SCHEDULER
            else wire.Ack(request.seq)
        ),
        aggregator=True,
    )
    requests = Requests(session, 1, Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    session.asked.clear()
    entries = entries_for(SPECS, servers=2, bound=5)
    clocks = PushClocks()
    clocks.grow(len(SPECS))
    clocks.pushed[:] = 3
    joining = Joining(requests, clocks)
    joining.begin(entries)
    peers = [SCHEDULER, b"server 0", b"server 1", AGGREGATOR]
    assert kinds(session) == [(peer, wire.Pause) for peer in peers]
    messages = [message for _, message in session.asked[1:]]
    assert sorted(messages[2].ids) == sorted([*messages[0].ids, *messages[1].ids])
    assert (set(messages[2].clocks), messages[2].number, messages[2].pushes) == ({3}, 1, 3 * len(SPECS))
    assert joining.end(entries) == 1
    assert clocks.pushed.tolist() == [5] * len(SPECS), "the rounds are the servers' to tell"
