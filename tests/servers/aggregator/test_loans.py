"""Memory of devices at an aggregator: it is opened, named by pushes, summed, and closed; files stand in for devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Worker, floats, text_of
from hosting import Host, floats_in, total, values

from kvstore import wire
from kvstore.devices import CannotLend, Handle, HostMemory, Lent
from kvstore.errors import ServerError
from servers.aggregator.loans import Loans, reading

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
    for who, push, kind, text in (
        (lender, lender.push(loan + 1, [1]), "UsageError", "names loan 2"),
        (other, other.push(loan, [1]), "UsageError", "names loan 1"),
        (lender, lender.push(loan, [1, 2]), "WireError", "16 bytes of values are not in lent memory of 8"),
        (lender, lender.push(loan, [9]), "KeyNotInitialized", "segment 9"),
    ):
        assert text in text_of(host.reply(host.workers[who.rank], push), kind)
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
    for rank, push in zip((2, 3), pushes, strict=True):
        assert "out of memory" in text_of(answers[rank, push.seq], "ServerError")
