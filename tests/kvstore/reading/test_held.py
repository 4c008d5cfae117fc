from __future__ import annotations

import pytest
import torch

from kvstore import wire
from kvstore.errors import WireError
from kvstore.lineage import NOWHERE, Version
from kvstore.reading import held
from kvstore.reading.held import HeldValue, ReadSegment, reads_of
from kvstore.spec import Spec
from kvstore.values import to_buffer
from kvstore.wire.guests import NOT_HELD, aligned


def cut_value(key: str = "w") -> HeldValue:
    """Five elements, on two servers."""
    return HeldValue(key, Spec((5,), "float32"), 0, [ReadSegment(7, 0, 0, 3), ReadSegment(8, 1, 3, 5)])


def answer(*parts: torch.Tensor, versions: list[int], positions: list[int], lineage: int = 7) -> wire.ValuesRead:
    data = b"".join(bytes(to_buffer(part)).ljust(aligned(4 * part.numel()), b"\0") for part in parts)
    return wire.ValuesRead(1, lineage, versions, positions, [bytearray(data)] if data else [])


def test_each_server_is_asked_for_its_segments() -> None:
    value, other = cut_value(), cut_value("v")
    reads = list(reads_of([value, other]))
    assert [(read.server, read.fields["ids"]) for read in reads] == [(0, [7, 7]), (1, [8, 8])]
    assert reads[0].fields["versions"] == [NOT_HELD, NOT_HELD]


def test_long_values_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_BYTES", 100)
    assert sorted(len(read.parts) for read in reads_of([cut_value(str(i)) for i in range(3)])) == [1] * 6


def test_an_answer_is_taken_segment_by_segment() -> None:
    value = cut_value()
    first, second = reads_of([value])
    first.take(answer(torch.ones(3), versions=[4], positions=[0]))
    assert value.versions == [Version(7, 4), NOWHERE]
    second.take(answer(torch.full((2,), 2.0), versions=[5], positions=[0]))
    assert value.flat.tolist() == [1, 1, 1, 2, 2]
    second.take(answer(versions=[6], positions=[]))  # it has not moved on by more than was allowed
    assert value.versions == [Version(7, 4), Version(7, 5)]


def test_what_is_held_of_a_servers_past_is_asked_for_as_if_it_were_not_held() -> None:
    value, other = cut_value(), cut_value("v")
    for each, lineage, version in ((value, 7, 4), (other, 9, 2)):
        next(reads_of([each])).take(answer(torch.ones(3), versions=[version], positions=[0], lineage=lineage))
    first, second = reads_of([value, other])
    assert (first.fields["lineage"], first.fields["versions"]) == (9, [NOT_HELD, 2])
    assert (second.fields["lineage"], second.fields["versions"]) == (0, [NOT_HELD, NOT_HELD])


@pytest.mark.parametrize(
    "wrong",
    [
        answer(torch.ones(3), versions=[4, 4], positions=[0]),
        answer(torch.ones(3), versions=[4], positions=[1]),
        answer(torch.ones(30), versions=[4], positions=[0]),
        answer(versions=[4], positions=[0]),
        wire.ValuesRead(1, 7, [4], [0], [bytearray(32), bytearray(32)]),
    ],
)
def test_a_wrong_answer_is_refused_and_changes_nothing(wrong: wire.ValuesRead) -> None:
    value = cut_value()
    with pytest.raises(WireError, match="an answer of"):
        next(reads_of([value])).take(wrong)
    assert value.versions == [NOWHERE, NOWHERE]


def test_many_small_values_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_SEGMENTS", 2)
    assert sorted(len(read.parts) for read in reads_of([cut_value(str(i)) for i in range(3)])) == [1, 1, 2, 2]
