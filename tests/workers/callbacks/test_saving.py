"""When checkpoints are saved."""

from __future__ import annotations

from callback_runs import Run, param

from workers import callbacks


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
