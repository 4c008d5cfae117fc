"""Replies into arrays: of any strides, in any order of replies, however their payloads are divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from placed import entries_for

from kvstore import wire
from kvstore.client.plans import Parcel, Plan, views_of
from kvstore.client.unpack import Writer
from kvstore.errors import UsageError
from kvstore.spec import Key, Spec
from kvstore.values import to_buffer

SPECS: dict[Key, Spec] = {"cut": Spec((10, 10), "float32"), "a": Spec((3,), "float32"), "b": Spec((2, 2), "float32")}
SOURCES = [torch.arange(100.0).view(10, 10), torch.full((3,), 7.0), torch.tensor([[1.0, 2.0], [3.0, 4.0]])]


def plan_of(specs: dict[Key, Spec] = SPECS, message_bytes: int = 96) -> Plan:
    """Several messages for each of two servers."""
    return Plan(entries_for(specs, servers=2, bound=50, longest=96), list(specs), message_bytes)


def reply_for(parcel: Parcel, seq: int, sources: Sequence[torch.Tensor] = SOURCES, buffers: int = 1) -> wire.Values:
    flat = torch.cat(views_of(parcel, sources))
    return wire.Values(seq, buffers=[to_buffer(part.clone()) for part in flat.chunk(buffers)])


def write(plan: Plan, writer: Writer, order: int = 1, buffers: int = 1) -> None:
    for seq, parcel in list(enumerate(plan.parcels, 1))[::order]:
        for _ in range(2):  # a repeat changes nothing
            writer.take(parcel, reply_for(parcel, seq, buffers=buffers))


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_plain_outputs(order: int, buffers: int) -> None:
    plan, outs = plan_of(), [torch.zeros(tensor.shape) for tensor in SOURCES]
    arrays = plan.outputs(outs)
    assert arrays is not None
    assert len(plan.parcels) > 2
    write(plan, Writer(plan, arrays, copy=True), order, buffers)
    assert all(torch.equal(out, source) for out, source in zip(outs, SOURCES, strict=True))


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_several_outputs_of_a_key_whatever_their_strides(order: int, buffers: int) -> None:
    plan = plan_of()
    outs = [[torch.zeros(source.shape), torch.zeros(source.shape[::-1]).t()] for source in SOURCES[::2]]
    outs.insert(1, [torch.zeros(6)[::2]])
    write(plan, Writer(plan, outs, copy=True), order, buffers)
    for arrays, source in zip(outs, SOURCES, strict=True):
        assert all(torch.equal(out, source) for out in arrays)


def test_many_small_outputs_at_once() -> None:
    specs: dict[Key, Spec] = {key: Spec((3,), "float32") for key in range(100)}
    sources = [torch.full((3,), float(key)) for key in range(100)]
    plan, outs = plan_of(specs, 1 << 20), [torch.zeros(3) for _ in specs]
    arrays = plan.outputs(outs)
    assert arrays is not None
    assert all(parcel.many for parcel in plan.parcels)
    writer = Writer(plan, arrays, copy=True)
    for seq, parcel in enumerate(plan.parcels, 1):
        writer.take(parcel, reply_for(parcel, seq, sources, buffers=2))
    assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))


def test_without_a_copy_an_output_becomes_the_value() -> None:
    plan, out = plan_of({"a": Spec((3,), "float32")}), torch.zeros(3)
    arrays = plan.outputs([out])
    assert arrays is not None
    reply = reply_for(plan.parcels[0], 1, [torch.full((3,), 5.0)])
    Writer(plan, arrays, copy=False).take(plan.parcels[0], reply)
    assert out.tolist() == [5, 5, 5]
    assert out.data_ptr() == torch.frombuffer(reply.buffers[0], dtype=torch.float32).data_ptr()


@pytest.mark.parametrize("listed", [True, False])
def test_compressed_values_are_decoded(listed: bool) -> None:
    def decode(_reply: wire.Values, targets: Sequence[torch.Tensor]) -> None:
        for target in targets:
            target.fill_(9.0)

    plan = plan_of({"a": Spec((3,), "float32")})
    out = torch.zeros(3)
    outs: Any = [[out]] if listed else plan.outputs([out])
    Writer(plan, outs, copy=True).take(plan.parcels[0], wire.Values(1), decode)
    assert out.tolist() == [9, 9, 9]


def test_an_output_that_has_another_shape_by_then() -> None:
    specs: dict[Key, Spec] = {key: Spec((3,), "float32") for key in range(40)}
    plan, outs = plan_of(specs, 1 << 20), [torch.zeros(3) for _ in specs]
    arrays = plan.outputs(outs)
    assert arrays is not None
    writer = Writer(plan, arrays, copy=True)
    for out in outs:
        out.data = torch.zeros(2)
    with pytest.raises(UsageError, match="another shape or dtype since the call"):
        writer.take(plan.parcels[0], reply_for(plan.parcels[0], 1, [torch.ones(3) for _ in specs]))


def test_writing_disturbs_values_that_lie_where_other_outputs_are() -> None:
    plan = plan_of({"a": Spec((3,), "float32"), "b": Spec((3,), "float32")})
    memory, apart = torch.zeros(9), torch.zeros(3)
    one, two, shifted = memory[:3], memory[3:6], memory[1:4]
    outs = plan.outputs([one, two])
    assert outs is not None
    writer = Writer(plan, outs, copy=True)
    assert not writer.disturbs([one, two]), "each in place"
    assert not writer.disturbs([apart, memory[6:]])
    assert writer.disturbs([two, one])
    assert writer.disturbs([apart, shifted])
    assert Writer(plan, [[one, apart], [two]], copy=True).disturbs([one, apart])
