"""What has been fetched: bounded, counted, and not spoilt by what is not valid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from noted import SERVER, WORKERS, NotedJob, fetched

from kvstore import wire
from kvstore.errors import WireError
from kvstore.wire.tracing import ROW
from servers.tracing.collected import CollectedNotes


def chunks(rounds: int = 1) -> list[wire.TraceChunk]:
    job = NotedJob()
    for number in range(1, rounds + 1):
        job.round(number)
    return job.chunks()


def test_records_are_kept_by_member_and_counted() -> None:
    collected = CollectedNotes()
    assert collected.take(fetched(chunks())) == 3
    assert {node: notes.count for node, notes in collected.members.items()} == {WORKERS[0]: 3, WORKERS[1]: 3, SERVER: 4}
    assert (collected.count, collected.after) == (10, 3)


def test_a_chunk_that_comes_again_is_not_taken_twice() -> None:
    collected = CollectedNotes()
    for _ in range(2):
        collected.take(fetched(chunks()))
    assert collected.count == 10


def test_what_is_missing_is_counted_by_the_numbers() -> None:
    collected = CollectedNotes()
    job = NotedJob()
    job.round(1)
    job.chunks()  # of another trace
    job.round(2)
    collected.take(fetched(job.chunks()))
    assert collected.members[SERVER].lost == 0
    job.round(3)
    job.chunks()  # lost
    job.round(4)
    collected.take(fetched(job.chunks(), first=4, dropped=3))
    assert collected.members[SERVER].lost == 4
    assert collected.dropped == 3


def test_beyond_the_limit_records_count_as_lost() -> None:
    collected = CollectedNotes(most=9)
    collected.take(fetched(chunks()))
    assert collected.count == 6
    assert collected.members[SERVER].lost == 4


def test_records_that_are_not_valid_are_refused_when_they_are_read_and_the_rest_is_taken() -> None:
    first, second, third = chunks()
    bad = replace(second, buffers=[bytes(second.records * ROW.size)])
    collected = CollectedNotes()
    collected.take(fetched([first, bad, second, third]))
    assert (collected.refused, collected.count, collected.after) == (0, 13, 4)
    assert len(collected.members[second.node].records()) == 4
    assert (collected.refused, collected.count) == (1, 10)


def test_the_offset_that_is_wrong_by_least_stays() -> None:
    collected = CollectedNotes()
    (one, *_) = chunks()
    for number, (offset, error) in enumerate([(1.0, 0.5), (2.0, 0.25), (3.0, 0.75)], 1):
        made = replace(one, offsets=[[1, offset, error]])
        collected.take(fetched([made], first=number))
    assert collected.members[one.node].offsets == {1: (2.0, 0.25)}


def test_drops_of_a_scheduler_before_count_too() -> None:
    collected = CollectedNotes()
    collected.take(fetched(chunks(), dropped=2))
    collected.take(fetched(chunks(), first=(1 << 40) + 1, dropped=1))
    assert collected.dropped == 3


def test_other_messages_are_refused() -> None:
    with pytest.raises(WireError):
        CollectedNotes().take(wire.TraceFetched(1, 1, 0, False, [b"x", b"y"]))
