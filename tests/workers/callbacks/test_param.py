"""What the callbacks of a batch are told: a metric's value, by name or the first, and the worker's rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from callback_runs import param, right

import kvstore as kv
from workers import metrics
from workers.callbacks import BatchEndParam


def two() -> metrics.EvalMetric:
    return right(metrics.create(["acc", metrics.CustomMetric(lambda *_: 0.5, "half")]), 1, 4)


def test_without_a_name_it_is_the_first_metric() -> None:
    assert param(0, two()).value() == ("accuracy", 0.25)
    assert param(0, two()).value("half") == ("half", 0.5)


def test_a_metric_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor; choose from accuracy, half"):
        param(0, two()).value("f1")
    with pytest.raises(kv.UnknownName, match="to monitor"):
        param(0, None).value()


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, 0), ({"DMLC_TASK_ID": "2"}, 2), ({"RANK": "3", "WORLD_SIZE": "4"}, 3)],
)
def test_the_rank_is_the_runs_or_else_the_environments(
    environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert param(0).rank == rank
    assert BatchEndParam(0, 0, None, {"self": SimpleNamespace(rank=1)}).rank == 1
