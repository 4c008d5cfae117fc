from __future__ import annotations

import pytest
from asking import Worker, floats
from hosting import describe, floats_in, values

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport.memory import Heap
from servers.aggregator.encoding import Encoding
from servers.aggregator.exchanges import Exchange, landed, pull, push
from servers.aggregator.gathering import HostSegments, Pulled, Pushed


def segments() -> HostSegments:
    known = HostSegments()
    known.add(describe(Worker(0), {1: ("a", 1, 2), 2: ("b", 1, 1)}))
    return known


def pushed(rank: int, **fields: object) -> Pushed:
    message = Worker(rank).push({1: floats(1, 2)}, 3)
    return Pushed(b"link", wire.Push(**{**vars(message), **fields}))


def test_a_push_names_the_workers_and_asks_for_what_any_of_them_wants():
    known = segments()
    made = push(known.listed([1]), [pushed(2), pushed(5, want=True)], [b"12345678"], passes=False)
    assert (made.listed.server, made.kind, made.wants) == (1, wire.Push, True)
    assert (made.fields["ranks"], made.fields["clocks"], made.fields["buffers"]) == ([2, 5], [3], [b"12345678"])


@pytest.mark.parametrize(("priorities", "wanted"), [((1, 4), 4), ((None, 4), None)])
def test_the_highest_priority_counts_and_what_keeps_its_place_keeps_it(priorities, wanted):
    askers = [pushed(rank, priority=priority) for rank, priority in enumerate(priorities)]
    assert push(segments().listed([1]), askers, [], passes=False).fields["priority"] == wanted


def test_each_is_answered_with_what_it_asked_for():
    known = segments()
    askers = [pushed(2), pushed(5, want=True, priority=7)]
    made = push(known.listed([1]), askers, [], passes=False)
    first, second = made.answers(values(1, 2, missed=1))
    assert first.reply == wire.Ack(1, 1)
    assert (floats_in(second.reply), second.reply.priority, second.reply.missed) == ([1, 2], 7, 1)
    refused = made.answers(wire.Failure(9, "Mismatch", "no"))
    assert [answer.reply for answer in refused] == [wire.Failure(1, "Mismatch", "no")] * 2


def test_a_pull_is_for_its_worker():
    message = Worker(4).pull([1], 2)
    made = pull(segments().listed([1]), [2], ["fp16", []], Pulled(b"link", message), passes=True)
    assert (made.kind, made.wants, made.fields["ranks"], made.fields["back"]) == (wire.Pull, True, [4], ["fp16", []])


@pytest.mark.parametrize(
    ("codec", "back", "times"),
    [(None, None, 1), (["2bit", []], None, 1), (["fp16", []], ["bf16", []], 2), (["2bit", []], ["fp16", []], 4)],
)
def test_a_window_has_as_many_messages_whatever_their_elements_are_sent_as(codec, back, times):
    listed = segments().listed([1, 2])
    assert Exchange(listed, wire.Push, {"codec": codec, "back": back}, []).turn_bytes == listed.nbytes // times


def test_a_pull_counts_with_the_codec_of_its_values():
    listed = segments().listed([1, 2])
    assert Exchange(listed, wire.Pull, {"back": ["int8", []]}, []).turn_bytes == listed.nbytes // 8


def test_values_are_laid_down_in_one_piece():
    known = segments()
    exchange = Exchange(known.listed([1, 2]), wire.Pull, {"back": None}, [])
    reply = values(1, 2)
    reply.buffers.append(values(3).buffers[0])  # type: ignore[attr-defined]
    laid = landed(reply, exchange, Heap(), Encoding(known.key, known.size))
    assert (len(laid.buffers), floats_in(laid)) == (1, [1, 2, 3])


def test_values_of_the_wrong_size_are_refused():
    known = segments()
    exchange = Exchange(known.listed([1]), wire.Pull, {"back": None}, [])
    with pytest.raises(WireError, match="3 elements where 2 belong"):
        landed(values(1, 2, 3), exchange, Heap(), Encoding(known.key, known.size))
