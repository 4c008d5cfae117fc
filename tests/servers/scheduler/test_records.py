"""What is packed is unpacked; a log that is cut short loses its last record, and any other damage is an error."""

from __future__ import annotations

import pytest
from rendezvous import Member

from kvstore import wire
from kvstore.errors import KVStoreError
from servers.scheduler.logged import Came, Record, RecordPacker, Succession, Ticked, beginning, sender_of, unpack

BEGINS = beginning(2, 1)
W0, W1 = Member("worker", 1, 0), Member("worker", 2, 1)
RECORDS: list[Record] = [
    Came(1000.0, b"from:1", "key of 0", W0.join()),
    Came(1000.25, b"\0abcd", "", wire.Lost("server", 1, "was killed by SIGKILL", 2)),
    Succession(),
    Came(1001.0, b"from:1", "key of 0", W0.declare("a", "b")),
    Came(1001.5, b"from:2", "key of 1", W1.declare("a", "b")),
    Ticked(1002.0, [(wire.Node("worker", 0, 1), 995.5), (wire.Node("server", 1, 2), 996.0)]),
    Came(1003.0, b"from:2", "key of 1", W1.declare("c")),
]


def packed(records: list[Record]) -> list[bytes]:
    packer = RecordPacker()
    return [packer.pack(record) for record in records]


def unpacked(log: bytes) -> list[Record]:
    return [record for record, _ in unpack(log, BEGINS, RecordPacker()) if record is not None]


def test_what_is_packed_is_unpacked() -> None:
    log = BEGINS + b"".join(packed(RECORDS))
    assert unpacked(log) == RECORDS
    assert BEGINS + b"".join(data for _, data in unpack(log, BEGINS, RecordPacker())) == log


def test_a_log_that_is_cut_anywhere_has_its_whole_records() -> None:
    parts = packed(RECORDS)
    log = BEGINS + b"".join(parts)
    ends = [len(BEGINS) + len(b"".join(parts[:count])) for count in range(len(parts) + 1)]
    for length in range(len(BEGINS), len(log) + 1):
        whole = sum(end <= length for end in ends) - 1
        assert unpacked(log[:length]) == RECORDS[:whole]


def test_a_byte_that_has_changed_is_an_error() -> None:
    log = BEGINS + b"".join(packed(RECORDS))
    for place in range(len(log)):
        wrong = bytearray(log)
        wrong[place] ^= 0x10
        with pytest.raises(KVStoreError, match=r"damaged: the record at byte \d+|of another job"):
            unpacked(bytes(wrong))


def test_a_log_of_another_job_is_refused() -> None:
    with pytest.raises(KVStoreError, match="of another job, or of another version"):
        list(unpack(beginning(3, 1), BEGINS, RecordPacker()))


def test_equal_declarations_of_many_workers_are_kept_once() -> None:
    keys = [f"layer {number}" for number in range(1000)]
    first, second = packed([Came(0.0, b"a", "", W0.declare(*keys)), Came(0.0, b"b", "", W1.declare(*keys))])
    assert len(second) < 100 < len(first)


def test_a_log_goes_on_with_the_bodies_that_are_in_it() -> None:
    packer = RecordPacker()
    log = BEGINS + b"".join(packed(RECORDS[:4]))
    assert len(list(unpack(log, BEGINS, packer))) == 5
    more = packer.pack(RECORDS[4])
    assert unpacked(log + more) == RECORDS[:5]
    assert len(more) < 60


def test_only_requests_have_senders() -> None:
    assert [sender_of(record) is None for record in RECORDS] == [False, True, True, False, False, True, False]
    assert sender_of(None) is None
