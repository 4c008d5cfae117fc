from __future__ import annotations

import pytest
import torch
from asking import floats, sender

from kvstore import wire
from kvstore.errors import KeyNotInitialized, UsageError
from kvstore.optim.optimizer import describe
from kvstore.rule import Rule
from kvstore.transport.memory import Heap
from kvstore.values import from_buffer
from kvstore.wire.guests import NOT_HELD, aligned
from servers.reading import desk
from servers.reading.desk import TRIES, ValueRead
from servers.store.served_store import ServedStore

SIZES = {4: 100, 9: 3}


def store(mode: str = "sync") -> ServedStore:
    served = ServedStore(Rule(mode), range(1), lineage=7)
    for number, size in SIZES.items():
        data = bytearray(torch.zeros(size).numpy().tobytes())
        served.init(wire.Init(sender(), 0, [number], [f"key {number}"], [0], [[size]], "float32", [data]))
    return served


def push(served: ServedStore, number: int, clock: int, value: float) -> None:
    data = bytearray(torch.full((SIZES[number],), value).numpy().tobytes())
    served.push(b"", wire.Push(sender(seq=clock), 0, [number], [clock], False, None, None, buffers=[data]))


def begin(served: ServedStore, held: dict[int, int], slack: int = 0, lineage: int = 7) -> ValueRead:
    message = wire.ReadValues(sender(role="reader"), 0, list(held), lineage, list(held.values()), slack)
    return ValueRead(served, message, Heap())


def finish(read: ValueRead, nbytes: int = 1 << 20) -> wire.ValuesRead:
    while (reply := read.step(nbytes)) is None:
        pass
    return reply


def values(reply: wire.ValuesRead, number: int, at: int = 0) -> torch.Tensor:
    return from_buffer(reply.buffers[0][at : at + 4 * SIZES[number]], "float32")


def test_values_come_with_their_rounds() -> None:
    served = store()
    push(served, 9, 1, 2.0)
    reply = finish(begin(served, {4: NOT_HELD, 9: NOT_HELD}))
    assert (reply.versions, reply.positions) == ([0, 1], [0, 1])
    assert torch.equal(values(reply, 9, aligned(400)), floats(2, 2, 2))


@pytest.mark.parametrize(
    ("held", "slack", "comes"), [(1, 0, True), (2, 0, False), (1, 1, False), (0, 1, True), (3, 0, True)]
)
def test_what_is_fresh_enough_does_not_come(held: int, slack: int, comes: bool) -> None:
    served = store()
    push(served, 9, 1, 1.0)
    push(served, 9, 2, 2.0)
    reply = finish(begin(served, {9: held}, slack))
    assert (reply.versions, reply.positions, len(reply.buffers)) == ([2], [0] * comes, comes)


@pytest.mark.parametrize("lineage", [0, 6, 8])
def test_what_is_held_of_another_lineage_is_not_fresh(lineage: int) -> None:
    reply = finish(begin(store(), {4: 0, 9: NOT_HELD}, slack=9, lineage=lineage))
    assert (reply.lineage, reply.positions) == (7, [0, 1])


def test_a_segment_that_a_round_changes_is_copied_anew() -> None:
    served = store()
    read = begin(served, {4: NOT_HELD})
    assert read.step(40) is None
    push(served, 4, 1, 1.0)
    reply = finish(read, 40)
    assert reply.versions == [1]
    assert torch.equal(values(reply, 4), torch.ones(100))


def test_a_segment_that_rounds_always_overtake_is_copied_at_once() -> None:
    served = store()
    read = begin(served, {4: NOT_HELD})
    steps, reply = 0, None
    while reply is None:
        reply = read.step(40)
        steps += 1
        push(served, 4, steps, float(steps))
    assert steps == TRIES + 1
    assert torch.equal(values(reply, 4), torch.full((100,), float(TRIES)))
    assert reply.versions == [TRIES]


def test_what_was_read_stays_and_does_not_hold_up_the_next_round() -> None:
    served = store()
    reply = finish(begin(served, {9: NOT_HELD}))
    memory = served.buckets.value(9).data_ptr()
    push(served, 9, 1, 5.0)
    assert torch.equal(values(reply, 9), torch.zeros(3))
    assert served.buckets.value(9).data_ptr() == memory


def test_in_an_async_store_every_push_is_a_version() -> None:
    served = ServedStore(Rule("async"), range(2))
    served.set_optimizer(describe("sgd", {"lr": 0.1}))
    served.init(wire.Init(sender(), 0, [9], ["w"], [0], [[3]], "float32", [bytearray(12)]))
    for clock in (1, 2):
        data = bytearray(floats(1, 1, 1).numpy().tobytes())
        served.push(b"", wire.Push(sender(seq=clock), 0, [9], [clock], False, None, None, buffers=[data]))
    assert finish(begin(served, {9: NOT_HELD})).versions == [2]  # though worker 1 has not pushed


def test_an_unknown_segment_is_refused() -> None:
    with pytest.raises(KeyNotInitialized):
        begin(store(), {5: NOT_HELD})


def test_too_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MOST_BYTES", 300)
    with pytest.raises(UsageError, match="ask for at most 300"):
        begin(store(), {4: NOT_HELD, 9: NOT_HELD})
    assert finish(begin(store(), {4: NOT_HELD})).positions == [0]


def test_too_many_segments_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MOST_SEGMENTS", 1)
    with pytest.raises(UsageError, match="2 segments are too many"):
        begin(store(), {4: NOT_HELD, 9: NOT_HELD})
