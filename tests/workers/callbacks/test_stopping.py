"""When training stops early."""

from __future__ import annotations

from typing import Any

import pytest
from callback_runs import Run, param

import kvstore as kv
from workers import metrics
from workers.callbacks import EarlyStopping


def seen(stopping: EarlyStopping, values: list[float], name: str = "accuracy") -> int | None:
    """After which epoch it stops."""
    run = Run()
    stopping.begin(run)
    for epoch, value in enumerate(values):
        metric = metrics.CustomMetric(lambda *_, value=value: value, name)
        metric.update(0, 0)
        stopping(param(0, metric, epoch))
        if run.stopped:
            return epoch
    return None


@pytest.mark.parametrize(
    ("options", "name", "values", "stops"),
    [
        ({"patience": 2}, "accuracy", [0.1, 0.2, 0.2, 0.3, 0.3, 0.1, 0.9], 5),
        ({"patience": 2}, "top_k_accuracy_5", [0.1, 0.2, 0.3, 0.4], None),
        ({"patience": 2}, "cross-entropy", [3.0, 2.0, 1.0, 1.5, 0.5], None),
        ({"patience": 1}, "loss", [3.0, 3.0], 1),
        ({"patience": 1, "mode": "max"}, "loss", [3.0, 4.0, 5.0, 5.0], 3),
        ({"patience": 1, "mode": "min"}, "accuracy", [0.5, 0.6], 1),
        ({"patience": 2, "min_delta": 0.1}, "accuracy", [0.5, 0.55, 0.58], 2),
        ({"patience": 1, "monitor": "accuracy"}, "accuracy", [0.5, 0.4], 1),
    ],
)
def test_early_stopping(options: dict[str, Any], name: str, values: list[float], stops: int | None) -> None:
    assert seen(EarlyStopping(**options), values, name) == stops


def test_a_metric_without_instances_is_no_better() -> None:
    stopping = EarlyStopping(patience=2)
    assert seen(stopping, [float("nan"), float("nan")]) == 1
    assert stopping.best is None


def test_what_early_stopping_remembers_comes_back() -> None:
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    seen(first, [0.5, 0.9, 0.8])
    second.load_state_dict(first.state_dict())
    assert (second.best, second.best_epoch) == (0.9, 1)
    assert seen(second, [0.8, 0.8]) == 1


def test_early_stopping_that_cannot_be() -> None:
    with pytest.raises(kv.UsageError, match="pass eval_data"):
        EarlyStopping().begin(Run(evaluates=False))
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor; choose from accuracy"):
        seen(EarlyStopping("f1"), [0.5])
    with pytest.raises(kv.UnknownName, match="mode='up' must be one of auto, max, min"):
        EarlyStopping(mode="up")
    with pytest.raises(kv.UsageError, match="patience=0"):
        EarlyStopping(patience=0)
    with pytest.raises(kv.UsageError, match="min_delta=-1"):
        EarlyStopping(min_delta=-1)
