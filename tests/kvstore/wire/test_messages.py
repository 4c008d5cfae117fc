"""Messages and bytes: whatever is a message comes back as it was, and whatever is not costs a WireError, no more."""

from __future__ import annotations

import dataclasses
import gc
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import UsageError, WireError
from kvstore.spec import ITEMSIZE, MAX_SEGMENTS
from kvstore.wire import VERSION, decode, encode
from kvstore.wire.fields import MAX_ITEMS
from kvstore.wire.frames import MAX_HEADER

COUNT = 6
ME = wire.Sender(wire.Node("worker", 0, 1), 1, 1)
CONCRETE = [getattr(wire, name) for name in wire.__all__ if isinstance(getattr(wire, name), type)]
CLASSES = [cls for cls in CONCRETE if cls not in (wire.Message, wire.Request, wire.Reply, wire.Node, wire.Sender)]

roles = st.sampled_from(["worker", "server", "scheduler", "launcher"])
ranks = st.integers(-1, 4096)
text = st.text(max_size=40)
whole = st.integers(0, 2**62)
nodes = st.builds(wire.Node, roles, ranks, whole)
keys = st.integers(-(2**63), 2**64 - 1) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63 - 1)
shapes = st.lists(st.integers(0, 20), max_size=4)
hyper = st.none() | st.booleans() | numbers | text | st.lists(st.none() | numbers, max_size=8)
named = st.tuples(text, hyper).map(list)


def sender(role: Any = "worker", rank: Any = 0) -> wire.Sender:
    return ME._replace(node=wire.Node(role, rank, 1))


def some(strategy: st.SearchStrategy[Any], size: int, **unique: Any) -> st.SearchStrategy[Any]:
    return st.lists(strategy, min_size=size, max_size=size, **unique)


def value_of(name: str, hint: Any, size: int) -> st.SearchStrategy[Any]:
    """What field ``name`` may hold; all lists of one message that describe the same things have ``size`` entries."""
    special = {
        "sender": st.builds(wire.Sender, nodes, whole, whole),
        "node": nodes,
        "role": roles,
        "mode": st.sampled_from(["sync", "async"]),
        "staleness": st.none() | st.integers(0, 1 << 30),
        "quorum": st.none() | st.integers(1, 4096),
        "late": st.sampled_from(["drop", "keep"]),
        "compensation": numbers,
        "codec": st.none() | st.sampled_from([["2bit", [["threshold", 0.5]]], ["fp16", []]]),
        "back": st.none() | st.sampled_from([["int8", [["seed", 0], ["stochastic", False]]], ["", []]]),
        "lengths": some(st.integers(0, 1 << 40), size),
        "segment_counts": some(st.integers(1, 1 << 20), size) | st.just([]),
        "rank": ranks,
        "last": st.integers(0, 4096),
        "store": st.integers(0, 255),
        "ordinal": st.integers(1, 2**62),
        "bound": st.integers(1, 2**62),
        "longest": st.integers(1, 2**62),
        "num_workers": st.integers(1, 4096),
        "keys": some(keys, size),
        "shapes": some(shapes, size),
        "dtype": st.sampled_from(sorted(ITEMSIZE)),
        "dtypes": some(st.sampled_from(sorted(ITEMSIZE)), size),
        "ids": some(st.integers(0, 2**32 - 1), size, unique=True),
        "clocks": some(st.integers(0, 2**62 - 1), size),
        "names": some(text, size),
        "servers": some(text if get_args(hint)[:1] == (list[str],) else st.integers(0, 4096), size),
        "worker_keys": some(st.text(max_size=40), size),
        "departed": some(st.integers(0, 4096), size),
        "kinds": some(st.integers(0, max(0, size - 1)), size),
        "counts": some(st.just(1), size),
        "starts": some(st.integers(0, 2**48), size),
        "stops": some(st.integers(0, 2**48), size),
        "hyper": some(st.tuples(text, hyper).map(list), size),
        "lr_mult": some(st.tuples(keys, numbers).map(list), size),
        "wd_mult": some(st.tuples(keys, numbers).map(list), size),
        "groups": some(st.tuples(st.lists(keys, max_size=3), st.lists(named, max_size=3)).map(list), size),
        "changes": some(st.tuples(st.integers(0, 4096), text, hyper).map(list), size),
        "priority": st.none() | st.integers(-(2**31), 2**31),
        "buffers": st.lists(st.binary(max_size=20), max_size=4),
    }
    if name in special:
        return special[name]
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    plain = {
        int: whole,
        str: text,
        bool: st.booleans(),
        float | None: st.none() | numbers,
        str | None: st.none() | text,
    }
    return plain[kind]


@st.composite
def any_message(draw: st.DrawFn, cls: type[Any]) -> Any:
    size = draw(st.integers(0, COUNT))
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{name: draw(value_of(name, hint, size)) for name, hint in hints.items()})


def test_every_class_that_crosses_the_wire_is_tried() -> None:
    concrete = set(messages_by_code().values())
    assert concrete == set(CLASSES)


def messages_by_code() -> dict[int, type[Any]]:
    from kvstore.wire import frames

    # A launcher that has been imported has messages of its own.
    return {code: cls for code, cls in frames._BY_CODE.items() if cls.__module__.startswith("kvstore.")}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_message(cls))
    assert decode(encode(message)) == message


@settings(max_examples=100)
@given(st.sampled_from(CLASSES).flatmap(any_message), st.data())
def test_a_truncated_header_is_refused(message: Any, data: st.DataObject) -> None:
    header, *buffers = encode(message)
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(WireError):
        decode([header[:cut], *buffers])


@settings(max_examples=100)
@given(st.sampled_from(CLASSES).flatmap(any_message), st.binary(min_size=1, max_size=9))
def test_a_header_with_more_behind_it_is_refused(message: Any, more: bytes) -> None:
    header, *buffers = encode(message)
    with pytest.raises(WireError):
        decode([header + more, *buffers])


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


any_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.sampled_from(CLASSES).flatmap(any_message), st.data())
def test_any_value_in_a_field_gives_a_message_or_a_wire_error(message: Any, data: st.DataObject) -> None:
    header = msgpack.unpackb(encode(message)[0])
    where = data.draw(st.integers(0, len(header) - 1))
    header[where] = data.draw(any_value)
    frames = [msgpack.packb(header), *getattr(message, "buffers", [])]
    try:
        decoded = decode(frames)
    except WireError:
        return
    assert encode(decoded) == frames


@pytest.mark.parametrize(
    "bad", [[], [b""], [b"\xc1"], [b"\x90"], [b"\x91\x01"], [b"\x80"], [b"\x01"], [b"\xa4abc\xff"]]
)
def test_what_is_no_header_is_refused(bad: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(bad)


@pytest.mark.parametrize("version", [0, VERSION + 1, -1, True, 1.0, "1", None])
def test_another_version_is_named(version: Any) -> None:
    with pytest.raises(WireError, match=f"expected protocol version {VERSION}, got"):
        decode([msgpack.packb([version, 1, 5])])


@pytest.mark.parametrize("code", [0, 99, 9999, -1, True, 1.0, "Ack", [1], None])
def test_an_unknown_code_is_refused(code: Any) -> None:
    with pytest.raises(WireError, match="unknown message code"):
        decode([msgpack.packb([VERSION, code, 5])])


def test_the_number_of_fields_is_checked() -> None:
    with pytest.raises(WireError, match="Ack has 2 fields, got 3"):
        decode([msgpack.packb([VERSION, 1, 5, 6, 7])])


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(WireError, match=r"Ack.seq: expected an integer .*, got bool True"):
        decode([msgpack.packb([VERSION, 1, True, 0])])


def test_frames_that_no_field_takes_are_refused() -> None:
    with pytest.raises(WireError, match="Ack has no buffers, got 2"):
        decode([*encode(wire.Ack(1)), b"", b"x"])


def test_too_many_frames_are_refused() -> None:
    frames = [*encode(wire.Values(1, buffers=[])), *[b""] * (1 << 16)]
    with pytest.raises(WireError, match="got 65537"):
        decode(frames)


def test_the_longest_answers_that_are_meant_are_not_too_long() -> None:
    columns = [[number] * MAX_SEGMENTS for number in (2**32 - 1, 4095, 2**48 - 1, 2**48)]
    for counts in ([MAX_SEGMENTS], [1] * MAX_SEGMENTS):
        assert len(encode(wire.Placed(2**62, counts, *columns))[0]) < MAX_HEADER


def test_a_key_of_many_segments_may_be_placed() -> None:
    numbers = list(range(5000))
    starts, stops = [7 * number for number in numbers], [7 * number + 7 for number in numbers]
    placed = wire.Placed(1, [5000], numbers, [number % 3 for number in numbers], starts, stops)
    assert decode(encode(placed)) == placed


def test_a_header_that_is_too_long_is_not_even_read() -> None:
    with pytest.raises(WireError, match="a header of at most"):
        decode([bytes(MAX_HEADER + 1)])


def test_a_container_that_no_field_may_have_is_not_made() -> None:
    with pytest.raises(WireError, match="exceeds max_array_len"):
        decode([b"\x93\x01\x01\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_ITEMS + 1)])
    with pytest.raises(WireError, match="exceeds max_map_len"):
        decode([b"\x93\x01\x01\x81\xa1a\x01"])


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_rests_only_while_a_long_header_is_unpacked(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    unpackb = msgpack.unpackb
    monkeypatch.setattr(
        msgpack, "unpackb", lambda *args, **kwargs: (seen.append(gc.isenabled()), unpackb(*args, **kwargs))[1]
    )
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        decode(encode(wire.Ack(1)))
        decode(encode(wire.Values(1, clocks=[2**40] * 100_000)))
        with pytest.raises(WireError):
            decode([bytes(1 << 20)])
        after = gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [before, False, False]
    assert after is before


def test_what_no_peer_would_take_is_refused_by_the_sender() -> None:
    for message in (
        wire.Values(1, buffers=[b""] * ((1 << 16) - 1)),
        wire.Values(1, clocks=[0] * MAX_ITEMS),
    ):
        wire.require_short(message, frames := encode(message))
        decode(frames)
    for message in (
        wire.Values(1, buffers=[b""] * (1 << 16)),
        wire.Values(1, clocks=[0] * (MAX_ITEMS + 1)),
        wire.Ready(ME, 0, ["k" * 1024] * (1 << 14)),
    ):
        with pytest.raises(UsageError, match="use fewer at once"):
            wire.require_short(message, frames := encode(message))
        with pytest.raises(WireError):
            decode(frames)


# A container or text that says it is larger than its frame must not be allocated: array32, map32, str32, bin32, ext32.
@pytest.mark.parametrize("lead", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
@pytest.mark.parametrize("before", [b"", b"\x93\x01\x02", b"\x95\x01\x02\x01\xa1a"])
def test_a_huge_declared_size_is_refused(lead: bytes, before: bytes) -> None:
    with pytest.raises(WireError):
        decode([before + lead + b"\xff\xff\xff\xff" + b"\x00" * 20])


@pytest.mark.parametrize("depth", [10, 500, 1000, 1020, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"\x92", b"\x01"), (b"\x93\x01", b"\x01"), (b"\x95\x01\x02\x01\xa1a", b"")],
    ids=["all", "version", "code", "field"],
)
def test_deep_nesting_is_refused_wherever_it_is(depth: int, opening: bytes, before: bytes, after: bytes) -> None:
    with pytest.raises(WireError):
        decode([before + opening * depth + b"\xc0" + after])


@pytest.mark.parametrize("code", [-128, -1, 0, 42, 127])
def test_extensions_are_refused(code: int) -> None:
    ext = (
        msgpack.packb(msgpack.ExtType(code, b"1234"))
        if code >= 0
        else b"\xd6" + code.to_bytes(1, "big", signed=True) + b"1234"
    )
    with pytest.raises(WireError):
        decode([b"\x93\x01\x01" + ext])


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (wire.Declare, "shapes"),
        (wire.Init, "kinds"),
        (wire.Push, "clocks"),
        (wire.Pull, "ids"),
        (wire.OptimizerStates, "names"),
        (wire.PutStates, "shapes"),
        (wire.Placed, "starts"),
    ],
)
@settings(max_examples=10)
@given(data=st.data())
def test_lists_of_different_lengths_are_refused(cls: type[Any], field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    header = msgpack.unpackb(encode(message)[0])
    at = 2 + [f.name for f in dataclasses.fields(cls)].index(field)
    header[at] = header[at][:-1]
    with pytest.raises(WireError, match="different lengths"):
        decode([msgpack.packb(header), *getattr(message, "buffers", [])])


def test_what_lists_refer_to_must_be_there() -> None:
    header = [VERSION, 15, ME, 0, ["a", "b"], [0, 1], [[1], [2]], ["int8"] * 2, 1, 1]
    decode([msgpack.packb(header)])
    header[5] = [0, 2]
    with pytest.raises(WireError, match="expected kinds below 2, got 2"):
        decode([msgpack.packb(header)])


@pytest.mark.parametrize("counts", [[1], [2, 1], [1, 1, 1]])
def test_as_many_segments_come_as_are_announced(counts: list[int]) -> None:
    columns = [[0, 1], [0, 0], [0, 0], [1, 1]]
    decode([msgpack.packb([VERSION, 16, 1, [2], *columns])])
    with pytest.raises(WireError, match="segments, as ``counts`` says, got 2"):
        decode([msgpack.packb([VERSION, 16, 1, counts, *columns])])


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
        wire.Declare(ME, 0, [""], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k" * 1025], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, [1.5], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, [True], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[-1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[2**48 + 1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[2**40, 2**40]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1] * 33], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1]], ["complex64"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1]], ["float32"], 0, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1]], ["float32"], 1, 0),
        wire.Declare(ME, 0, ["k"], [True], [[1], [1]], ["float32"] * 2, 1, 1),
        wire.Declare(ME, 0, ["k"], [-1], [[1]], ["float32"], 1, 1),
        wire.Placed(1, [True], [0], [0], [0], [1]),
        wire.Placed(1, [0], [], [], [], []),
        wire.Placed(1, [2], [1, 1], [0, 0], [0, 1], [1, 2]),
        wire.Placed(1, [1], [0], [4097], [0], [1]),
        wire.Placed(1, [1], [0], [0], [0.0], [1]),
        wire.Placed(1, [1], [0], [0], [0], [2**48 + 1]),
        wire.Push(ME, 0, [1], [1], 1, None, None),
        wire.Push(ME, 0, [1], [1], True, float("nan"), None),
        wire.Push(ME, 0, [1], [1], True, None, float("inf")),
        wire.Open(ME, 0, "both"),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m", [1] * 9]], None, [], [], 0.1, 1.0),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m", "x" * 65]], None, [], [], 0.1, 1.0),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m", {}]], None, [], [], 0.1, 1.0),
        wire.SetOptimizer(ME, 0, 1, "sgd", [["m"]], None, [], [], 0.1, 1.0),
        wire.Welcome(1, 0, 1, 0, []),
        wire.Welcome(1, 0, 1, 1, [], ["k" * 41]),
        wire.Here(wire.Node("worker", 4097, 1)),
    ],
)
def test_values_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        decode(encode(message))


def test_buffers_are_views_and_not_copies() -> None:
    payload = bytearray(b"abcd")
    decoded = decode([encode(wire.Values(1, buffers=[]))[0], payload])
    payload[:] = b"wxyz"
    assert bytes(decoded.buffers[0]) == b"wxyz"
    assert encode(wire.Values(1, buffers=[payload]))[1] is payload
