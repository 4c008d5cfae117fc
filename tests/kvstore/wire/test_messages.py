"""Messages and the checks of their fields."""

from __future__ import annotations

import gc
from typing import Annotated, Any, NamedTuple

import msgpack
import pytest
from any_message import CLASSES, ME, any_message, sender, with_shorter
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError
from kvstore.spec import MAX_DIMS, MAX_ELEMENTS, MAX_KEY_CHARS, MAX_SEGMENTS
from kvstore.table import Capacity, MinCount, Table
from kvstore.wire import fields as f
from kvstore.wire.coding import MAX_HEADER, MESSAGES
from kvstore.wire.fields import same_length, unpacked
from kvstore.wire.guests import ALIGN, NOT_HELD, READS, aligned
from kvstore.wire.message import require_known

# ---- the checks of fields: what each lets pass, and what it says of what it does not


SHORT = f.list_of(f.flag, 2)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (f.integer(-1, 3), -1),
        (f.integer(-1, 3), 3),
        (f.text(3), "abc"),
        (f.choice("a", "b"), "b"),
        (f.flag, False),
        (f.number, 1),
        (f.number, -0.5),
        (f.key, -7),
        (f.key, "k" * MAX_KEY_CHARS),
        (f.shape, []),
        (f.shape, [0] + [MAX_ELEMENTS] * (MAX_DIMS - 1)),
        (f.dtype, "bfloat16"),
        (f.optional(f.flag), None),
        (f.optional(f.flag), True),
        (SHORT, [True, False]),
        (f.tuple_of(f.flag, f.number), [True, 2]),
        (f.keys, []),
        (f.keys, [1, "a", -2]),
        (f.integers(1, 3), [1, 3, 3]),
        (f.integers(1, 3), []),
        (f.ids, [2, 1]),
        (f.hyperparameter, None),
        (f.hyperparameter, [0.9, None, 1]),
        (f.hyperparameter, "x" * f.MAX_HYPER_TEXT),
    ],
)
def test_what_is_right_passes(check: f.Check, value: Any) -> None:
    assert check(value) is None


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (f.integer(-1, 3), 4, "expected an integer from -1 to 3, got int 4"),
        (f.integer(), True, "got bool True"),
        (f.integer(), 1.0, "got float 1.0"),
        (f.text(3), "abcd", "expected a text of at most 3 characters, got str 'abcd'"),
        (f.text(3), b"a", "got bytes"),
        (f.choice("a", "b"), "c", "expected one of a, b, got str 'c'"),
        (f.flag, 1, "expected a bool, got int 1"),
        (f.number, float("nan"), "expected a finite number, got float nan"),
        (f.number, True, "got bool"),
        (f.key, "", "expected a key: an int, or a str of 1 to"),
        (f.key, "k" * (MAX_KEY_CHARS + 1), "expected a key"),
        (f.key, 1.5, "got float 1.5"),
        (f.shape, [1] * (MAX_DIMS + 1), f"a shape of at most {MAX_DIMS} dimensions"),
        (f.shape, [MAX_ELEMENTS + 1], f"a shape of at most {MAX_ELEMENTS} elements"),
        (f.shape, [-1], "a shape of at most"),
        (f.dtype, "complex64", "expected one of"),
        (f.optional(f.flag), 0, "expected a bool"),
        (SHORT, [True] * 3, "expected a list of at most 2, got list"),
        (SHORT, [True, 0], "expected a bool, got int 0"),
        (f.tuple_of(f.flag, f.number), [True], "expected a list of 2"),
        (f.tuple_of(f.flag, f.number), [1, 1], "expected a bool"),
        (f.keys, [1, True], "expected a key.*got bool True"),
        (f.keys, "k", "a list of at most"),
        (f.integers(1, 3), [1, 0], "a list of integers from 1 to 3, got list"),
        (f.integers(1, 3), [1, True], "a list of integers"),
        (f.ids, [1, 1], "expected distinct segment ids"),
        (f.ids, [2**32], "a list of integers"),
        (f.hyperparameter, "x" * (f.MAX_HYPER_TEXT + 1), "a text of at most"),
        (f.hyperparameter, [1] * (f.MAX_HYPER_LIST + 1), "a list of at most"),
        (f.hyperparameter, {}, "a finite number, got dict"),
    ],
)
def test_what_is_wrong_is_refused_and_said(check: f.Check, value: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        check(value)


def test_of_what_may_be_huge_only_the_type_is_shown() -> None:
    assert f.shown([[1]] * 1000) == "list"
    assert f.shown("x" * 1000) == f"str {'x' * 40!r}"


class Point(NamedTuple):
    """Where, and how large."""

    x: Annotated[int, f.integer(0, 9)]
    y: Annotated[int, f.integer(0, 9)]
    size: Annotated[float, f.number]


class Line(NamedTuple):
    """From where, called what, and whether it is visible."""

    start: Annotated[Point, f.Triple(Point)]
    name: Annotated[str, f.text(3)]
    visible: Annotated[bool, f.flag]


def test_a_named_tuple_is_read_from_a_list_and_so_is_its_first_field() -> None:
    line = f.Triple(Line).read([[1, 2, 0.5], "abc", True])
    assert line == Line(Point(1, 2, 0.5), "abc", True)
    assert type(line) is Line
    assert type(line.start) is Point


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[1, 2, 0.5], "a"], "expected a list of start, name, visible, got list"),
        ({}, "expected a list of start, name, visible, got dict"),
        ([[1, 2], "a", True], "start: expected a list of x, y, size"),
        ([[1, 10, 0.5], "a", True], "start: y: expected an integer from 0 to 9, got int 10"),
        ([[1, 2, None], "a", True], "start: size: expected a finite number"),
        ([[1, 2, 0.5], "long", True], "name: expected a text"),
        ([[1, 2, 0.5], "a", 1], "visible: expected a bool"),
    ],
)
def test_what_is_wrong_in_a_named_tuple_is_named(value: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        f.Triple(Line).read(value)


@pytest.mark.parametrize("value", [[1, "two", [3.0, None, True], b"four"], [], [[]], list(range(1000))])
def test_a_list_comes_back(value: list[object]) -> None:
    assert unpacked(bytearray(msgpack.packb(value))) == value


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x92\x01",  # a list that ends too soon
        b"\x91\x01\x02",  # more behind it
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\x91" * 3000 + b"\xc0",  # deep nesting
        msgpack.packb({"a": 1}),
        msgpack.packb([msgpack.ExtType(5, b"x")]),
        msgpack.packb([msgpack.Timestamp(1)]),
    ],
)
def test_anything_else_is_refused(packed: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(packed)


def test_the_garbage_collector_goes_on_after_a_large_list() -> None:
    assert gc.isenabled()
    assert len(unpacked(msgpack.packb([["x"]] * 200_000))) == 200_000
    assert gc.isenabled()


# ---- messages: each comes back as it was, and is refused if its fields are out of range or do not fit each other


def test_every_class_that_crosses_the_wire_is_tried() -> None:
    # A launcher that has been imported has messages of its own.
    assert {cls for cls in MESSAGES.values() if cls.__module__.startswith("kvstore.")} == set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=6)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_message(cls))
    assert wire.decode(wire.encode(message)) == message


def test_a_request_has_one_sender_of_which_it_tells_node_and_number() -> None:
    request = wire.decode(wire.encode(wire.Census(wire.Sender(wire.Node("worker", 3, 1), 7, 5))))
    assert request.sender == wire.Sender(wire.Node("worker", 3, 1), 7, 5)
    assert (request.node, request.seq, request.sender.done) == (wire.Node("worker", 3, 1), 7, 5)
    assert type(request.sender) is wire.Sender
    assert type(request.node) is wire.Node


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (sender(role="boss"), r"Census.sender: node: role: expected one of .*, got str 'boss'"),
        (sender(rank=-2), r"Census.sender: node: rank: expected an integer from -1"),
        (ME._replace(done=True), r"Census.sender: done: expected an integer .*, got bool True"),
    ],
)
def test_what_is_wrong_with_a_sender_is_said(changed: wire.Sender, words: str) -> None:
    with pytest.raises(WireError, match=words):
        wire.decode(wire.encode(wire.Census(changed)))


def test_nodes_are_named_as_people_name_them() -> None:
    assert [str(wire.Node(role, 3, 1)) for role in ("worker", "server", "scheduler")] == [
        "worker 3",
        "server 3",
        "scheduler",
    ]


def test_lists_of_one_thing_have_one_length() -> None:
    same_length()
    same_length([1], [2], ["x"])
    with pytest.raises(WireError, match="different lengths: 1, 2, 0"):
        same_length([1], [1, 2], [])


def test_kinds_are_places_in_a_list() -> None:
    require_known([], [])
    require_known([0, 1, 0], ["a", "b"])
    with pytest.raises(WireError, match="expected kinds below 2, got 2"):
        require_known([0, 2], ["a", "b"])


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (wire.Declare, "shapes"),
        (wire.Placed, "starts"),
        (wire.Init, "kinds"),
        (wire.Pull, "ids"),
        (wire.PushLent, "clocks"),
        (wire.OptimizerStates, "names"),
        (wire.PutStates, "shapes"),
        (wire.Pause, "clocks"),
        (wire.ClosedRounds, "versions"),
        (wire.BucketState, "splits"),
        (wire.Updated, "versions"),
        (wire.Updated, "names"),
        (wire.StatesState, "names"),
        (wire.EncoderState, "steps"),
        (wire.EncoderState, "versions"),
        (wire.ClosedRowRounds, "versions"),
        (wire.StripeState, "counts"),
        (wire.TablePage, "dtypes"),
    ],
)
@settings(max_examples=8)
@given(data=st.data())
def test_lists_of_different_lengths_are_refused(cls: type[Any], field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    with pytest.raises(WireError, match="expected lists of one length, got different lengths"):
        wire.decode(with_shorter(message, field))


PRIMARY = wire.Node("server", 1, 1)


@pytest.mark.parametrize(
    "message",
    [
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
        wire.Welcome(1, 0, 1, 0, []),
        wire.Welcome(1, 0, 1, 1, [], ["k" * 41]),
        wire.Here(wire.Node("worker", 4097, 1)),
        wire.View(PRIMARY, -1),
        wire.View(PRIMARY, 1, "k" * 41),
        wire.View(PRIMARY, 1, "", ["worker", 1]),
        wire.View(PRIMARY, 1, "", ["standby", 0]),
        wire.View(PRIMARY, 1, "", ["standby"]),
        wire.Moved(4097, 1, ""),
        wire.Moved(1, 1, "x" * 513),
        wire.Standing(PRIMARY, 1, -1, False),
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
        wire.Record(1, 0),
        wire.Record(-1, 1),
        wire.Stored(0, -1),
        wire.Stored(-1, 0),
    ],
)
def test_values_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        wire.decode(wire.encode(message))


# ---- members and the scheduler


def test_what_lists_refer_to_must_be_there() -> None:
    header = [wire.VERSION, 15, ME, 0, ["a", "b"], [0, 1], [[1], [2]], ["int8"] * 2, 1, 1, []]
    wire.decode([msgpack.packb(header)])
    header[5] = [0, 2]
    with pytest.raises(WireError, match="expected kinds below 2, got 2"):
        wire.decode([msgpack.packb(header)])


@pytest.mark.parametrize("counts", [[1], [2, 1], [1, 1, 1]])
def test_as_many_segments_come_as_are_announced(counts: list[int]) -> None:
    columns = [[0, 1], [0, 0], [0, 0], [1, 1]]
    wire.decode([msgpack.packb([wire.VERSION, 16, 1, [2], *columns, False])])
    with pytest.raises(WireError, match="segments, as ``counts`` says, got 2"):
        wire.decode([msgpack.packb([wire.VERSION, 16, 1, counts, *columns, False])])


def test_the_longest_answers_that_are_meant_are_not_too_long() -> None:
    columns = [[number] * MAX_SEGMENTS for number in (2**32 - 1, 4095, 2**48 - 1, 2**48)]
    for counts in ([MAX_SEGMENTS], [1] * MAX_SEGMENTS):
        assert len(wire.encode(wire.Placed(2**62, counts, *columns))[0]) < MAX_HEADER


def test_a_key_of_many_segments_may_be_placed() -> None:
    """More than there may be servers, so many were refused once."""
    numbers = list(range(5000))
    starts, stops = [7 * number for number in numbers], [7 * number + 7 for number in numbers]
    placed = wire.Placed(1, [5000], numbers, [number % 3 for number in numbers], starts, stops)
    assert wire.decode(wire.encode(placed)) == placed


def test_a_notice_of_a_member_names_it() -> None:
    node = wire.Node("worker", 3, 1)
    for cls in (wire.Beat, wire.ProcessAlive, wire.Here):
        assert wire.decode(wire.encode(cls(node))).node == node


# ---- arrays


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


@given(any_message(wire.PushLent), st.binary(max_size=9))
def test_the_plain_push_differs_in_where_its_values_are(message: wire.PushLent, values: bytes):
    plain = message.plain([values])
    assert plain.buffers == [values]
    same = ("sender", "store", "ids", "clocks", "want", "lr", "rescale", "changes", "priority")
    assert [getattr(plain, name) for name in same] == [getattr(message, name) for name in same]
    assert (plain.codec, plain.encode, plain.back) == (None, None, None)


# ---- guests and reports

SERVER = wire.Node("server", 0, 1)
REPORT = wire.ServerReport(SERVER, 1.5, 7, 1, 2, 3, 4, 5, 6, 3, [1, 2], [10, 20], [0], [1], 30, "waits")


def test_a_report_has_both_counts_for_each_worker() -> None:
    with pytest.raises(WireError, match="lists of one length"):
        wire.decode(with_shorter(REPORT, "alone_us"))


def test_an_answer_has_a_place_for_each_member() -> None:
    with pytest.raises(WireError, match="lists of one length"):
        wire.decode(with_shorter(wire.Located(1, [0, 1], ["is at a.py:1 in f", "has left"]), "places"))


@pytest.mark.parametrize(
    "record",
    [
        ["reader", 0, 1, "ready", 0.0, "", "node7", 42],
        ["worker", 0, 1, "asleep", 0.0, "", "node7", 42],
        ["worker", 0, 1, "ready", float("nan"), "", "node7", 42],
        ["worker", 0, 1, "ready", 0.0, "", "n" * 256, 42],
        ["worker", 0, 1, "ready", 0.0, "", "node7", -1],
        ["worker", 0, 1, "ready", 0.0, "", "node7", "42"],
        ["worker", 0, 1, "ready", 0.0, ""],
    ],
)
def test_a_record_of_a_member_is_checked(record: list[object]) -> None:
    with pytest.raises(WireError, match=r"Observed\.members"):
        wire.decode(wire.encode(wire.Observed(1, 0.0, 0.0, [1, 1, 0, 0], [record], None, "", 0, [], [])))


def test_values_lie_at_whole_steps() -> None:
    assert [aligned(nbytes) for nbytes in (0, 1, ALIGN, ALIGN + 1)] == [0, ALIGN, ALIGN, 2 * ALIGN]


def test_a_reader_may_hold_nothing_of_a_segment() -> None:
    read = wire.ReadValues(ME, 0, [4, 9], 7, [NOT_HELD, 12], 3)
    assert wire.decode(wire.encode(read)) == read
    with pytest.raises(WireError, match="one length"):
        wire.ReadValues(ME, 0, [4, 9], 7, [12], 3)


def test_what_is_found_adds_up() -> None:
    with pytest.raises(WireError, match="expected 2 segments"):
        wire.KeysFound(1, 0, [0], [[3]], ["float32"], [None], [2], [5], [0], [0], [3])


def test_the_requests_of_readers_are_these() -> None:
    assert set(READS) == {
        wire.Connect,
        wire.FindKeys,
        wire.ListKeys,
        wire.ReadValues,
        wire.ReadRows,
        wire.ReadVersion,
        wire.ReadTable,
    }


# ---- checkpoints, records, tables


def test_each_segment_has_a_clock() -> None:
    capture = wire.Capture(ME, 0, 1, [1, 2], [3, 4])
    assert wire.decode(wire.encode(capture)) == capture
    with pytest.raises(WireError):
        wire.Capture(ME, 0, 1, [1, 2], [3])
    with pytest.raises(WireError, match="number"):
        wire.decode(wire.encode(wire.Capture(ME, 0, 0, [], [])))


def test_a_wait_for_a_file_is_not_remembered() -> None:
    assert wire.Capture.remembered
    assert not wire.AwaitCapture.remembered


def test_the_answer_says_what_the_file_has() -> None:
    captured = wire.Captured(7, 3, "a" * 64, [5, 6], None, "/checkpoints/round-3")
    assert wire.decode(wire.encode(captured)) == captured
    with pytest.raises(WireError, match="nbytes"):
        wire.decode(wire.encode(wire.Captured(7, -1, "a" * 64, [], "sgd", "file")))


def test_a_record_carries_another_message() -> None:
    inner = wire.Close(wire.Sender(wire.Node("worker", 0, 1), 7, 3), 2)
    record = wire.decode(wire.encode(wire.Record(4, 9, wire.encode(inner))))
    assert (record.epoch, record.number) == (4, 9)
    assert wire.decode(record.buffers) == inner


PUSH = wire.PushRows(ME, 0, [7], [1], [1], [0], False, False, False, None, None, [], ["none"], buffers=[b"", b"", b""])
INIT = wire.InitTables(ME, 0, [7], ["t"], [Table(dim=2, admit=MinCount(2), evict=Capacity(9)).described], 0, 2)
PULL = wire.PullRows(ME, 0, [7], [1], [1], True, ["int8"], [b"12345678"])
PUT = wire.PutRows(ME, 0, 7, 0, None, None, ["seen"], ["int64"], [0], [b"", b"", b""])


@pytest.mark.parametrize("field", ["ids", "clocks", "counts", "wanted", "codecs"])
def test_lists_of_a_push_are_as_long_as_it_has_tables(field: str):
    with pytest.raises(WireError, match="lists of one length"):
        wire.decode(with_shorter(PUSH, field))


@pytest.mark.parametrize(
    ("message", "field"), [(INIT, "keys"), (INIT, "tables"), (PULL, "wanted"), (PUT, "dtypes"), (PUT, "columns")]
)
def test_lists_of_other_messages_describe_the_same_things(message: object, field: str):
    with pytest.raises(WireError, match="lists of one length"):
        wire.decode(with_shorter(message, field))


def test_a_table_travels_as_its_description():
    decoded = wire.decode(wire.encode(INIT))
    assert isinstance(decoded, wire.InitTables)
    assert Table.of(decoded.tables[0]) == Table(dim=2, admit=MinCount(2), evict=Capacity(9))


@pytest.mark.parametrize(
    "described",
    [
        [None, [2], "int64", "zeros", 1.0, 0, [], [], "none"],
        [-1, [2], "float32", "zeros", 1.0, 0, [], [], "none"],
        [None, [2], "float32", "zeros", float("nan"), 0, [], [], "none"],
        [None, [2], "float32", "zeros", 1.0, 0, ["count"], [], "none"],
        [None, [2], "float32", "zeros", 1.0, 0, [], [["unseen", 0, ""]], "none"],
        [None, [2], "float32", "zeros", 1.0, 0, [], [], "2bit"],
        [None, [2]],
        [4, [2], "float32", "zeros", 1.0, 0, [], [], "none", None],
        [4, [2], "float32", "zeros", 1.0, 0, [], [], "none", "w" * 2000],
        [4, [2], "float32", "zeros", 1.0, 0, [], [], "none", "w", 1],
    ],
)
def test_a_description_of_no_table_is_refused(described: list[object]):
    with pytest.raises(WireError):
        wire.decode(wire.encode(wire.InitTables(ME, 0, [7], ["t"], [described], 0, 2)))


@pytest.mark.parametrize("message", [wire.FreezeTable(ME, 0, 7, 3, None), wire.EvictRows(ME, 0, 7, 3)])
def test_what_waits_for_a_round_names_it_as_a_pull_does(message: wire.FreezeTable | wire.EvictRows):
    assert (message.ids, message.clocks, list(message.workers)) == ([7], [3], [0])
