"""What is seen of a job's figures: the figures, the straggler, and the advice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_reports import server_report, worker_report
from viewed_job import server, view_of, worker

from kvstore import wire
from kvstore.errors import WireError
from kvstore.observing.advice import KINDS, SEVERITIES, Advice, advise, of_straggler
from kvstore.observing.figures import awaited, job_rounds_per_s, link_rates, logged_values, waits
from kvstore.observing.quantities import figures_of
from kvstore.observing.straggler import (
    ALONE,
    CAUSES,
    ENOUGH,
    FEWEST_WAVES,
    LAST,
    PairedLooks,
    Straggler,
    doing_of,
    find_straggler,
)
from kvstore.observing.view import JobView, MemberView, Span

SECONDS = 10.0
BEFORE = 100.0


def us(share: float) -> int:
    """This share of the time, in microseconds."""
    return round(share * SECONDS * 1e6)


def worker_span(
    rank: int = 0, blocked: float = 0.1, read: float | None = None, rounds: int = 100, **counts: Any
) -> Span[wire.WorkerReport]:
    """A worker that has waited for answers, and for data, for these shares of the time."""
    known = {} if read is None else {"input_us": 1000}
    before = worker_report(rank, at=BEFORE, blocked_us=5_000_000, rounds=7, **known)
    known = {} if read is None else {"input_us": 1000 + us(read)}
    now = BEFORE + SECONDS
    latest = worker_report(rank, at=now, blocked_us=5_000_000 + us(blocked), rounds=7 + rounds, **known, **counts)
    return Span(before, latest)


def server_span(
    last: list[int], alone: list[float], rank: int = 0, role: str = "server", busy: float = 0.1, **counts: Any
) -> Span[wire.ServerReport]:
    """A server at which workers came last so often, and were awaited alone for such shares of the time."""
    before = server_report(
        *(rank, role), at=BEFORE, waves=3, came_last=[1] * len(last), alone_us=[9] * len(last), busy_us=4, received=1
    )
    latest = server_report(
        *(rank, role),
        at=BEFORE + SECONDS,
        waves=3 + counts.pop("waves", sum(last)),
        came_last=[1 + count for count in last],
        alone_us=[9 + us(share) for share in alone],
        busy_us=4 + us(busy),
        received=1000,
        **counts,
    )
    return Span(before, latest)


# ---- figures


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


# ---- who is named a straggler, and by what cause


def workers(*blocked: float, read: list[float] | None = None, rounds: int = 100):
    return {
        rank: worker_span(rank, share, None if read is None else read[rank], rounds)
        for rank, share in enumerate(blocked)
    }


def test_a_worker_that_computes_for_longer_is_named():
    found = find_straggler(workers(0.35, 0.02, 0.36), [server_span([0, 100, 0], [0.0, 0.33, 0.0])])
    assert found is not None
    assert (found.ranks, found.cause) == ((1,), "local")
    assert (found.seconds, found.waves, found.last) == (10.0, 100, 1.0)
    assert found.alone == pytest.approx(0.33)
    assert found.alone_s == pytest.approx(0.033)
    assert (found.blocked, found.others_blocked) == pytest.approx((0.02, 0.355))
    assert (found.input, found.others_input) == (None, None)


@pytest.mark.parametrize(
    ("blocked", "read", "alone", "cause"),
    [
        ([0.35, 0.02], [0.0, 0.31], 0.33, "input"),
        ([0.35, 0.02], [0.0, 0.03], 0.33, "compute"),
        ([0.35, 0.02], [0.3, 0.31], 0.33, "compute"),
        ([0.36, 0.34], [0.0, 0.0], 0.33, "network"),  # it waits as long as others
        ([0.8, 0.65], None, 0.16, "local"),  # all wait for large arrays; it less, by what it computes for longer
    ],
)
def test_the_cause(blocked: list[float], read: list[float] | None, alone: float, cause: str):
    found = find_straggler(workers(*blocked, read=read), [server_span([0, 100], [0.0, alone])])
    assert found is not None
    assert found.cause == cause


def test_the_conditions_together_name_and_each_alone_does_not():
    named = {"last": [10, 90], "alone": [0.0, 0.3]}
    assert find_straggler(workers(0.3, 0.0), [server_span(**named)]) is not None
    for other in (
        {"last": [30, 70]},  # less than LAST of the waves
        {"alone": [0.0, 0.09]},  # less than ALONE of the time
        {"last": [0, FEWEST_WAVES - 1]},
    ):
        assert find_straggler(workers(0.3, 0.0), [server_span(**{**named, **other})]) is None
    assert (LAST, ALONE) == (0.8, 0.1)


def test_who_costs_nobody_time_is_not_named():
    named = server_span([0, 100], [0.0, 0.3])
    assert find_straggler(workers(0.04, 0.0), [named]) is None, "nobody waits for the rounds"
    assert find_straggler(workers(0.3, 0.0, rounds=2000), [named]) is None, "1.5 ms a round"
    assert find_straggler(workers(0.3), [named]) is None, "it has left"
    assert find_straggler({}, [named]) is None
    assert find_straggler(workers(0.3, 0.0), []) is None


def test_all_servers_count():
    seen = [server_span([0, 100], [0.0, 0.3]), server_span([70, 30], [0.05, 0.05])]
    assert find_straggler(workers(0.3, 0.0), seen) is None
    seen[1] = server_span([10, 90], [0.0, 0.05])
    found = find_straggler(workers(0.3, 0.0), seen)
    assert found is not None
    assert (found.waves, found.last) == (200, 0.95)


# ---- with aggregators


def test_of_an_aggregators_workers_the_one_that_its_host_waits_for():
    seen = [server_span([0, 0, 100, 100], [0.0, 0.0, 0.3, 0.3], waves=100)]
    groups = [
        server_span([50, 50], [0.0, 0.0], 0, "aggregator"),
        server_span([0, 0, 2, 98], [0.0, 0.0, 0.0, 0.3], 1, "aggregator"),
    ]
    found = find_straggler(workers(0.3, 0.3, 0.3, 0.0), seen, groups)
    assert found is not None
    assert (found.ranks, found.cause) == ((3,), "local")


def test_a_host_whose_workers_are_late_together_is_named_whole():
    seen = [server_span([0, 0, 100, 100], [0.0, 0.0, 0.3, 0.3], waves=100)]
    groups = [
        server_span([50, 50], [0.0] * 2, 0, "aggregator"),
        server_span([0, 0, 50, 50], [0.0] * 4, 1, "aggregator"),
    ]
    found = find_straggler(workers(0.3, 0.31, 0.3, 0.3), seen, groups)
    assert found is not None
    assert (found.ranks, found.cause) == ((2, 3), "network")


def test_on_one_host_its_aggregator_knows():
    seen = [server_span([100, 100, 100], [0.0] * 3, waves=100)]
    found = find_straggler(workers(0.3, 0.3, 0.0), seen, [server_span([1, 1, 98], [0.0, 0.0, 0.3], 0, "aggregator")])
    assert found is not None
    assert found.ranks == (2,)
    assert find_straggler(workers(0.3, 0.3, 0.0), seen) is None


FETCH = ["train.py:9 in <module>", "torch/utils/data/dataloader.py:700 in __next__", "data.py:4 in __getitem__"]
BACKWARD = ["train.py:12 in <module>", "torch/autograd/graph.py:800 in _engine_run_backward"]
PUSH = ["train.py:14 in <module>", "kvstore/client/store.py:200 in pushpull", "selectors.py:400 in select"]
LOAD = ["train.py:10 in <module>", "train.py:41 in load_batch"]


def at(frames: list[str], place: str = "") -> wire.Stacks:
    return wire.Stacks(
        wire.Node("worker", 0, 1), 1, place or frames[-1], "", [["MainThread", frames], ["other", FETCH]]
    )


def looks(own: list[list[str]], other: list[list[str]], times: int = ENOUGH) -> PairedLooks:
    """At the frames of each list in turn."""
    seen = PairedLooks(1, 0)
    for number in range(times):
        seen.add(at(own[number % len(own)]), at(other[number % len(other)]))
    return seen


@pytest.mark.parametrize(
    ("frames", "doing"),
    [
        (FETCH, "input"),
        ([*FETCH, "torch/nn/modules/module.py:1 in __call__"], "input"),
        (BACKWARD, "compute"),
        ([*BACKWARD, "train.py:20 in backward"], "compute"),
        ([*BACKWARD, "workers/trainer/overlap.py:3 in hook", *PUSH[1:]], "waits"),
        (PUSH, "waits"),
        (LOAD, "else"),
        ([], "else"),
    ],
)
def test_frames_say_what_a_worker_does(frames: list[str], doing: str):
    assert doing_of(at(frames, "somewhere")) == doing


def test_what_takes_it_longer_than_the_other_is_the_cause():
    assert looks([BACKWARD, BACKWARD, FETCH], [BACKWARD, BACKWARD, PUSH]).cause == "input"
    assert looks([BACKWARD], [BACKWARD, BACKWARD, PUSH]).cause == "compute"
    assert looks([FETCH, BACKWARD, BACKWARD], [FETCH, BACKWARD, PUSH]).cause == "compute"


def test_a_line_of_the_program_is_named_and_is_no_cause():
    seen = looks([LOAD, BACKWARD], [PUSH, BACKWARD])
    assert seen.cause == ""
    assert seen.words == "10 of 20 looks found it at train.py:41 in load_batch"
    assert looks([LOAD, LOAD], [LOAD, BACKWARD]).words == (
        "20 of 20 looks found it at train.py:41 in load_batch, and 10 found worker 0 there"
    )


def test_few_looks_and_equal_ones_say_nothing():
    few = looks([BACKWARD], [PUSH], ENOUGH - 1)
    assert (few.cause, few.words) == ("", "")
    alike = looks([BACKWARD, PUSH], [BACKWARD, PUSH])
    assert (alike.cause, alike.words) == ("", "")


# ---- what is advised, and that nothing is where nothing is wrong


EVEN = ([34, 33, 33], [0.01, 0.01, 0.01])


def view(
    workers: list[Span[wire.WorkerReport]], servers: list[Span[wire.ServerReport]], state: str = "ready"
) -> JobView:
    members = [MemberView("worker", rank, 1, state, 0.1, "", span) for rank, span in enumerate(workers)]
    members += [MemberView("server", rank, 1, "ready", 0.1, "", None, span) for rank, span in enumerate(servers)]
    return JobView(100.0, 0.0, len(workers), len(servers), 0, 0, members, None, "", [])


def only(advice: list[Advice]) -> Advice:
    (one,) = advice
    assert one.kind in KINDS
    assert one.severity in SEVERITIES
    return one


def test_an_even_job_needs_no_advice():
    assert advise(view([worker_span(rank, 0.1) for rank in range(3)], [server_span(*EVEN)])) == []
    assert advise(view([], [])) == []


def test_the_straggler_is_named_with_its_numbers():
    spans = [worker_span(0, 0.35, 0.01), worker_span(1, 0.02, 0.33), worker_span(2, 0.35, 0.01)]
    advice = only(advise(view(spans, [server_span([1, 99, 0], [0.0, 0.33, 0.0])])))
    assert (advice.kind, advice.about, advice.straggler) == ("straggler_input", "worker 1", True)
    assert advice.text == (
        "worker 1 is slow: it came last in 99 % of the rounds of the last 10 s, and others waited for it alone for 33 "
        "% of the time (33 ms a round). It reads its input for longer than the others: it waits for data for 33 % of "
        "the time, the others 1 %"
    )
    assert advise(view(spans, [server_span([1, 99, 0], [0.0, 0.33, 0.0])], state="left")) == []


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_words(cause: str):
    found = Straggler((2, 3), 8.0, 40, 0.9, 0.25, 0.0025, 0.1, 0.3, None, None, cause)
    advice = of_straggler(found, "9 of 40 looks found it at train.py:41 in load_batch")
    assert advice.kind == f"straggler_{cause}"
    assert advice.text.startswith("workers 2 and 3, which share an aggregator, are slow: they came last in 90 % of the")
    assert "25 % of the time (2.5 ms a round)" in advice.text
    assert advice.text.endswith(". 9 of 40 looks found it at train.py:41 in load_batch")
    assert "`" not in of_straggler(found).text  # the page and logs show text as it is
    assert "0 %" in of_straggler(replace(found, input=0.0, others_input=0.0)).text


def test_a_request_that_waits_for_long():
    waits: dict[str, Any] = {
        "waiting": [0, 2],
        "missing": [1],
        "why": "waits for worker 1, whose push 7 of 'w' is missing",
    }
    stuck = server_span([0, 0, 0], [0.0] * 3, waves=0, oldest_us=34_000_000, **waits)
    advice = only(advise(view([worker_span(rank, 0.1, rounds=0) for rank in range(3)], [stuck])))
    assert (advice.kind, advice.about) == ("stuck", "worker 1")
    assert advice.text == (
        "workers 0, 2 have waited for 34 s so far: server 0 waits for worker 1, whose push 7 of 'w' is missing"
    )
    soon = server_span([0, 0, 0], [0.0] * 3, waves=0, oldest_us=9_000_000, **waits)
    assert advise(view([worker_span(rank, 0.1, rounds=0) for rank in range(3)], [soon])) == []


def test_uneven_servers():
    spans = [worker_span(rank, 0.5) for rank in range(3)]
    busy = [server_span(*EVEN, rank, busy=share) for rank, share in enumerate((0.2, 0.8, 0.25))]
    advice = only(advise(view(spans, busy)))
    assert (advice.kind, advice.about) == ("uneven_servers", "server 1")
    assert (
        "wait for answers for 50 % of the time; server 1 is busy for 80 %, half of the others for 22 %" in advice.text
    )


def test_bound_by_the_store():
    spans = [worker_span(rank, 0.5) for rank in range(3)]
    advice = only(advise(view(spans, [server_span(*EVEN, rank, busy=0.7) for rank in range(2)])))
    assert (advice.kind, advice.about) == ("bound_by_store", "")
    assert "servers are busy for up to 70 %" in advice.text
    spans = [worker_span(rank, 0.2) for rank in range(3)]
    assert advise(view(spans, [server_span(*EVEN, busy=0.9)])) == [], "workers do not wait for it"


def test_bound_by_the_network():
    spans = [worker_span(rank, 0.7) for rank in range(3)]
    advice = only(advise(view(spans, [server_span(*EVEN, busy=0.1)])))
    assert (advice.kind, advice.severity) == ("bound_by_network", "info")


def test_bound_by_input():
    spans = [worker_span(rank, 0.1, read=0.4) for rank in range(3)]
    advice = only(advise(view(spans, [server_span(*EVEN)])))
    assert advice.kind == "bound_by_input"
    assert "40 % of the time" in advice.text
