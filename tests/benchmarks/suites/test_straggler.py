"""The measurement of stragglers: what is run, how news are judged; and one run."""

from __future__ import annotations

import pytest

from benchmarks.suites.straggler import CAUSES, SHAPES, Trial, carry_out, judged, trials
from kvstore.observing.advice import of_straggler
from kvstore.observing.straggler import Straggler


def news(cause: str, *ranks: int) -> str:
    return of_straggler(Straggler(ranks, 6.0, 50, 1.0, 0.4, 0.05, 0.1, 0.5, None, None, cause)).text


def test_trials_are_of_all_shapes_and_kinds_of_store():
    made = list(trials("input", 20))
    assert {(trial.workers, trial.aggregators) for trial in made} == set(SHAPES)
    assert {(trial.workers, trial.kind) for trial in made} >= {(2, "dist_sync"), (2, "dist_ssp"), (8, "dist_ssp")}
    assert all(trial.late < trial.workers for trial in made)


@pytest.mark.parametrize(("cause", "called"), [*zip(CAUSES, ("input", "compute", "network"), strict=True)])
def test_news_have_to_name_the_worker_and_the_cause(cause: str, called: str):
    trial = Trial("dist_sync", 4, 0, cause, 2)
    assert judged(trial, 5.0, news(called, 2)).right
    assert not judged(trial, 5.0, news(called, 1)).right
    assert not judged(trial, 5.0, news("local", 2)).right
    assert not judged(trial, 10.0, "").right


def test_a_slow_line_is_that_of_all_workers_of_a_host():
    trial = Trial("dist_sync", 4, 2, "network", 2)
    assert trial.ranks == (0, 2)
    assert judged(trial, 5.0, news("network", 0, 2)).right
    assert not judged(trial, 5.0, news("network", 1, 3)).right
    assert not judged(trial, 5.0, news("network", 2)).right
    assert judged(Trial("dist_ssp", 4, 2, "network", 2), 5.0, news("network", 2)).right


def test_in_an_even_run_nobody_is_to_be_named():
    trial = Trial("dist_sync", 4, 0, "", 2)
    assert judged(trial, 15.0, "").right
    assert not judged(trial, 5.0, news("compute", 2)).right


@pytest.mark.faults
def test_a_worker_that_is_late_in_its_backward_pass_is_named_while_the_job_runs():
    naming = carry_out(Trial("dist_sync", 2, 0, "backward", 1), before_s=0.0, limit_s=60.0)
    assert naming.right, naming
