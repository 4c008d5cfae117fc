"""When checkpoints are saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from callback_runs import Run, param, right

import kvstore as kv
from workers import callbacks, metrics
from workers.callbacks import BatchEndParam, EarlyStopping


def test_checkpoints_are_saved_when_it_is_time() -> None:
    run = Run()
    each, third, batch = (
        callbacks.do_checkpoint("m"),
        callbacks.do_checkpoint("n", 3),
        callbacks.do_batch_checkpoint("b", 2),
    )
    for callback in (each, third, batch):
        callback.begin(run)
    for epoch in range(4):
        each(epoch, None, {}, {})
        third(epoch, None, {}, {})
    for number in range(5):
        batch(param(number, epoch=7))
    assert run.saved == [
        *[("m", n, 0) for n in (1, 2)],
        ("m", 3, 0),
        ("n", 3, 0),
        ("m", 4, 0),
        ("b", 7, 2),
        ("b", 7, 4),
    ]


def epochs(saving: callbacks.do_checkpoint, accuracies: dict[int, float]) -> None:
    """Let epochs end with these accuracies in percent."""
    for epoch, percent in accuracies.items():
        saving(epoch, None, {}, {})
        saving.evaluated(param(0, right(metrics.create("acc"), int(percent), 100), epoch))


def test_the_best_checkpoint_and_the_newest_are_kept_also_over_a_resumption_and_a_full_disk() -> None:
    run = Run()
    run.full = [3]
    saving = callbacks.do_checkpoint("m", best="accuracy")
    saving.begin(run)
    epochs(saving, {0: 50, 1: 70, 2: 90, 3: 60})
    assert (saving.best_epoch, saving.best_value) == (2, 0.7)
    assert run.removed == [("m", 1)]
    saving(4, None, {}, {})
    resumed = callbacks.do_checkpoint("m", best="accuracy")
    resumed.begin(run)
    resumed.load_state_dict(saving.state_dict())  # the checkpoint was saved before its evaluation
    resumed.evaluated(param(0, right(metrics.create("acc"), 80, 100), 4))
    assert (resumed.best_epoch, run.removed[1:]) == (5, [("m", 2), ("m", 4)])
    epochs(resumed, {5: 10, 6: 20})
    assert run.removed[3:] == [("m", 6)]


def test_without_best_all_stay_and_what_cannot_be_decided_is_said() -> None:
    run = Run()
    each = callbacks.do_checkpoint("m")
    each.begin(run)
    epochs(each, {0: 50, 1: 70, 2: 60})
    assert run.removed == []
    with pytest.raises(kv.UsageError, match=r"do_checkpoint\(best='accuracy'\) looks at .*: pass eval_data"):
        callbacks.do_checkpoint("m", best="accuracy").begin(Run(evaluates=False))
    with pytest.raises(kv.UnknownName, match="mode='up' must be one of auto, max, min"):
        callbacks.do_checkpoint("m", best="accuracy", mode="up")
    lowest = callbacks.do_checkpoint("m", 2, best="accuracy", mode="min")
    lowest.begin(run)
    epochs(lowest, {0: 1, 1: 50, 3: 40, 5: 45})
    assert (lowest.best_epoch, run.removed) == (4, [("m", 2)])
    with pytest.raises(kv.UnknownName, match="no metric 'acc' to monitor"):
        epochs(callbacks_of(run, "acc"), {0: 1})


def callbacks_of(run: Run, best: str) -> callbacks.do_checkpoint:
    saving = callbacks.do_checkpoint("m", best=best)
    saving.begin(run)
    return saving


# ---- When training stops early


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


# ---- What the callbacks of a batch are told: a metric's value, by name or the first, and the worker's rank


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
