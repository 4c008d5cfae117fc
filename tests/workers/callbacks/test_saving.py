"""When checkpoints are saved."""

from __future__ import annotations

import pytest
from callback_runs import Run, param, right

import kvstore as kv
from workers import callbacks, metrics


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
