from __future__ import annotations

import pytest
import torch
from asking import Worker

from kvstore.spec import Spec
from kvstore.values import from_buffer
from servers.rounds import Rounds
from servers.slot import ADOPT, Parked, Slot

SIZES = [1, 7, ADOPT // 4, ADOPT]


def slot_of(size: int, value: float = 0.0) -> Slot:
    return Slot(1, "k", Spec((size,), "float32"), torch.full((size,), value), Rounds([0]))


def read(view: memoryview) -> list[float]:
    return from_buffer(view, "float32").tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lasting", [True, False])
def test_what_was_read_stays_as_it_was_through_updates_in_place(size, lasting):
    slot = slot_of(size)
    views = []
    for step in range(4):
        views.append((slot.readable(lasting=lasting), float(step)))
        slot.writable().add_(1.0)
    for view, value in views:
        assert read(view) == [value] * size
    assert slot.value.tolist() == [4.0] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lasting", [True, False])
def test_what_was_read_stays_as_it_was_through_assignments(size, lasting):
    slot = slot_of(size)
    views = [slot.readable(lasting=lasting)]
    for step in (1.0, 2.0, 3.0):
        slot.assign(torch.full((size,), step))
        views.append(slot.readable(lasting=lasting))
    slot.writable().zero_()
    assert [read(view) for view in views] == [[value] * size for value in (0.0, 1.0, 2.0, 3.0)]


@pytest.mark.parametrize("first", [True, False])
def test_both_ways_of_reading_may_alternate(first):
    slot = slot_of(3)
    one, two = slot.readable(lasting=first), slot.readable(lasting=not first)
    slot.writable().add_(1.0)
    three = slot.readable(lasting=not first)
    slot.writable().add_(1.0)
    assert (read(one), read(two), read(three)) == ([0.0] * 3, [0.0] * 3, [1.0] * 3)


def test_readers_of_one_state_share_one_copy():
    slot = slot_of(4)
    first, second = slot.readable(lasting=False), slot.readable(lasting=False)
    assert from_buffer(first, "float32").data_ptr() == from_buffer(second, "float32").data_ptr()


def test_a_value_that_will_be_replaced_is_sent_itself():
    slot = slot_of(4)
    assert from_buffer(slot.readable(lasting=True), "float32").data_ptr() == slot.value.data_ptr()


def test_a_large_sum_is_adopted_and_a_small_one_does_not_keep_its_frame_alive():
    large, small = slot_of(ADOPT // 4), slot_of(ADOPT // 4 - 1)
    for slot, adopted in ((large, True), (small, False)):
        total = torch.ones(slot.spec.size)
        slot.assign(total)
        assert (slot.value.data_ptr() == total.data_ptr()) is adopted


def test_assigned_values_take_the_shape_of_the_segment():
    slot = Slot(1, "k", Spec((2, 3), "float32"), torch.zeros(2, 3), Rounds([0]))
    slot.assign(torch.arange(6.0))
    assert slot.value.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_those_who_wait_are_let_go_when_all_their_segments_are_there():
    worker = Worker()
    one, two = slot_of(1), slot_of(1)
    both, later = Parked(b"", worker.pull([1, 2]), left=2), Parked(b"", worker.pull([1]), left=1)
    one.parked, two.parked = [(1, both), (2, later)], [(1, both)]
    one.rounds.version = two.rounds.version = 1
    error, other = ValueError("first"), ValueError("second")
    assert one.release(error) == []
    assert two.release(other) == [both]
    assert both.error is error
    one.rounds.version = 2
    assert one.release(None) == [later]
    assert later.error is None
