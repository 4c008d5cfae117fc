"""A push of what has been pushed before is taken as the first was: same answers, same values, same errors."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, sent
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.wire.coding import ATTRIBUTE
from servers.store.served_store import ServedStore

SEGMENTS = {1: floats(1, 2), 2: floats(3), 3: floats(4, 5, 6)}
HOSTS = [[0, 1], [2]]


class Pair:
    """Two servers that get the same messages; one of them takes no shortcuts.

    Attributes:
        taken: how many pushes the other has taken by shortcuts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **rule: Any) -> None:
        self.shards = [Desk(3, values=SEGMENTS, aggregated=HOSTS, **rule).shard for _ in range(2)]
        self.workers = [Worker(rank) for rank in range(3)] + [Worker(rank, role="aggregator") for rank in range(2)]
        for worker in self.workers:
            worker.seq = 10
        self.taken = 0
        take = ServedStore.push_as_before

        def counted(served: ServedStore, peer: bytes, message: wire.Push) -> Any:
            answers = take(served, peer, message)
            self.taken += answers is not None
            return answers

        monkeypatch.setattr(ServedStore, "push_as_before", counted)

    def say(self, worker: Worker, message: wire.Message) -> None:
        """Give ``message`` to both, and compare what they answer and hold."""
        first, second = (
            shard.handle(worker.peer, given) for shard, given in zip(self.shards, self._given(message), strict=True)
        )
        assert [(peer, list(map(bytes, wire.encode(reply)))) for peer, reply in first] == [
            (peer, list(map(bytes, wire.encode(reply)))) for peer, reply in second
        ]
        self.compare()

    def depart(self, ranks: list[int]) -> None:
        first, second = (shard.depart(ranks) for shard in self.shards)
        assert first == second

    def compare(self) -> None:
        one, other = (shard.stores[0] for shard in self.shards)
        assert [request.sender for request in one.parked] == [request.sender for request in other.parked]
        assert _held(one) == _held(other)

    @staticmethod
    def _given(message: wire.Message) -> list[wire.Message]:
        plain = sent(message)
        plain.__dict__.pop(ATTRIBUTE, None)  # nothing is known of it
        return [sent(message), plain]


def _held(served: ServedStore) -> list[Any]:
    return [
        (
            bucket.ids,
            bucket.value.tolist(),
            bucket.rounds.version,
            [(clock, list(ranks), item.hyper, item.clock) for clock, ranks, item in bucket.rounds.open()],
            [(clock, parked.request.sender, parked.left, parked.late) for clock, parked in bucket.parked],
            bucket.last_at,
        )
        for bucket in served.buckets.all()
    ]


@st.composite
def actions(draw: st.DrawFn) -> list[tuple[str, int, Any]]:
    """What members do, most often pushes of the same lists in rounds."""
    kind = st.sampled_from(["round"] * 4 + ["push"] * 4 + ["odd", "pull", "optimizer", "pause", "depart"])
    return [(draw(kind), draw(st.integers(0, 4)), draw(st.integers(0, 11))) for _ in range(draw(st.integers(1, 14)))]


LISTS = [[1, 2, 3], [1, 2, 3], [1], [2, 3]]


@settings(max_examples=35, deadline=None)
@given(actions(), st.booleans())
def test_any_run_is_the_same_with_and_without_shortcuts(run: list[tuple[str, int, Any]], finite: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        pair, clock, numbers = Pair(monkeypatch, finite=finite), 1, itertools.count(2)
        for what, who, extra in run:
            worker = pair.workers[who]
            ids = LISTS[extra % 4]
            values = {number: SEGMENTS[number] * next(numbers) for number in ids}
            ranks = HOSTS[worker.rank] if worker.role == "aggregator" else []
            if what == "round":
                for member in pair.workers[2:4] if extra % 2 else pair.workers[:3]:
                    of = HOSTS[member.rank] if member.role == "aggregator" else []
                    pair.say(member, member.push(values, clock, want=True, ranks=of))
                clock += 1
            elif what == "push":
                push = worker.push(
                    values, clock + extra // 8, want=extra % 3 > 0, lr=0.5 if extra == 5 else None, ranks=ranks
                )
                pair.say(worker, push)
            elif what == "odd":
                bad = {number: value.repeat(2) if extra % 2 else value / 0 for number, value in values.items()}
                pair.say(worker, worker.push(bad, [clock] * (len(ids) - 1) + [clock + extra % 3], ranks=ranks))
            elif what == "pull":
                pair.say(worker, worker.pull(ids, clock - extra % 2, ranks=ranks))
            elif what == "optimizer":
                for member in pair.workers[:3]:
                    pair.say(member, member.set_optimizer(lr=0.5, version=next(numbers), momentum=extra / 20))
            elif what == "pause" and worker.role == "worker":
                pair.say(worker, worker.pause(dict.fromkeys(SEGMENTS, clock - 1)))
            elif what == "depart":
                pair.depart([who % 3])


def test_all_contributors_but_the_first_take_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    for clock in range(1, 4):
        for worker in pair.workers[:3]:
            pair.say(worker, worker.push(SEGMENTS, clock, want=True))
    assert pair.taken == 8
    assert all(torch.equal(pair.shards[0].stores[0].buckets.value(number), 3 * SEGMENTS[number]) for number in SEGMENTS)


def test_answers_of_one_round_have_the_same_buffers_and_numbers_of_their_own() -> None:
    desk = Desk(3, values=SEGMENTS)
    for worker in desk.workers:
        worker.seq = 10 * worker.rank + 20
        out = desk.shard.handle(worker.peer, sent(worker.push(SEGMENTS, want=True)))
    assert [(peer, reply.seq) for peer, reply in out] == [(w.peer, 10 * w.rank + 21) for w in desk.workers]
    assert all(isinstance(reply, wire.Values) and reply.buffers is out[0][1].buffers for _, reply in out)  # type: ignore[attr-defined]


def test_a_value_is_not_changed_while_any_answer_of_its_round_is_kept() -> None:
    desk, first, second = Desk(2, values={1: floats(0)}).and_workers()
    desk.ask(first, first.push({1: floats(1)}, 1, want=True))
    out = desk.shard.handle(second.peer, sent(second.push({1: floats(2)}, 1, want=True)))
    (kept,) = [reply for peer, reply in out if peer == second.peer]
    del out
    first.done = first.seq + 1  # the answer to the first, from which the other was made, is forgotten
    desk.ask(first, first.push({1: floats(4)}, 2))
    desk.ask(second, second.push({1: floats(8)}, 2))
    assert desk.value() == floats(12)
    assert bytes(kept.buffers[0]) == bytes(bytearray(floats(3).numpy().tobytes()))  # type: ignore[attr-defined]


def test_a_bucket_that_has_been_split_is_let_go_at_the_next_push() -> None:
    desk = Desk(2, values=SEGMENTS)
    for worker in desk.workers:
        desk.ask(worker, worker.push(SEGMENTS, 1))
    buckets = desk.shard.stores[0].buckets
    whole = weakref.ref(buckets.holding(1))
    buckets.apart({1: 1, 2: 2})
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: SEGMENTS[1]}, 2))
    gc.collect()
    assert whole() is None
    assert torch.equal(desk.value(1), 2 * SEGMENTS[1])


def test_what_is_wrong_is_said_of_a_push_like_others() -> None:
    desk = Desk(2, values={1: floats(0)})
    for clock in (1, 2):
        for worker in desk.workers:
            desk.ask(worker, worker.push({1: floats(1)}, clock))
    reply = desk.reply(desk.workers[0], desk.workers[0].push({1: floats(1)}, 2))
    assert isinstance(reply, wire.Failure)
    assert "push 2 of 'k1' by worker 0 belongs to no open round" in reply.text
    reply = desk.reply(desk.workers[0], desk.workers[0].push({1: floats(1, 2)}, 3))
    assert isinstance(reply, wire.Failure)
    assert "a payload of 2 elements where 1 belong" in reply.text
