"""Messages about tables: what of them is refused, and what waits for rounds as pushes and pulls do."""

from __future__ import annotations

import pytest
from any_message import ME, with_shorter

from kvstore import wire
from kvstore.errors import WireError
from kvstore.table import Capacity, MinCount, Table

PUSH = wire.PushRows(ME, 0, [7], [1], [1], [0], False, False, False, None, None, [], ["none"], None, [b"", b"", b""])
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
