"""A member's notes: which rounds are noted, what a record has, and what is lost when records come too fast."""

from __future__ import annotations

import itertools
import threading
from threading import Thread

from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.job.valid_values import RoundWindow
from kvstore.tracer import BATCH, KEPT, MOST_STARTS, NOBODY, ClockOffsets, Tracer, Words
from kvstore.transport.shm.shared_memory import LARGE
from kvstore.wire.tracing import ANSWERED, ASKED, HANDLED, MARK, MOST_RECORDS, SENT_FRAME, SPAN, read_records

ME = wire.Node("worker", 1, 1)
FIRST_THREE = RoundWindow(1, 3)


def made(window: RoundWindow = FIRST_THREE, most: int = 1 << 12) -> Tracer:
    return Tracer(window, map(float, itertools.count()).__next__, most)


def records(chunks: list[wire.TraceChunk]) -> list[list[object]]:
    return [record for chunk in chunks for record in read_records(wire.decode(wire.encode(chunk)))]


def test_a_window_is_open_from_the_start_if_it_has_the_first_round_and_until_its_last_is_over() -> None:
    tracer = made()
    seen = [(tracer.open, tracer.over)]
    for number in (1, 3, 2, 4):
        tracer.reached(number)
        seen.append((tracer.open, tracer.over))
    assert seen == [(True, False)] * 4 + [(False, True)]


def test_a_later_window_opens_with_its_first_round() -> None:
    tracer = made(RoundWindow(5, 6))
    opened = []
    for number in range(4, 8):
        tracer.reached(number)
        opened.append((number, tracer.open))
    assert opened == [(4, False), (5, True), (6, True), (7, False)]


def test_records_have_numbers_kinds_and_times() -> None:
    tracer = made()
    tracer.reached(2)
    tracer.span("push", 0.5, ["w", "b"], 8)
    tracer.asked(7, b"server 0", "push", ["w"], 4)
    tracer.answered(7, b"server 0")
    replies_to = [(NOBODY, 3), (wire.Node("worker", 0, 1), 4), (wire.Node("worker", 1, 1), 5)]
    tracer.handled(0.25, 0.5, "Push", wire.Node("worker", 0, 1), 9, 4, 2, replies_to)
    tracer.mark("lost")
    span, asked, answered, handled, mark = records(tracer.chunks(ME))
    thread = span[4]
    assert span == [1, SPAN, 0.5, 0.0, thread, "push", "w", 2, 8, 2]
    assert asked == [2, ASKED, 1.0, 7, "push", "w", 1, 4, 2, thread, "server 0"]
    assert answered == [2, ANSWERED, 2.0, 7, thread, "server 0"]
    replies = [[list(NOBODY), 3], [["worker", 0, 1], 4], [["worker", 1, 1], 5]]
    assert handled == [3, HANDLED, 0.25, 0.5, 3.0, thread, "Push", ["worker", 0, 1], 9, 4, 2, replies]
    assert mark == [6, MARK, 4.0, "lost"]


def test_a_request_under_way_is_told_of_once_and_its_answer_when_it_comes() -> None:
    tracer = made()
    tracer.asked(7, b"server 0", "push", ["w"], 4)
    (asked,) = records(tracer.chunks(ME))
    assert asked[1:7] == [ASKED, 0.0, 7, "push", "w", 1]
    assert tracer.chunks(ME) == []
    tracer.answered(7, b"server 0")
    assert [record[1:4] + record[5:] for record in records(tracer.chunks(ME))] == [[ANSWERED, 1.0, 7, "server 0"]]


def test_what_leaves_while_a_chunk_is_made_is_named_in_the_next() -> None:
    tracer = made()
    for _ in range(3):
        tracer.asked(7, b"server 0", "push", ["w"], 4)
        tracer.chunks(ME)
        tracer.answered(7, b"server 0")
        (answered,) = records(tracer.chunks(ME))
        assert answered[-1] == "server 0"


def test_the_answer_of_a_request_is_noted_after_the_window_and_no_other() -> None:
    tracer = made()
    tracer.asked(7, b"server 0", "push", ["w"], 4)
    tracer.reached(4)
    tracer.answered(7, b"server 0")
    tracer.answered(7, b"server 0")
    tracer.answered(7, b"the scheduler")
    assert [record[1] for record in records(tracer.chunks(ME))] == [ASKED, ANSWERED]


def test_what_takes_a_while_is_noted_of_the_round_that_it_is_about() -> None:
    tracer = made(RoundWindow(2, 2))
    with tracer.during("forward"):
        pass
    with tracer.during("update", ["w"], 2):
        pass
    assert [record[5] for record in records(tracer.chunks(ME))] == ["update"]


def test_records_that_come_too_fast_leave_a_gap_in_the_numbers_and_wake_somebody_before() -> None:
    tracer = made(most=8 * BATCH)
    woken = []
    tracer.wake = lambda: woken.append(len(records(tracer.chunks(ME))) if len(woken) else 0)
    for _ in range(11 * BATCH):
        tracer.mark("again")
    assert [record[0] for record in records(tracer.chunks(ME))] == list(range(1, 8 * BATCH + 1))
    tracer.mark("again")
    assert [record[0] for record in records(tracer.chunks(ME))] == [11 * BATCH + 1]
    for _ in range(11 * BATCH):
        tracer.mark("again")
    assert woken == [0, 7 * BATCH]
    assert [record[0] for record in records(tracer.chunks(ME))] == list(range(18 * BATCH + 2, 22 * BATCH + 2))


def test_events_of_several_threads_and_chunks_that_are_taken_meanwhile_lose_nothing() -> None:
    tracer, taken, over = made(most=1 << 16), [], threading.Event()

    def take() -> None:
        while not over.is_set():
            taken.extend(records(tracer.chunks(ME)))

    def note(first: int) -> None:
        for seq in range(first, first + 1000):
            tracer.asked(seq, b"server 0", "push", ["w"], 8)
            tracer.mark(str(seq))
            tracer.answered(seq, b"server 0")

    taker, *noters = threads = [Thread(target=take), *(Thread(target=note, args=(first,)) for first in (1, 2001))]
    for thread in threads:
        thread.start()
    for thread in noters:
        thread.join()
    over.set()
    taker.join()
    taken.extend(records(tracer.chunks(ME)))
    seqs = {*range(1, 1001), *range(2001, 3001)}
    assert sorted({record[0] for record in taken}) == list(range(1, max(record[0] for record in taken) + 1))
    assert sorted(record[3] for record in taken if record[1] == ASKED) == sorted(seqs)
    assert sorted(record[3] for record in taken if record[1] == ANSWERED) == sorted(seqs)
    assert sorted(int(record[3]) for record in taken if record[1] == MARK) == sorted(seqs)


def test_many_records_take_several_frames_and_chunks() -> None:
    tracer = made(most=3 * MOST_RECORDS)
    for _ in range(MOST_RECORDS + 1):
        tracer.mark("again")
    chunks = tracer.chunks(ME)
    assert [chunk.first for chunk in chunks] == [1, MOST_RECORDS + 1]
    assert [len(read_records(chunk)) for chunk in chunks] == [MOST_RECORDS, 1]
    assert max(len(frame) for chunk in chunks for frame in chunk.buffers) <= SENT_FRAME < LARGE


def test_the_end_of_the_window_is_told_once() -> None:
    tracer = made()
    assert tracer.chunks(ME) == []
    tracer.reached(4)
    assert [chunk.over for chunk in tracer.chunks(ME)] == [True]
    assert tracer.chunks(ME) == []


def test_what_left_before_clocks_had_been_compared_is_followed_once_by_how_far_they_are_apart() -> None:
    tracer = made()
    assert tracer.chunks(ME) == []
    tracer.mark("here")
    (chunk,) = tracer.chunks(ME)
    assert chunk.offsets == []
    for echo in range(KEPT):
        assert tracer.chunks(ME) == []
        tracer.offsets.take(1, echo, echo + 0.5, 7.0 + echo)
    (chunk,) = tracer.chunks(ME)
    assert chunk.offsets == [[1, 6.75, 0.25]]
    assert tracer.chunks(ME) == []


def test_a_chunk_names_the_threads() -> None:
    tracer = made()
    tracer.span("push", 0.5)
    (chunk,) = tracer.chunks(ME)
    (record,) = read_records(chunk)
    assert dict(map(tuple, chunk.thread_names))[record[4]] == "MainThread"


def test_it_turns_to_other_rounds_while_the_job_runs() -> None:
    tracer = made(RoundWindow())
    assert not tracer.open
    tracer.reached(7)
    for window, opened in (((7, 9), True), ((8, 9), False), ((1, 6), False)):
        tracer.turn_to(RoundWindow(*window))
        assert tracer.open == opened


def test_another_trace_has_nothing_of_the_one_before_and_one_that_ends_earlier_all() -> None:
    tracer = made()
    for window, count in (((1, 1), 1), ((5, 9), 0)):
        tracer.mark("lost")
        tracer.turn_to(RoundWindow(*window))
        assert len(records(tracer.chunks(ME))) == count


def test_what_began_before_there_was_a_tracer_is_not_noted() -> None:
    tracer = made()
    tracer.span("update", 0.0)
    assert tracer.chunks(ME) == []


def test_a_value_keeps_its_number_until_it_is_taken() -> None:
    words = Words()
    numbers = [words["a"], words["b"], words["a"]]
    assert numbers[0] == numbers[2] != numbers[1]
    assert words.take() == [(numbers[0], "a"), (numbers[1], "b")]
    assert words.take() == []
    assert words["a"] not in numbers


delays = st.floats(0, 2)


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(st.floats(0, 1e4), delays, delays), min_size=1, max_size=2 * KEPT))
def test_an_offset_is_wrong_by_at_most_half_the_shortest_of_the_last_round_trips(
    offset: float, beats: list[tuple[float, float, float]]
) -> None:
    offsets = ClockOffsets()
    for sent, there, back in beats:
        offsets.take(1, sent, sent + there + back, sent + there + offset)
    ((start, found, error),) = offsets.known
    assert start == 1
    assert abs(found - offset) <= error + 1e-9
    assert error <= min(there + back for _, there, back in beats[-KEPT:]) / 2 + 1e-9


def test_a_scheduler_that_was_started_again_has_an_offset_of_its_own() -> None:
    offsets = ClockOffsets()
    offsets.take(1, 10.0, 10.2, 110.1)
    offsets.take(2, 11.0, 11.2, 5011.1)
    (first, second) = offsets.known
    assert (first[0], round(first[1], 6), second[0], round(second[1], 6)) == (1, 100.0, 2, 5000.0)


def test_the_starts_are_bounded() -> None:
    offsets = ClockOffsets()
    for start in range(1, MOST_STARTS + 5):
        offsets.take(start, 1.0, 1.0, 1.0)
    assert [known[0] for known in offsets.known] == list(range(5, MOST_STARTS + 5))


def test_an_echo_from_before_its_beat_says_nothing() -> None:
    offsets = ClockOffsets()
    offsets.take(1, 2.0, 1.0, 1.0)
    assert offsets.known == []


def test_it_has_settled_after_some_echoes_of_the_scheduler_that_is_there() -> None:
    offsets = ClockOffsets()
    assert not offsets.settled
    for _ in range(KEPT):
        offsets.take(1, 1.0, 1.0, 1.0)
    assert offsets.settled
    offsets.take(2, 1.0, 1.0, 1.0)
    assert not offsets.settled
