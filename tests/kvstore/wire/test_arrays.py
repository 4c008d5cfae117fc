"""Messages between workers and servers: the checks that no single field can make, and ranges."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import ME, any_message, sender, with_shorter
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (wire.Init, "kinds"),
        (wire.Pull, "ids"),
        (wire.OptimizerStates, "names"),
        (wire.PutStates, "shapes"),
        (wire.Pause, "clocks"),
    ],
)
@settings(max_examples=10)
@given(data=st.data())
def test_lists_of_different_lengths_are_refused(cls: type[Any], field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    with pytest.raises(WireError, match="different lengths"):
        wire.decode(with_shorter(message, field))


@pytest.mark.parametrize(
    "message",
    [
        wire.Pull(ME, 0, {}, []),  # type: ignore[arg-type]
        wire.Pull(ME, 0, [], {}),  # type: ignore[arg-type]
        wire.Pull(ME, 0, [3, 3], [1, 1]),
        wire.Pull(ME, 0, [-1], [1]),
        wire.Pull(ME, 0, [2**32], [1]),
        wire.Pull(ME, 0, [True], [1]),
        wire.Pull(ME, 0, [0], [-1]),
        wire.Pull(ME, 0, [0], [2**62]),
        wire.Pull(ME, 256, [0], [1]),
        wire.Pull(sender(role="boss"), 0, [0], [1]),
        wire.Pull(sender(rank=-2), 0, [0], [1]),
        wire.Push(ME, 0, [1], [1], 1, None, None),
        wire.Push(ME, 0, [1], [1], True, float("nan"), None),
        wire.Push(ME, 0, [1], [1], True, None, float("inf")),
        wire.Push(ME, 0, [1], [1], True, None, None, ranks=[2, 1]),
        wire.Push(ME, 0, [1], [1], True, None, None, ranks=[1, 1]),
        wire.Pull(ME, 0, [1], [1], ranks=[2, 1]),
        wire.Open(ME, 0, "both"),
        wire.Open(ME, 0, "async", aggregate="all"),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m", [1] * 9]], None, [], [], 0.1, 1.0),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m", "x" * 65]], None, [], [], 0.1, 1.0),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m", {}]], None, [], [], 0.1, 1.0),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m"]], None, [], [], 0.1, 1.0),
    ],
)
def test_values_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        wire.decode(wire.encode(message))


@pytest.mark.parametrize("counts", [[], [1, 1], [2], [3]], ids=str)
def test_compressed_pushes_have_a_length_for_each_payload(counts: list[int]) -> None:
    for lengths in ([4], [4, 4], [4, 4, 4]):
        fields = (ME, 0, [1, 2], [1, 1], False, None, None, ["fp16", []], lengths, counts)
        if len(lengths) == (len(counts) or 2):
            push = wire.Push(*fields, buffers=[])
            assert wire.decode(wire.encode(push)) == push
        else:
            with pytest.raises(WireError, match="different lengths"):
                wire.Push(*fields)


GOOD = {"store": 0, "loan": 1, "device": bytes(16), "opaque": bytes(64), "offset": 0, "nbytes": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", bytes(15)),
        ("device", "0123456789abcdef"),
        ("opaque", bytes(66)),
        ("offset", -1),
        ("offset", (1 << 40) + 1),
        ("nbytes", 0),
        ("nbytes", 1 << 41),
        ("loan", 0),
    ],
)
def test_handles_have_fixed_lengths_and_numbers_have_limits(field: str, value: Any):
    assert wire.decode(wire.encode(wire.Lend(ME, **GOOD))) == wire.Lend(ME, **GOOD)
    with pytest.raises(WireError, match=f"Lend.{field}"):
        wire.decode(wire.encode(wire.Lend(ME, **{**GOOD, field: value})))


@given(any_message(wire.PushLent).filter(lambda message: message.clocks))
def test_a_push_has_a_clock_for_each_segment(message: wire.PushLent):
    with pytest.raises(WireError, match="one length"):
        wire.decode(with_shorter(message, "clocks"))


@given(any_message(wire.PushLent), st.binary(max_size=9))
def test_the_plain_push_differs_in_where_its_values_are(message: wire.PushLent, values: bytes):
    plain = message.plain([values])
    assert plain.buffers == [values]
    same = ("sender", "store", "ids", "clocks", "want", "lr", "rescale", "changes", "priority")
    assert [getattr(plain, name) for name in same] == [getattr(message, name) for name in same]
    assert (plain.codec, plain.encode, plain.back) == (None, None, None)
