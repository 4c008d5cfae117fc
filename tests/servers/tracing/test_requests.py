"""Requests: what the one who asks and the one who handles have noted comes together."""

from __future__ import annotations

from typing import Any

from noted import PUSH_S, SERVER, WORKERS, NotedJob, fetched

from kvstore import wire
from servers.tracing.chrome import requests_of
from servers.tracing.collected import CollectedNotes


def records_of(collected: CollectedNotes) -> dict[wire.Node, list[list[Any]]]:
    return {node: notes.records() for node, notes in collected.members.items()}


def test_the_notes_of_both_ends_make_one_request() -> None:
    job = NotedJob()
    job.round(1)
    found = requests_of(records_of(job.collected()))
    assert set(found) == {(WORKERS[0], 1, False), (WORKERS[1], 1, False)}
    request = found[WORKERS[0], 1, False]
    assert (request.name, request.key, request.keys, request.nbytes, request.peer) == (
        "pushpull",
        "w",
        2,
        400,
        "server 0",
    )
    assert request.asked is not None
    assert request.answered is not None
    (handled,), (left,) = request.handled, request.left
    assert (handled.node, left.node) == (SERVER, SERVER)
    times = [moment.at - request.asked.at for moment in (handled, left, request.answered)]
    assert [round(time / PUSH_S, 6) for time in times] == [1, 5, 6]


def test_one_end_alone_makes_a_request_that_lacks_the_other() -> None:
    job = NotedJob()
    job.round(1)
    worker, _, server = job.chunks()
    seen = []
    for chunk in (worker, server):
        collected = CollectedNotes()
        collected.take(fetched([chunk]))
        found = requests_of(records_of(collected))
        seen.append(
            [(request.asked is not None, len(request.handled), len(request.left)) for request in found.values()]
        )
    assert seen == [[(True, 0, 0)], [(False, 1, 1), (False, 1, 1)]]
