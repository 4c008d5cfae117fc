"""Who is called when."""

from __future__ import annotations

from typing import Any

import pytest
from fitted import loader, network
from torch import nn

from workers import fit
from workers.callbacks import BatchEndParam


def test_who_is_called_when_and_with_what() -> None:
    calls: list[Any] = []

    def batch(param: BatchEndParam) -> None:
        calls.append(("batch", param.epoch, param.nbatch, sorted(param.locals)))

    def eval_batch(param: BatchEndParam) -> None:
        calls.append(("eval batch", param.nbatch))
        assert not param.locals["model"].training

    def evaluated(param: BatchEndParam) -> None:
        assert param.eval_metric is not None
        calls.append(("eval", param.nbatch, param.eval_metric.get()[0]))

    def epoch(number: int, model: nn.Module, params: dict[str, Any], buffers: dict[str, Any]) -> None:
        calls.append(("epoch", number, sorted(params), sorted(buffers)))

    class Watching:
        def begin(self, run: Any) -> None:
            calls.append(("begin", run.num_batches))

        def __call__(self, param: BatchEndParam) -> None:
            pass

        def evaluated(self, param: BatchEndParam) -> None:
            calls.append(("evaluated", param.epoch))

        def end(self) -> None:
            calls.append("end")

    fit(
        network(batch_norm=False),
        loader(8, 4),
        loader(3, 2),
        "ce",
        begin_epoch=5,
        num_epoch=6,
        batch_end_callback=[batch, Watching()],
        eval_batch_end_callback=eval_batch,
        eval_end_callback=evaluated,
        epoch_end_callback=epoch,
    )
    names = ["loss", "model", "moment", "self", "trainer"]
    assert calls == [
        ("begin", 2),
        ("batch", 5, 0, names),
        ("batch", 5, 1, names),
        ("epoch", 5, ["0.bias", "0.weight", "3.bias", "3.weight"], []),
        ("eval batch", 0),
        ("eval batch", 1),
        ("eval", 2, "cross-entropy"),
        ("evaluated", 5),
        "end",
    ]


def test_callbacks_are_told_of_the_end_of_a_run_that_fails() -> None:
    ended = []

    class Watching:
        def __call__(self, param: BatchEndParam) -> None:
            raise RuntimeError("broken")

        def end(self) -> None:
            ended.append(True)

    with pytest.raises(RuntimeError, match="broken"):
        fit(network(), loader(8, 4), num_epoch=1, batch_end_callback=Watching())
    assert ended == [True]
