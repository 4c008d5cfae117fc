"""What a process that serves notes: requests of rounds of interest, and to whom the replies go."""

from __future__ import annotations

import itertools

from kvstore import wire
from kvstore.job.valid_values import RoundWindow
from kvstore.tracer import Tracer
from kvstore.wire.tracing import read_records
from servers.requests.replies import Outbox
from servers.requests.request_tracer import RequestTracer

SERVER = wire.Node("server", 0, 1)
A, B = wire.Node("worker", 0, 1), wire.Node("worker", 1, 1)


def pull(node: wire.Node, seq: int, clock: int) -> wire.Pull:
    return wire.Pull(wire.Sender(node, seq, seq), 1, [4], [clock], None)


def noted(*came: tuple[bytes, wire.Message | None, Outbox]) -> list[list[object]]:
    tracer = Tracer(RoundWindow(1, 3), map(float, itertools.count()).__next__)
    requests = RequestTracer(tracer)
    for peer, message, outbox in came:
        requests.note(0.0, 0.0, outbox, peer, message)
    return [[*record[6:9], *record[10:]] for chunk in tracer.chunks(SERVER) for record in read_records(chunk)]


def test_a_request_is_noted_with_the_replies_that_left_and_those_who_had_asked() -> None:
    assert noted(
        (b"a", pull(A, 7, 2), []), (b"b", pull(B, 3, 2), [(b"a", wire.Values(7)), (b"b", wire.Values(3))])
    ) == [
        ["Pull", ["worker", 0, 1], 7, 2, []],
        ["Pull", ["worker", 1, 1], 3, 2, [[["worker", 0, 1], 7], [["worker", 1, 1], 3]]],
    ]


def test_a_round_counts_by_the_request_that_is_about_it() -> None:
    names = noted(
        (b"b", pull(B, 1, 5), []), (b"a", pull(A, 1, 3), []), (b"a", wire.OpenStore(wire.Sender(A, 2, 2), 1), [])
    )
    assert [record[1] for record in names] == [["worker", 0, 1]]


def test_what_is_sent_without_a_request_is_noted_if_it_answers_one() -> None:
    assert noted((b"", None, [(b"a", wire.Ack(7))]), (b"", None, [(b"a", wire.Stop())]), (b"", None, [])) == [
        ["", ["", -1, 0], 0, 0, [[["", -1, 0], 7]]]
    ]
