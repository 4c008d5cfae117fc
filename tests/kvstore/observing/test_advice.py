"""What is advised, and that nothing is where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_spans import server_span, worker_span

from kvstore import wire
from kvstore.observing.advice import KINDS, SEVERITIES, Advice, advise, of_straggler
from kvstore.observing.straggler import CAUSES, Straggler
from kvstore.observing.view import JobView, MemberView, Span

EVEN = ([34, 33, 33], [0.01, 0.01, 0.01])


def view(
    workers: list[Span[wire.WorkerReport]],
    servers: list[Span[wire.ServerReport]],
    state: str = "ready",
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
