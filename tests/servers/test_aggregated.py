"""A job whose hosts sum their workers' pushes first: its rounds and sums are those of the flat job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from asking import Desk, Worker, floats, optimized, read, text_of, values_in
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.spec import Spec

SIZES = {1: 2, 2: 3, 3: 1}
LISTS = ((1, 2, 3), (1,), (2, 3), (1, 2))


class Pushed(NamedTuple):
    rank: int
    ids: tuple[int, ...]
    clocks: tuple[int, ...]

    def values(self) -> dict[int, torch.Tensor]:
        return {
            number: torch.full((SIZES[number],), 1 + 10 * self.rank + 100 * number + 1000 * clock)
            for number, clock in zip(self.ids, self.clocks, strict=True)
        }


class Case(NamedTuple):
    """A job: what each worker pushes, and the messages, which are of one or several workers of a host."""

    workers: int
    hosts: list[list[int]]
    messages: list[tuple[Pushed, ...]]
    order: list[int]  # of messages; some come again
    counts: list[dict[int, int]]  # by worker: how often it pushes each segment

    @property
    def last(self) -> list[int]:
        """By worker: the place in ``order`` after which all its messages have come."""
        places = {index: place for place, index in reversed(list(enumerate(self.order)))}
        ends = [-1] * self.workers
        for index, message in enumerate(self.messages):
            for pushed in message:
                ends[pushed.rank] = max(ends[pushed.rank], places[index])
        return ends


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Jobs; dice decide on hosts, sums and order, for hypothesis prefers the simplest, in which nothing overlaps."""
    dice = draw(st.randoms(use_true_random=True))
    workers = draw(st.integers(2, 5))
    parts = [dice.randrange(3) for _ in range(workers)]
    hosts = [ranks for part in range(3) if (ranks := [rank for rank in range(workers) if parts[rank] == part])]
    plan = [LISTS[0], *dice.choices(LISTS, k=draw(st.integers(1, 4)))]
    lengths = [len(plan) - dice.randrange(2) for _ in range(workers)]
    counts = [dict.fromkeys(SIZES, 0) for _ in range(workers)]
    messages: list[tuple[Pushed, ...]] = []
    for step, ids in enumerate(plan):
        for ranks in hosts:
            sums: dict[int, list[Pushed]] = {}
            for rank in ranks:
                if step < lengths[rank]:
                    for number in ids:
                        counts[rank][number] += 1
                    pushed = Pushed(rank, ids, tuple(counts[rank][number] for number in ids))
                    sums.setdefault(dice.choice([0, 0, 0, 1]), []).append(pushed)
            messages += map(tuple, sums.values())
    order = [*range(len(messages)), *dice.choices(range(len(messages)), k=3 if messages else 0)]
    dice.shuffle(order)
    return Case(workers, hosts, messages, order, counts)


class Run:
    def __init__(self, case: Case, merged: bool, updated: bool, **rule: Any) -> None:
        dtype = torch.float64 if updated else torch.int64
        values = {number: torch.zeros(size, dtype=dtype) for number, size in SIZES.items()}
        self.case = case
        self.desk = Desk(case.workers, values=values, aggregated=case.hosts if merged else (), **rule)
        if updated:
            optimized(self.desk, lr=1.0, momentum=1.0)
        self.answers: dict[tuple[int | str, int], Any] = {}
        self.of: dict[Pushed, tuple[int | str, int]] = {}  # whose request carries a push
        self._sent: dict[tuple[Pushed, ...], tuple[Worker, Any]] = {}
        self._dtype = dtype

    def deliver(self, message: tuple[Pushed, ...]) -> None:
        if message not in self._sent:
            values = {
                number: torch.stack([pushed.values()[number] for pushed in message]).sum(0).to(self._dtype)
                for number in message[0].ids
            }
            ranks = [pushed.rank for pushed in message]
            sender, carried = self.desk.workers[ranks[0]], {}
            if self.desk.aggregators:
                host = next(host for host, there in enumerate(self.case.hosts) if ranks[0] in there)
                sender, carried = self.desk.aggregators[host], {"ranks": ranks}
            self._sent[message] = sender, sender.push(values, list(message[0].clocks), want=True, **carried)
            self.of |= dict.fromkeys(message, (sender.name, sender.seq))
        self.hear(self.desk.ask(*self._sent[message]))

    def hear(self, replies: dict[tuple[int | str, int], Any]) -> None:
        """Note replies; one that comes again is the same."""
        for who, reply in replies.items():
            assert self.answers.setdefault(who, reply) == reply

    def outcomes(self) -> dict[Pushed, str | None]:
        """What was answered to each push: values, the kind of an error, or None if it waits.

        Values may be of a later round of some segments, if others have come later.
        """
        replies = {pushed: self.answers.get(request) for pushed, request in self.of.items()}
        return {
            pushed: reply.kind if isinstance(reply, wire.Failure) else reply and type(reply).__name__
            for pushed, reply in replies.items()
        }

    def values(self) -> list[list[float]]:
        buckets = self.desk.shard.stores[0].buckets
        return [buckets.value(number).tolist() for number in SIZES]

    def versions(self) -> list[int]:
        return self.desk.shard.stores[0].buckets.versions(list(SIZES))


def play(case: Case, merged: bool, updated: bool, ending: str) -> Run:
    """Deliver all messages; in the flat job, those of one worker after those of another, each worker's in turn."""
    run = Run(case, merged, updated)
    order: Sequence[tuple[Pushed, ...]] = [case.messages[index] for index in case.order]
    if not merged:
        order = [(pushed,) for message in case.messages for pushed in message]
    ends = case.last if merged else [len(order) - 1] * case.workers
    gone: list[int] = []
    for place in range(-1, len(order)):
        if place >= 0:
            run.deliver(order[place])
        for rank in [rank for rank, end in enumerate(ends) if end == place]:
            if ending == "leave":
                gone.append(rank)
                run.hear(run.desk.named(run.desk.shard.depart(gone)))
            elif ending == "pause":
                worker = run.desk.workers[rank]
                run.hear(run.desk.ask(worker, worker.pause(case.counts[rank])))
    return run


@settings(max_examples=25, deadline=None)
@given(cases(), st.booleans(), st.sampled_from(["leave", "pause", "stay"]))
def test_sums_and_rounds_are_those_of_the_flat_job(case: Case, updated: bool, ending: str):
    flat, merged = play(case, False, updated, ending), play(case, True, updated, ending)
    assert merged.values() == flat.values()
    assert merged.versions() == flat.versions()
    assert merged.outcomes() == flat.outcomes()


@settings(max_examples=25, deadline=None)
@given(cases(), st.data())
def test_a_quorum_is_of_workers_however_they_are_summed(case: Case, data: st.DataObject):
    quorum, late = data.draw(st.integers(1, case.workers)), data.draw(st.sampled_from(["drop", "keep"]))
    gone = data.draw(st.sets(st.integers(0, case.workers - 1), max_size=2))
    run = Run(case, True, False, quorum=quorum, late=late)
    expected = {number: Quorum(case.workers, quorum, late == "keep") for number in SIZES}
    for place, index in enumerate(case.order):
        message = case.messages[index]
        run.deliver(message)
        if index not in case.order[:place]:
            for number, clock in zip(message[0].ids, message[0].clocks, strict=True):
                ranks = {pushed.rank for pushed in message}
                expected[number].take(ranks, clock, sum(int(pushed.values()[number][0]) for pushed in message))
        if place == len(case.order) // 2:
            run.hear(run.desk.named(run.desk.shard.depart(gone)))
            for model in expected.values():
                model.leave(gone)
    assert run.values() == [[model.value] * SIZES[number] for number, model in expected.items()]
    assert run.versions() == [model.version for model in expected.values()]


class Quorum:
    """What a quorum means for one segment, in the fewest words."""

    def __init__(self, workers: int, quorum: int, keep: bool) -> None:
        self.version = self.value = self._late = 0
        self._alive = set(range(workers))
        self._quorum = quorum
        self._keep = keep
        self._rounds: dict[int, tuple[set[int], int]] = {}

    def take(self, ranks: set[int], clock: int, value: int) -> None:
        if clock <= self.version:
            self._late += value * self._keep
        else:
            there, total = self._rounds.get(clock, (set(), 0))
            self._rounds[clock] = there | ranks, total + value
        self._close()

    def leave(self, ranks: set[int]) -> None:
        self._alive -= ranks
        self._close()

    def _close(self) -> None:
        while len(self._rounds.get(self.version + 1, ((), 0))[0]) >= max(1, min(self._quorum, len(self._alive))):
            self.version += 1
            self.value = self._rounds[self.version][1] + self._late
            self._late = 0


# ---- one by one


def hosts(**options: Any) -> Desk:
    return Desk(4, values={1: floats(0), 2: floats(0)}, aggregated=[[0, 1], [2, 3]], **options)


def test_one_answer_is_given_to_each_host():
    desk, host, other = hosts().and_aggregators()
    early = host.push({1: floats(3)}, ranks=[0, 1], want=True)
    pull = other.pull([1], 1, ranks=[2, 3])
    assert desk.ask(host, early) == desk.ask(other, pull) == {}
    late = other.push({1: floats(12)}, ranks=[2, 3])
    replies = desk.ask(other, late)
    assert replies.keys() == {(host.name, early.seq), (other.name, pull.seq), (other.name, late.seq)}
    assert read(desk, replies[host.name, early.seq]) == read(desk, replies[other.name, pull.seq]) == 15
    assert replies[other.name, late.seq] == wire.Ack(late.seq)


def test_hosts_are_summed_in_the_order_of_their_first_workers():
    values = [floats(1e8), floats(1.0), floats(-1e8)]
    desk, host, other = Desk(5, values={1: floats(0)}, aggregated=[[1, 4], [0, 3]]).and_aggregators()
    desk.ask(desk.workers[2], desk.workers[2].push({1: values[2]}))
    desk.ask(host, host.push({1: values[1]}, ranks=[1, 4]))
    desk.ask(other, other.push({1: values[0]}, ranks=[0, 3]))
    assert desk.value(clock=1) == values[0] + values[1] + values[2]
    assert desk.value(clock=1) != values[0] + values[2] + values[1], "these values cannot tell"


def test_what_a_host_waits_for_is_explained_to_its_aggregator():
    desk, host, other = hosts().and_aggregators()
    waiting = host.push({1: floats(3)}, ranks=[0, 1])
    desk.ask(host, waiting)
    desk.ask(other, other.push({1: floats(3)}, ranks=[2]))
    said = desk.reply(host, host.explain(waiting.seq))
    assert (said.text, said.missing) == ("waits for worker 3, whose push 1 of 'k1' is missing", [3])
    worker = desk.workers[0]
    assert desk.reply(worker, worker.explain(waiting.seq)).text == "", "it is not this worker's, whatever its number"


def test_a_worker_and_an_aggregator_of_one_rank_may_wait_with_one_number():
    desk = hosts()
    worker, host = desk.workers[0], desk.aggregators[0]
    worker.seq = host.seq = 50
    pull, push = worker.pull([1], 1), host.push({1: floats(3)}, ranks=[0, 1])
    assert pull.seq == push.seq
    assert desk.ask(worker, pull) == desk.ask(host, push) == {}
    assert desk.ask(host, push) == {}, "a repeat"
    other = desk.aggregators[1]
    replies = desk.ask(other, other.push({1: floats(5)}, ranks=[2, 3]))
    assert replies.keys() == {(0, pull.seq), (host.name, push.seq), (other.name, other.seq)}
    assert desk.reply(host, push) == replies[host.name, push.seq]


def test_the_same_push_does_not_count_by_itself_and_in_a_sum():
    desk, host, other = hosts().and_aggregators()
    worker = desk.workers[1]
    desk.ask(worker, worker.push({1: floats(2)}))
    twice = host.push({1: floats(3)}, ranks=[0, 1])
    text = text_of(desk.reply(host, twice), "UsageError")
    assert text.startswith("push 1 of 'k1' by workers 0, 1 belongs to no open round")
    desk.ask(host, host.push({1: floats(1)}, ranks=[0]))
    desk.ask(other, other.push({1: floats(5)}, ranks=[2, 3]))
    assert desk.value(clock=1) == 8


def test_what_an_aggregator_may_not_send_leaves_no_trace():
    desk, host, other = hosts().and_aggregators()
    for message in (
        host.push({1: floats(100)}),
        host.push({1: floats(100)}, ranks=[1, 2]),
        host.push({1: floats(100)}, ranks=[0, 1], rank_clocks=[1, 1]),
        host.init({3: floats(1)}),
        host.open("async"),
        host.pause({1: 0}),
        desk.workers[2].push({1: floats(100)}, ranks=[2]),
    ):
        sender = desk.workers[2] if message.node.role == "worker" else host
        text = text_of(desk.reply(sender, message), "UsageError")
        assert text == text_of(desk.reply(sender, message), "UsageError"), "and a repeat is told again"
    desk.ask(host, host.push({1: floats(3)}, ranks=[0, 1]))
    desk.ask(other, other.push({1: floats(5)}, ranks=[2, 3]))
    assert desk.value(clock=1) == 8


def test_a_host_that_waits_for_a_worker_that_has_left_is_told():
    desk = hosts()
    host = desk.aggregators[0]
    waiting = host.push({1: floats(3)}, ranks=[0, 1])
    desk.ask(host, waiting)
    replies = desk.named(desk.shard.depart([3]))
    assert text_of(replies[host.name, waiting.seq], "NodeLost") == (
        "worker 3 has left the job without a push of 'k1', and workers 0, 1 wait for push 1: uneven batches? See join()"
    )


def test_a_sum_with_the_push_of_a_worker_that_has_paused_before_is_refused():
    desk, host, other = hosts().and_aggregators()
    worker = desk.workers[1]
    desk.ask(worker, worker.pause({1: 1, 2: 0}))
    for message in (host.push({1: floats(3)}, 2, ranks=[0, 1]), host.push({2: floats(3)}, 1, ranks=[0, 1])):
        text = text_of(desk.reply(host, message), "UsageError")
        assert text == "worker 1 is inside join(), and must not push before all workers are"
    desk.ask(host, host.push({1: floats(3)}, 1, ranks=[0, 1]))
    desk.ask(other, other.push({1: floats(5)}, 1, ranks=[2, 3]))
    assert desk.value(clock=1) == 8


def test_errors_of_a_round_name_the_workers_of_each_sum():
    desk, host, other = optimized(hosts(finite=True), lr=1.0).and_aggregators()
    desk.ask(host, host.push({1: floats(3)}, ranks=[0, 1], lr=0.5))
    reply = desk.ask(other, other.push({1: floats(3)}, ranks=[2, 3], lr=0.25))[other.name, other.seq]
    assert text_of(reply, "Mismatch").endswith(": 0.5 on workers 0, 1, 0.25 on workers 2, 3")
    desk.ask(host, host.push({1: floats(float("nan"))}, 2, ranks=[0, 1]))
    reply = desk.ask(other, other.push({1: floats(3)}, 2, ranks=[2, 3]))[other.name, other.seq]
    assert "push 2 of 'k1' by workers 0, 1 has NaN" in text_of(reply, "NotFinite")


def test_values_that_an_aggregator_reads_are_those_that_its_workers_have_read():
    """Delay compensation corrects a worker's gradient by what has changed since the worker has read."""
    ends = []
    for carried in ({}, {"ranks": [1]}):
        desk = optimized(Desk(2, "async", {1: floats(1)}, aggregated=[[0, 1]], compensation=0.5), lr=1.0)
        (host,) = desk.aggregators
        sender = host if carried else desk.workers[1]
        reads = sender.pull([1], ranks=[0, 1]) if carried else sender.pull([1])
        assert values_in(desk.reply(sender, reads), [Spec((1,), "float32")])[0] == 1
        desk.ask(desk.workers[0], desk.workers[0].push({1: floats(2)}))
        desk.ask(sender, sender.push({1: floats(3)}, **carried))
        ends.append(desk.value(1).tolist())
    assert ends == [[1 - 2 - (3 + 0.5 * 9 * -2)]] * 2


# ---- stores where each push is an update


def test_each_worker_of_a_sum_has_its_own_clock():
    desk, host, other = optimized(hosts(mode="async", staleness=1, aggregate="host"), lr=1.0).and_aggregators()
    desk.ask(other, other.push({1: floats(1)}, 3, ranks=[2, 3]))
    desk.ask(host, host.push({1: floats(10)}, 3, ranks=[0, 1], rank_clocks=[1, 3]))
    assert read(desk, desk.reply(host, host.pull([1], 2, ranks=[0]))) == -11
    waiting = host.pull([1], 3, ranks=[1])
    assert desk.reply(host, waiting) is None
    assert "worker 0, whose push 2 of 'k1' is missing" in desk.reply(host, host.explain(waiting.seq)).text
    replies = desk.ask(host, host.push({1: floats(100)}, 2, ranks=[0]))
    assert read(desk, replies[host.name, waiting.seq]) == -111


@pytest.mark.parametrize(
    ("rule", "sum_of", "words"),
    [
        ({}, {"ranks": [0, 1], "rank_clocks": [1, 1]}, "all pushes of one round have one clock"),
        ({}, {"ranks": [0], "rank_clocks": [2]}, "all pushes of one round have one clock"),
        ({"mode": "async"}, {"ranks": [0, 1]}, "each push is an update, unless it has aggregate='host'"),
        ({"mode": "async", "aggregate": "host"}, {"ranks": [0, 1], "rank_clocks": [1, 2]}, "must be the highest"),
        (
            {"mode": "async", "aggregate": "host", "staleness": 1},
            {"ranks": [0, 1], "rank_clocks": [0, 1], "want": True},
            "with a staleness, each pulls its own",
        ),
    ],
)
def test_sums_that_a_store_does_not_take(rule: dict[str, Any], sum_of: dict[str, Any], words: str):
    desk = optimized(hosts(**rule), lr=1.0)
    host = desk.aggregators[0]
    assert words in text_of(desk.reply(host, host.push({1: floats(1)}, **sum_of)), "UsageError")
    assert desk.value(1) == 0
