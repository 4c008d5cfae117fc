"""What contributions go to: who waits for its rounds, and why they have failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Worker, floats

from kvstore.errors import WireError
from kvstore.spec import Spec
from kvstore.transport.memory import Heap
from kvstore.values import TensorRange, from_buffer, to_buffer
from servers.store.bucket import Bucket
from servers.store.rounds import Rounds
from servers.store.target import FAILURES, HeldSegments, ParkedRequest, Target


def target() -> Target[str]:
    spec = Spec((2,), "float32")
    return Target(HeldSegments([3, 8], ["a", "b"], [spec, spec], [0, 0]), Rounds([0]))


def test_requests_are_released_when_all_targets_that_they_wait_for_are_where_they_must_be():
    first, second, worker = target(), target(), Worker()
    one, both = ParkedRequest(b"", worker.pull([3])), ParkedRequest(b"", worker.pull([3, 8]))
    for each, of in ((one, [first]), (both, [first, second])):
        for at in of:
            at.parked.append((1, each))
            each.left += 1
    first.rounds.contribute([0], 1, "")
    assert first.release(None) == []
    assert first.rounds.complete() is not None
    error = ValueError("of the first")
    assert first.release(error) == [one]
    second.rounds.contribute([0], 1, "")
    assert second.rounds.complete() is not None
    assert second.release(None) == [both]
    assert both.error is error
    assert first.parked == second.parked == []


def test_a_target_is_idle_while_no_round_is_open_and_nobody_waits():
    made = target()
    assert made.idle
    made.parked.append((1, ParkedRequest(b"", Worker().pull([3]))))
    assert not made.idle
    made.parked.clear()
    made.rounds.contribute([0], 1, "")
    assert not made.idle


def test_the_last_failures_are_kept_and_places_are_known_by_id():
    made = target()
    for version in range(FAILURES + 3):
        made.fail(version, ValueError(version))
    assert sorted(made.failures) == list(range(3, FAILURES + 3))
    assert made.places == {3: 0, 8: 1}
    assert made.segments.segment(1).key == "b"


class Watched(Heap):
    reading = False

    def busy(self, buffer: Any) -> bool:
        return self.reading


def bucket(*values: torch.Tensor, memory: Heap | None = None) -> Bucket:
    ids = range(len(values))
    specs = [Spec(tuple(value.shape), "float32") for value in values]
    segments = HeldSegments(ids, [f"k{number}" for number in ids], specs, [0] * len(values))
    made = Bucket(segments, "float32", Rounds(frozenset({0})), memory or Heap())
    made.load([TensorRange(0, torch.cat([value.reshape(-1) for value in values]))])
    return made


def sent(of: Bucket) -> torch.Tensor:
    return from_buffer(of.readable(0, of.size), "float32")


def test_segments_lie_one_after_the_other():
    made = bucket(floats(1, 2), torch.full((2, 2), 3.0), floats(), torch.tensor(4.0))
    assert made.value.tolist() == [1, 2, 3, 3, 3, 3, 4]
    assert (made.starts, made.sizes, made.shapes) == ([0, 2, 6, 6], [2, 4, 0, 1], [(2,), (2, 2), (0,), ()])
    assert from_buffer(made.readable(2, 7), "float32").tolist() == [3, 3, 3, 3, 4]


class Message:
    pass


@pytest.mark.parametrize("change", ["assign", "update"])
def test_what_a_message_that_is_kept_refers_to_does_not_change(change: str):
    memory = Watched()  # nobody reads it
    made = bucket(floats(1), memory=memory)
    for kept in (True, False):
        message = Message()
        before = sent(made)
        value = before.item()
        made.lend(message)
        if not kept:
            del message
        if change == "assign":
            made.assign([[TensorRange(0, floats(value + 3))]])
        else:
            made.writable()
            made.value += 3
        assert sent(made).item() == value + 3
        assert before.item() == (value if kept else value + 3)


@pytest.mark.parametrize("change", ["assign", "update"])
@pytest.mark.parametrize("reading", [True, False])
def test_what_is_being_read_does_not_change(change: str, reading: bool):
    memory = Watched()
    made = bucket(floats(1, 2), floats(3), memory=memory)
    view, memory.reading = sent(made), reading
    if change == "assign":
        made.assign([[TensorRange(0, floats(4, 5, 6))]])
    else:
        made.writable()
        made.value += 3
    assert sent(made).tolist() == [4, 5, 6]
    assert view.tolist() == ([1, 2, 3] if reading else [4, 5, 6]), "memory that nobody reads is used again"


def test_memory_that_has_never_been_sent_is_used_again():
    memory = Watched()
    memory.reading = True
    made = bucket(floats(1), memory=memory)
    before = made.value.data_ptr()
    made.writable()
    made.assign([[TensorRange(0, floats(2))]])
    assert made.value.data_ptr() == before


@pytest.mark.parametrize("change", ["assign", "update", "refused"])
def test_what_is_adopted_is_not_copied_and_never_written(change: str) -> None:
    made = bucket(floats(1, 2), memory=Watched())
    buffer = bytearray(to_buffer(floats(3, 4)))
    made.adopt(buffer)
    assert made.value.data_ptr() == from_buffer(buffer, "float32").data_ptr()
    assert sent(made).tolist() == [3, 4]
    if change == "update":
        made.writable()
        made.value.add_(1)
    elif change == "assign":
        made.assign([[TensorRange(0, floats(4, 5))]])
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                made.assign([[TensorRange(0, floats(9, 9))]], check=refuse)
        assert made.value.tolist() == [3, 4]
        made.writable()
        made.value.add_(1)
    assert made.value.tolist() == [4, 5]
    assert from_buffer(buffer, "float32").tolist() == [3, 4]
    own = made.value.data_ptr()
    made.assign([[TensorRange(0, floats(6, 7))]])
    assert made.value.data_ptr() == own, "its own memory again"


def test_only_all_elements_can_be_adopted() -> None:
    made = bucket(floats(1, 2))
    with pytest.raises(WireError):
        made.adopt(bytearray(4))
    assert made.value.tolist() == [1, 2]
    empty = bucket(floats())
    empty.adopt(bytearray())
    assert empty.value.tolist() == []


def refuse(_: torch.Tensor) -> None:
    raise ValueError("no")
