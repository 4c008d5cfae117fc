"""What a scheduler's answer says of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore import wire
from kvstore.errors import WireError
from kvstore.observing.view import JobView, Span

WORKER = wire.WorkerReport(wire.Node("worker", 1, 1), 5.0, 10, 1000, -1, 50, 60, 2, 0, [100], [200], [["loss", 0.5]])
SERVER = wire.ServerReport(wire.Node("server", 0, 1), 6.0, 10, 1, 2, 3, 4, 5, 6, 3, [0, 3], [0, 9], [], [], 0)
MEMBERS = [["worker", 1, 1, "ready", 0.25, "", "node7", 42], ["server", 0, 1, "ready", 0.5, "ipc://s0", "", 0]]


def observed(owners: list[int], *reports: wire.Message) -> wire.Observed:
    buffers = [wire.encode(report)[0] for report in reports]
    return wire.Observed(9, 8.0, 1.0, [2, 1, 0, 0], MEMBERS, None, "", 4, [[7.5, "hello"]], owners, buffers=buffers)


def test_members_have_their_reports() -> None:
    later = replace(WORKER, at=15.0, rounds=60)
    view = JobView.of(observed([0, 0, 1], WORKER, later, SERVER))
    worker, server = view.members
    assert (view.num_workers, view.num_servers, view.num_standbys, view.num_aggregators) == (2, 1, 0, 0)
    assert worker.worker is not None
    assert (worker.worker.before, worker.worker.latest) == (WORKER, later)
    assert (worker.worker.seconds, worker.worker.rate("rounds")) == (10.0, 5.0)
    assert worker.worker.grown("sent") == [0]
    more = Span(replace(WORKER, sent=[100]), replace(WORKER, sent=[130, 7]))
    assert more.grown("sent") == [30, 7], "a link that was not there before has carried nothing"
    assert worker.server is None
    assert server.server is not None
    assert (server.server.seconds, server.server.rate("rounds")) == (0.0, 0.0), "there is only one"
    assert view.of_role("server") == [server]
    assert (worker.name, server.title) == ("worker 1", "server 0")
    assert (worker.host, worker.pid) == ("node7", 42)
    assert [(event.number, event.at, event.text) for event in view.events] == [(4, 7.5, "hello")]


@pytest.mark.parametrize(
    ("owners", "reports"),
    [([2], [WORKER]), ([0], [wire.Ack(1)]), ([0], [SERVER]), ([1], [WORKER]), ([0, 1], [WORKER]), ([], [WORKER])],
)
def test_an_answer_that_contradicts_itself_is_refused(owners: list[int], reports: list[wire.Message]) -> None:
    with pytest.raises(WireError):
        JobView.of(observed(owners, *reports))
