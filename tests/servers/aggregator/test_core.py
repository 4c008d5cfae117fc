"""The core of an aggregator: who may speak, groups of pushes, exchanges, and memory that devices lend."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from asking import Door, Worker, floats, sent, text_of
from hosting import Host, describe, floats_in, total, values
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.devices import CannotLend, Handle, HostMemory, Lent
from kvstore.errors import KeyNotInitialized, Mismatch, ServerError, UsageError, WireError
from kvstore.transport.memory import Heap
from servers.activity import Lateness
from servers.aggregator.aggregator import Aggregator
from servers.aggregator.encoding import Encoding
from servers.aggregator.exchanges import Exchange, landed, pull, push
from servers.aggregator.gathering import MOST_LISTS, Gathering, Group, HostSegments, Pulled, Pushed
from servers.aggregator.loans import Loans, reading
from servers.requests.reasons import Reason

# ---- the core of an aggregator: who may speak, which stores there are, and what it does not handle


def test_only_workers_of_the_host_are_served():
    host = Host((2, 3))
    for stranger in (Worker(0), Worker(2, incarnation=2), Worker(2, role="server")):
        ((peer, reply),) = host.core.handle(stranger.peer, sent(stranger.pull([1])), 0.0)
        assert "is not a worker of this host" in text_of(reply, "UsageError")
        assert peer == stranger.peer


def test_a_link_with_another_key_is_turned_away():
    door = Door({b"good": "key of 2", b"bad": "other"})
    core = Aggregator([2], Heap(), Host((9,)), door, {2: "key of 2"})
    worker = Worker(2)
    assert core.handle(b"good", sent(worker.open()), 0.0) == [(b"good", wire.Ack(1))]
    ((_, reply),) = core.handle(b"bad", sent(worker.open()), 0.0)
    assert "another key" in text_of(reply, "UsageError")
    assert door.admitted == [b"good"]


def test_a_worker_that_is_lost_is_waited_for_no_more_and_not_heard_when_it_comes_back():
    host = Host((2, 3))
    host.push(2, {1: [1, 2]})
    assert host.sent == []
    host.core.depart([], [3])
    exchange = host.take()
    assert total(exchange) == [1, 2]
    push = host.workers[3].push({1: floats(7, 7)})
    ((_, reply),) = host.core.handle(host.workers[3].peer, sent(push), 0.0)
    assert "is not a worker of this host" in text_of(reply, "UsageError")
    host.push(2, {1: [3, 4]}, 2)
    assert total(host.take()) == [3, 4]


def test_what_a_worker_has_pushed_that_is_lost_counts_nowhere_before_a_server_has_it():
    host = Host((2, 3))
    host.push(3, {1: [1, 2]})
    host.push(3, {1: [1, 2]}, 2)
    host.push(2, {1: [1, 2]})
    assert total(host.take()) == [2, 4]  # a server has it
    host.core.depart([], [3])
    assert host.sent == []
    host.push(2, {1: [3, 4]}, 2)  # the next process of rank 3 pushes its round 2 to the servers
    exchange = host.take()
    assert (exchange.fields["ranks"], total(exchange)) == ([2], [3, 4])


@pytest.mark.parametrize(
    ("ask", "text", "kind"),
    [
        (lambda worker: worker.pull([1], store=7), "not open", "UsageError"),
        (lambda worker: worker.open("async"), "store 0 is async", "Mismatch"),
        (lambda worker: worker.set_optimizer(), "send it to the servers", "UsageError"),
        (lambda worker: describe(worker, {1: ("a", 1, 2)}), "differently", "Mismatch"),
    ],
    ids=["a store that is not open", "another rule", "what belongs to servers", "a bad description"],
)
def test_what_is_refused(ask: Callable[[Worker], wire.Message], text: str, kind: str):
    host = Host()
    assert text in text_of(host.reply(host.workers[3], ask(host.workers[3])), kind)


def test_notices_and_greetings_are_not_answered():
    host = Host()
    worker = host.workers[2]
    assert host.core.handle(worker.peer, wire.Here(worker.node), 0.0) == []
    assert host.core.handle(worker.peer, wire.Stop(), 0.0) == []


def test_what_a_request_waits_for_is_asked_of_the_server():
    host = Host((2,))
    message = host.push(2, {1: [1, 2]})
    question = host.workers[2].explain(message.seq)
    assert host.ask(2, question) == {}
    ((exchange, peer, seq),) = host.explained
    assert (exchange, peer, seq) == (host.sent[0], host.workers[2].peer, question.seq)
    assert host.named(host.core.explained(peer, seq, Reason("waits for worker 9", [9]))) == {
        (2, question.seq): wire.Explanation(question.seq, "waits for worker 9", [9])
    }


def test_what_is_known_here_is_explained_here():
    host = Host()
    message = host.push(2, {1: [1, 2]})
    missing = "waits for worker 3, whose push 1 of 'a' is missing"
    for about, text, ranks in ((message.seq, missing, [3]), (99, "", [])):
        question = host.workers[2].explain(about)
        assert host.ask(2, question) == {(2, question.seq): wire.Explanation(question.seq, text, ranks)}


def test_an_answer_for_a_store_that_was_closed_is_dropped():
    host = Host((2,))
    host.push(2, {1: [1, 2]})
    exchange = host.take()
    host.core.stores.clear()
    assert host.answer(exchange, wire.Failure(0, "ServerError", "late")) == {}


def test_those_who_have_left_before_a_store_is_opened_are_not_waited_for():
    host = Host((2, 3))
    host.core.depart([3])
    worker = host.workers[2]
    host.reply(worker, worker.open(store=1))
    assert host.core.stores[1] is not host.core.stores[0]


def test_an_aggregator_says_which_of_its_workers_comes_last():
    host = Host((2, 3))
    for clock, late in ((1, 0.75), (2, 0.25)):
        for rank in (2, 3):
            host.now += late if rank == 3 else 0.0
            host.push(rank, {1: [1.0, 1.0]}, clock)
            if rank == 2:
                waits = host.core.activity(host.now + 0.5).waits
                assert waits == ([2], [3], 0.5, f"waits for worker 3, whose push {clock} of 'a' is missing")
        host.sent.clear()
    activity = host.core.activity(host.now)
    assert activity.lateness == Lateness(2, [0, 0, 0, 2], [0.0, 0.0, 0.0, 1.0])
    assert activity.rounds == 2
    assert activity.waits.waiting == (), "for servers they wait elsewhere"


# ---- groups of pushes: complete when nobody's can come any more, whatever lists workers push


SEGMENTS = {number: (f"k{number}", 0, 1) for number in range(4)}


class Pushing:
    def __init__(self, workers: int = 2) -> None:
        self.segments = HostSegments()
        self.segments.add(describe(Worker(0), SEGMENTS))
        self.gathering = Gathering(range(workers), self.segments)
        self.clocks = [dict.fromkeys(SEGMENTS, 0) for _ in range(workers)]
        self._workers = [Worker(rank) for rank in range(workers)]

    def push(self, rank: int, *ids: int) -> list[tuple[tuple[int, ...], list[int]]]:
        """The groups that a push completes: their segments and the ranks in them."""
        clocks = self.clocks[rank]
        for number in ids:
            clocks[number] += 1
        message = wire.Push(
            self._workers[rank].me(), 0, list(ids), [clocks[number] for number in ids], True, None, None
        )
        return said(self.gathering.add(self.segments.listed(ids), rank, Pushed(b"", message), 0.0))


def said(groups: list[Group]) -> list[tuple[tuple[int, ...], list[int]]]:
    return [(group.listed.ids, sorted(group.pushes)) for group in groups]


def test_a_group_is_complete_when_all_have_pushed_it():
    pushing = Pushing()
    assert pushing.push(1, 0, 1) == []
    assert pushing.push(1, 0, 1) == []
    assert pushing.push(0, 0, 1) == [((0, 1), [0, 1])]
    assert pushing.push(0, 0, 1) == [((0, 1), [0, 1])]
    assert len(pushing.gathering) == 0


def test_different_clocks_of_one_list_are_different_groups():
    pushing = Pushing()
    pushing.push(0, 0)
    pushing.push(1, 0)
    assert pushing.push(0, 0, 1) == []
    assert pushing.push(1, 0, 1) == [((0, 1), [0, 1])]


def test_workers_with_other_lists_hold_nobody_up():
    pushing = Pushing()
    assert pushing.push(0, 0, 1) == []
    assert pushing.push(1, 0) == [((0,), [1]), ((0, 1), [0])]
    assert pushing.push(1, 1) == [((1,), [1])]
    assert len(pushing.gathering) == 0


def test_a_later_push_of_another_list_is_no_sign_that_an_earlier_one_will_not_come():
    pushing = Pushing()
    pushing.push(0, 0, 1)
    assert pushing.push(0, 0) == []  # worker 0 is ahead; worker 1 may still push both
    assert pushing.push(1, 0, 1) == [((0, 1), [0, 1])]
    assert pushing.push(1, 0) == [((0,), [0, 1])]


def test_a_worker_that_has_joined_is_waited_for_up_to_its_last_push():
    pushing = Pushing()
    pushing.push(0, 0)
    assert said(pushing.gathering.pause(1, {0: 1, 1: 0})) == []
    pushing.push(0, 1)
    assert said(pushing.gathering.pause(1, {0: 1, 1: 0})) == []
    assert len(pushing.gathering) == 1  # segment 0, which worker 1 has pushed once: it is on its way


def test_what_waits_for_a_worker_goes_on_when_it_joins_or_leaves():
    pushing = Pushing(3)
    pushing.push(0, 0)
    pushing.push(1, 1)
    assert said(pushing.gathering.pause(2, dict.fromkeys(SEGMENTS, 0))) == []
    assert said(pushing.gathering.depart([1])) == [((0,), [0])]
    assert pushing.push(0, 1) == [((1,), [0, 1])]


def test_after_a_join_everybody_is_waited_for_again():
    pushing = Pushing()
    pushing.push(0, 0)
    assert said(pushing.gathering.pause(1, dict.fromkeys(SEGMENTS, 0))) == [((0,), [0])]
    pushing.clocks[1][0] = 1  # as ``Resume`` tells
    assert pushing.push(1, 0) == []
    assert pushing.push(0, 0) == [((0,), [0, 1])]


def test_those_who_are_missing_are_known():
    pushing = Pushing(3)
    pushing.push(1, 0)
    (group,) = pushing.gathering.groups()
    assert pushing.gathering.missing(group) == [0, 2]


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_every_push_goes_on_once_and_nothing_waits_when_all_have_pushed(seed: int, workers: int):
    dice = random.Random(seed)
    pushing = Pushing(workers)
    programs = []
    for _ in range(workers):  # each pushes every segment three times, in lists of its own
        lists: list[tuple[int, ...]] = []
        for _ in range(3):
            ids = dice.sample(sorted(SEGMENTS), len(SEGMENTS))
            at = dice.randint(0, len(ids))
            lists += [part for part in (tuple(ids[:at]), tuple(ids[at:])) if part]
        programs.append(lists)
    if dice.random() < 0.5:
        programs = [programs[0]] * workers
    gone: list[tuple[int, int, int]] = []
    clocks = [dict.fromkeys(SEGMENTS, 0) for _ in range(workers)]
    left = {rank: list(lists) for rank, lists in enumerate(programs)}
    groups: list[tuple[tuple[int, ...], list[int]]] = []
    while any(left.values()):
        rank = dice.choice([rank for rank, lists in left.items() if lists])
        groups += pushing.push(rank, *left[rank].pop(0))
    for ids, ranks in groups:
        for rank in ranks:
            for number in ids:
                clocks[rank][number] += 1
                gone.append((rank, number, clocks[rank][number]))
    assert len(set(gone)) == len(gone)
    assert clocks == [dict.fromkeys(SEGMENTS, 3)] * workers
    assert len(pushing.gathering) == 0
    if all(lists == programs[0] for lists in programs):
        assert all(ranks == list(range(workers)) for _, ranks in groups)


KNOWN = {1: ("a", 0, 3), 2: ("b", 0, 5), 3: ("c", 1, 7)}


def known() -> HostSegments:
    segments = HostSegments()
    segments.add(describe(Worker(0), KNOWN))
    return segments


def test_a_list_knows_its_server_and_sizes():
    listed = known().listed([2, 1])
    assert (listed.server, listed.dtype, listed.sizes, listed.size, listed.nbytes) == (0, "float32", [5, 3], 8, 32)
    assert list(listed.keys) == ["b", "a"]


def test_the_same_list_is_the_same_object_and_knows_lists_that_share_segments():
    segments = known()
    first, second, third = segments.listed([1, 2]), segments.listed([2]), segments.listed([3])
    assert segments.listed([1, 2]) is first
    assert (first.others, second.others, third.others) == ({second}, {first}, set())


def test_all_workers_tell_the_same():
    segments = known()
    segments.add(describe(Worker(1), KNOWN))
    with pytest.raises(Mismatch, match="worker 1 and another worker of this host describe 'a' differently"):
        segments.add(describe(Worker(1), {4: ("d", 0, 1), 1: ("a", 0, 4)}))
    assert len(segments) == 3


def test_a_segment_that_nobody_has_described_is_refused():
    with pytest.raises(KeyNotInitialized, match="segment 9"):
        known().listed([1, 9])


def test_a_list_is_of_one_server():
    with pytest.raises(UsageError, match="one server and one dtype"):
        known().listed([1, 3])


def test_key_and_size_of_a_segment():
    assert (known().key(2), known().size(2)) == ("b", 5)


def test_lists_are_forgotten_when_there_are_very_many_and_not_while_they_are_busy():
    segments = HostSegments()
    segments.add(describe(Worker(0), {number: (f"k{number}", 0, 1) for number in range(MOST_LISTS + 2)}))
    kept = segments.listed([0, 1])
    for number in range(MOST_LISTS + 1):
        segments.listed([number])
    segments.forget({kept})
    assert segments.listed([0, 1]) is kept
    assert not kept.others
    assert segments.listed([1]).others == {kept}


# ---- exchanges


def segments() -> HostSegments:
    known = HostSegments()
    known.add(describe(Worker(0), {1: ("a", 1, 2), 2: ("b", 1, 1)}))
    return known


def pushed(rank: int, **fields: object) -> Pushed:
    message = Worker(rank).push({1: floats(1, 2)}, 3)
    return Pushed(b"link", wire.Push(**{**vars(message), **fields}))


def test_a_push_names_the_workers_and_asks_for_what_any_of_them_wants():
    known = segments()
    made = push(known.listed([1]), [pushed(2), pushed(5, want=True)], [b"12345678"], passes=False)
    assert (made.listed.server, made.kind, made.wants) == (1, wire.Push, True)
    assert (made.fields["ranks"], made.fields["clocks"], made.fields["buffers"]) == ([2, 5], [3], [b"12345678"])


@pytest.mark.parametrize(("priorities", "wanted"), [((1, 4), 4), ((None, 4), None)])
def test_the_highest_priority_counts_and_what_keeps_its_place_keeps_it(priorities, wanted):
    askers = [pushed(rank, priority=priority) for rank, priority in enumerate(priorities)]
    assert push(segments().listed([1]), askers, [], passes=False).fields["priority"] == wanted


def test_each_is_answered_with_what_it_asked_for():
    known = segments()
    askers = [pushed(2), pushed(5, want=True, priority=7)]
    made = push(known.listed([1]), askers, [], passes=False)
    first, second = made.answers(values(1, 2, missed=1))
    assert first.reply == wire.Ack(1, 1)
    assert (floats_in(second.reply), second.reply.priority, second.reply.missed) == ([1, 2], 7, 1)
    refused = made.answers(wire.Failure(9, "Mismatch", "no"))
    assert [answer.reply for answer in refused] == [wire.Failure(1, "Mismatch", "no")] * 2


def test_a_pull_is_for_its_worker():
    message = Worker(4).pull([1], 2)
    made = pull(segments().listed([1]), [2], ["fp16", []], Pulled(b"link", message), passes=True)
    assert (made.kind, made.wants, made.fields["ranks"], made.fields["back"]) == (wire.Pull, True, [4], ["fp16", []])


@pytest.mark.parametrize(
    ("codec", "back", "times"),
    [(None, None, 1), (["2bit", []], None, 1), (["fp16", []], ["bf16", []], 2), (["2bit", []], ["fp16", []], 4)],
)
def test_a_window_has_as_many_messages_whatever_their_elements_are_sent_as(codec, back, times):
    listed = segments().listed([1, 2])
    assert Exchange(listed, wire.Push, {"codec": codec, "back": back}, []).turn_bytes == listed.nbytes // times


def test_a_pull_counts_with_the_codec_of_its_values():
    listed = segments().listed([1, 2])
    assert Exchange(listed, wire.Pull, {"back": ["int8", []]}, []).turn_bytes == listed.nbytes // 8


def test_values_are_laid_down_in_one_piece():
    known = segments()
    exchange = Exchange(known.listed([1, 2]), wire.Pull, {"back": None}, [])
    reply = values(1, 2)
    reply.buffers.append(values(3).buffers[0])  # type: ignore[attr-defined]
    laid = landed(reply, exchange, Heap(), Encoding(known.key, known.size))
    assert (len(laid.buffers), floats_in(laid)) == (1, [1, 2, 3])


def test_values_of_the_wrong_size_are_refused():
    known = segments()
    exchange = Exchange(known.listed([1]), wire.Pull, {"back": None}, [])
    with pytest.raises(WireError, match="3 elements where 2 belong"):
        landed(values(1, 2, 3), exchange, Heap(), Encoding(known.key, known.size))


# ---- memory of devices at an aggregator: it is opened, named by pushes, summed, and closed; files stand in for it


CPU = torch.device("cpu")


def host_with_loans(**options: Any) -> Host:
    return Host(loans=Loans(HostMemory), **options)


class Lender:
    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.rank = host, rank
        self.memory = HostMemory()
        self.lent: list[Lent] = []

    def lend(self, numbers: torch.Tensor) -> int:
        """Lend memory that has ``numbers``; return the number of the loan."""
        lent = self.memory.lend(numbers.nbytes, CPU)
        lent.memory.view(numbers.dtype).copy_(numbers)
        self.lent.append(lent)
        assert self.offer(lent.handle, len(self.lent)) == ""
        return len(self.lent)

    def offer(self, handle: Handle, loan: int) -> str:
        message = wire.Lend(self.host.workers[self.rank].me(), 0, loan, *handle)
        reply = self.host.reply(self.host.workers[self.rank], message)
        assert isinstance(reply, wire.Borrowed), reply
        return reply.refusal

    def push(self, loan: int, ids: list[int], clock: int = 1, **fields: Any) -> wire.PushLent:
        worker, clocks = self.host.workers[self.rank], [clock] * len(ids)
        return wire.PushLent(worker.me(), 0, loan, ids, clocks, want=True, lr=None, rescale=None, **fields)


@pytest.fixture
def host() -> Host:
    return host_with_loans()


def test_the_sum_of_lent_values_goes_on_and_its_answer_comes_back(host: Host):
    lenders = [Lender(host, rank) for rank in (3, 2)]
    messages = []
    for number, lender in enumerate(lenders):
        loan = lender.lend(floats(1, 2, 3, 4) * 10**number)
        messages.append(lender.push(loan, [1, 2]))
        assert host.ask(lender.rank, messages[-1]) == {}
    exchange = host.take()
    assert total(exchange) == [11, 22, 33, 44]
    assert exchange.fields["ranks"] == [2, 3]
    answers = host.answer(exchange, values(5, 6, 7, 8, clocks=[1, 1]))
    assert floats_in(answers[3, messages[0].seq]) == floats_in(answers[2, messages[1].seq]) == [5, 6, 7, 8]


def test_sums_are_in_the_order_of_ranks_whatever_lies_where(host: Host):
    parts = {2: floats(1e8, 1, -3, 0.1), 3: floats(-1e8, 1e-3, 7, 0.7)}
    host.ask(3, host.workers[3].push({1: parts[3][:2], 2: parts[3][2:]}, 1, want=True))
    lender = Lender(host, 2)
    host.ask(2, lender.push(lender.lend(parts[2]), [1, 2]))
    assert total(host.take()) == (parts[2] + parts[3]).tolist()


def test_a_push_that_nobody_joins_is_copied_from_where_it_lies():
    host = host_with_loans(ranks=(2,))
    lender = Lender(host, 2)
    loan = lender.lend(floats(1, 2, 3, 4))
    host.ask(2, lender.push(loan, [1, 2]))
    lender.lent[0].memory.zero_()  # the worker may use it again only when it is answered, but the copy is made already
    assert total(host.take()) == [1, 2, 3, 4]


def test_what_differs_in_more_than_values_is_copied_each_for_itself(host: Host):
    for rank in (2, 3):
        lender = Lender(host, rank)
        loan = lender.lend(floats(1, 2, 3, 4) * rank)
        host.ask(rank, lender.push(loan, [1, 2], changes=[[0, "wd", rank * 1.0]]))
    assert [total(exchange) for exchange in host.sent] == [[2, 4, 6, 8], [3, 6, 9, 12]]


def test_values_that_are_not_finite_are_sent_apart_so_that_the_server_names_the_worker():
    host = host_with_loans(finite=True)
    for rank, last in ((2, 4.0), (3, float("nan"))):
        lender = Lender(host, rank)
        host.ask(rank, lender.push(lender.lend(floats(1, 2, 3, last)), [1, 2]))
    assert [exchange.fields["ranks"] for exchange in host.sent] == [[2], [3]]
    assert total(host.sent[0]) == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
def test_other_dtypes_are_summed_as_they_are_in_shared_memory(dtype: str):
    host = host_with_loans(dtype=dtype)
    parts = {rank: (torch.arange(4) * 0.3 + rank).to(getattr(torch, dtype)) for rank in (2, 3)}
    for rank, part in parts.items():
        lender = Lender(host, rank)
        host.ask(rank, lender.push(lender.lend(part), [1, 2]))
    lent = total(host.take(), dtype)
    for rank, part in parts.items():
        host.ask(rank, host.workers[rank].push({1: part[:2], 2: part[2:]}, 2, want=True))
    assert lent == total(host.take(), dtype)


def test_a_loan_must_be_open_large_enough_and_of_known_segments(host: Host):
    lender, other = Lender(host, 2), Lender(host, 3)
    loan = lender.lend(floats(1, 2))
    for who, message, kind, text in (
        (lender, lender.push(loan + 1, [1]), "UsageError", "names loan 2"),
        (other, other.push(loan, [1]), "UsageError", "names loan 1"),
        (lender, lender.push(loan, [1, 2]), "WireError", "16 bytes of values are not in lent memory of 8"),
        (lender, lender.push(loan, [9]), "KeyNotInitialized", "segment 9"),
    ):
        assert text in text_of(host.reply(host.workers[who.rank], message), kind)
    assert not host.sent


def test_a_loan_is_replaced_and_a_closed_store_has_none(host: Host):
    lender = Lender(host, 2)
    loan = lender.lend(floats(1, 2, 3, 4))
    assert lender.offer(lender.memory.lend(4, CPU).handle, loan) == ""
    assert "of 4 bytes" in text_of(host.reply(host.workers[2], lender.push(loan, [1])), "WireError")
    assert host.reply(host.workers[2], closing := wire.Close(host.workers[2].me(), store=0)) == wire.Ack(closing.seq)
    assert "names loan 1" in text_of(host.reply(host.workers[2], lender.push(loan, [1])), "UsageError")


def test_what_cannot_be_opened_is_answered_with_the_reason(host: Host):
    lender = Lender(host, 2)
    lent = lender.memory.lend(64, CPU)
    handle = lent.handle
    assert "of a file in memory" in lender.offer(handle._replace(device=bytes(16)), 1)
    assert "no such memory" in lender.offer(handle._replace(opaque=handle.opaque[:16] + bytes(48)), 1)
    assert "names loan 1" in text_of(host.reply(host.workers[2], lender.push(1, [1])), "UsageError")


def test_an_aggregator_without_devices_says_so():
    def none() -> HostMemory:
        raise CannotLend("this process sees no CUDA device")

    off, without = Lender(Host(), 2), Lender(Host(loans=Loans(none)), 2)
    handle = off.memory.lend(64, CPU).handle
    assert "KVSTORE_DEVICE_SUM" in off.offer(handle, 1)
    assert without.offer(handle, 1) == "this process sees no CUDA device"


def test_a_worker_lends_so_many_pieces_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("servers.aggregator.loans.MOST_LOANS", 2)
    loans, lent, worker = Loans(HostMemory), HostMemory().lend(64, CPU), Worker(2)
    offers = [wire.Lend(worker.me(), 0, loan, *lent.handle) for loan in (1, 2, 3, 2)]
    refusals = [loans.take(offer).refusal for offer in offers]
    assert refusals == ["", "", "worker 2 has lent 2 pieces of memory already", ""]


def test_an_error_of_the_device_is_that_of_the_push():
    with pytest.raises(ServerError, match=r"could not read values on their device: CUDA error"), reading():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_cannot_be_read_fails_the_round_for_all(host: Host, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    first, second = Lender(host, 2), Lender(host, 3)
    pushes = [first.push(first.lend(floats(1, 2)), [1]), second.push(second.lend(floats(1, 2)), [1])]
    host.ask(2, pushes[0])
    monkeypatch.setattr("servers.aggregator.store.sum_in_order", fail)
    answers = host.ask(3, pushes[1])
    for rank, message in zip((2, 3), pushes, strict=True):
        assert "out of memory" in text_of(answers[rank, message.seq], "ServerError")
