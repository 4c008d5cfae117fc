from __future__ import annotations

from dataclasses import replace

import pytest
from viewed_job import server, view_of, worker

from kvstore import wire
from kvstore.errors import WireError
from kvstore.observing.figures import awaited, job_rounds_per_s, link_rates, logged_values, waits
from kvstore.observing.quantities import figures_of
from kvstore.observing.view import JobView, Span


def test_rates_and_shares_are_over_the_time_between_two_reports() -> None:
    member = worker(
        0,
        before={"rounds": 10, "blocked_us": 0, "input_us": 0, "sent": [0, 100], "received": [0, 0]},
        rounds=50,
        blocked_us=5_000_000,
        input_us=1_000_000,
        cpu_us=15_000_000,
        sent=[1000, 300],
        received=[500, 0],
        values=[["loss", 0.5]],
        ahead=2,
    )
    assert member.worker is not None
    assert figures_of(member) == {
        "rounds": 50,
        "rounds_per_s": 4.0,
        "waits": 0.5,
        "input": 0.1,
        "cores": 1.5,
        "memory": 10**8,
        "sent_per_s": 120.0,
        "received_per_s": 50.0,
        "outstanding": 0,
        "ahead": 2,
    }
    assert link_rates(member.worker) == [(100.0, 50.0), (20.0, 0.0)]
    assert logged_values(member.worker) == {"loss": 0.5}


def test_with_one_report_there_are_no_rates() -> None:
    member = worker(0, rounds=3, input_us=5)
    assert member.worker is not None
    its = figures_of(member)
    assert its is not None
    rates = ("rounds_per_s", "waits", "input", "cores", "sent_per_s", "received_per_s")
    assert (its["rounds"], {its[name] for name in rates}, link_rates(member.worker)) == (3, {None}, [])


def test_input_is_unknown_where_nobody_says() -> None:
    member = worker(0, before={}, input_us=-1)
    assert (figures_of(member) or {})["input"] is None


def test_a_link_that_is_new_has_been_at_0() -> None:
    member = worker(0, before={"sent": [], "received": []}, sent=[10], received=[20])
    assert member.worker is not None
    assert link_rates(member.worker) == [(1.0, 2.0)]


def test_a_servers_figures() -> None:
    member = server(0, before={"rounds": 0}, busy_us=9_000_000, sent=1000, received=2000)
    assert figures_of(member) == {
        "rounds": 50,
        "rounds_per_s": 5.0,
        "busy": 0.9,
        "cores": 0.0,
        "memory": 10**8,
        "held": 4000,
        "sent_per_s": 100.0,
        "received_per_s": 200.0,
        "version": None,
        "followers": None,
        "behind": None,
    }
    publishes = server(0, version=7, followers=2, behind=1)
    assert [(figures_of(publishes) or {})[name] for name in ("version", "followers", "behind")] == [7, 2, 1]


def test_the_job_does_as_many_rounds_as_the_worker_in_the_middle() -> None:
    workers = [worker(rank, before={"rounds": 50 - done}) for rank, done in enumerate((10, 20, 90))]
    assert job_rounds_per_s(view_of(workers)) == pytest.approx(2.0)
    assert job_rounds_per_s(view_of([worker(0)])) is None
    assert job_rounds_per_s(view_of([worker(0, "lost", before={"rounds": 0})])) is None


def waiting(rank: int, seconds: float, missing: list[int], why: str = "") -> dict[str, object]:
    return {"waiting": [0, 2], "missing": missing, "oldest_us": int(seconds * 1e6), "why": why}


def test_servers_with_the_same_wait_are_told_once_by_the_longest() -> None:
    view = view_of(
        [
            server(0, **waiting(0, 3.0, [1], "waits for worker 1, whose push 7 is missing")),
            server(1, **waiting(1, 5.6, [1], "waits for worker 1, whose push 8 is missing")),
        ]
    )
    [wait] = waits(view)
    assert wait.text == "servers 0, 1: workers 0, 2 have waited 6.0 s for worker 1, whose push 8 is missing"


def test_the_longest_wait_is_first_and_short_ones_are_left_out() -> None:
    view = view_of(
        [server(0, **waiting(0, 3.0, [1])), server(1, **waiting(1, 5.0, [3])), server(2, **waiting(2, 0.1, [4]))]
    )
    assert [wait.missing for wait in waits(view)] == [(3,), (1,)]
    assert len(waits(view, 0.0)) == 3
    assert awaited(view) == [3, 1]


def test_who_is_awaited_at_the_scheduler_comes_last() -> None:
    view = view_of([server(0, **waiting(0, 3.0, [1]))], awaited=[0, 1])
    assert awaited(view) == [1, 0]


def test_a_wait_for_nobody_in_particular_is_told_by_its_reason() -> None:
    view = view_of([worker(0), server(0, waiting=[0], missing=[], oldest_us=2_000_000, why="a checkpoint is taken")])
    assert [wait.text for wait in waits(view)] == ["server 0: worker 0 has waited 2.4 s: a checkpoint is taken"]


def test_nobody_waits() -> None:
    assert waits(view_of([worker(0), server(0)]), 0.0) == []


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
