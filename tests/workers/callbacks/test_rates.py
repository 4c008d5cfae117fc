"""Torch's schedulers as callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import SGD, loader, network, run, same_bits, state
from threaded import ThreadedJob
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import kvstore as kv
from workers import Checkpoint, Reducer, callbacks, fit


def _warm(optimizer: torch.optim.Optimizer) -> Any:
    first, second = LambdaLR(optimizer, lambda done: 0.1 * (1 + done)), ExponentialLR(optimizer, 0.9)
    return SequentialLR(optimizer, [first, second], [3])


def _with_a_tensor(optimizer: Any) -> Any:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    return ExponentialLR(optimizer, 0.9)


SCHEDULERS: dict[str, tuple[str, Any]] = {
    "by epoch": ("epoch", lambda optimizer: StepLR(optimizer, 1, 0.5)),
    "milestones": ("batch", lambda optimizer: MultiStepLR(optimizer, [4, 9])),
    "with momentum": ("batch", lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=15)),
    "cosine": ("batch", lambda optimizer: CosineAnnealingLR(optimizer, 15)),
    "one after another": ("batch", _warm),
    "a tensor, whose roundings are its own": ("batch", _with_a_tensor),
    "plateau": ("eval", lambda optimizer: ReduceLROnPlateau(optimizer, "max", patience=0)),
}


@pytest.mark.parametrize("which", SCHEDULERS)
@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (1, 2)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step")  # torch 2.5's SequentialLR, in itself
def test_torchs_schedulers_go_on_to_the_bit(
    pair: ThreadedJob, tmp_path: Path, which: str, epoch: int, batch: int
) -> None:
    """Shares are uneven: 5 batches and 3."""
    prefix = str(tmp_path / "model")
    moment, make = SCHEDULERS[which]
    models = {(rank, again): network(seed=rank + 2 * again) for rank in (0, 1) for again in (False, True)}

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, rates = models[store.rank, resume is not None], []
        data = loader(20 if store.rank == 0 else 12, 4)

        def note(at: Any, *_: Any) -> None:
            rates.append((getattr(at, "epoch", at), float(scheduler.scheduler.optimizer.param_groups[0]["lr"])))

        scheduler = callbacks.TorchScheduler(make)
        called: dict[str, list[Any]] = {"batch": [], "epoch": [], "eval": []}
        if resume is None:  # first in their lists, and yet called last
            called["epoch"].append(callbacks.do_checkpoint(prefix))
            called["batch"].append(callbacks.do_batch_checkpoint(prefix, 2))
        called[moment].append(scheduler)
        called["eval" if moment == "eval" else "epoch"].append(note)  # behind the scheduler
        fit(
            *(model, data, data),
            num_epoch=3,
            kvstore=store,
            reducer=reducer,
            optimizer_params=SGD,
            resume=resume,
            **{f"{moment}_end_callback": its for moment, its in called.items()},
        )
        return state(model), rates

    whole = run(pair, work)
    resumed = run(pair, lambda *stores: work(*stores, resume=Checkpoint(prefix, epoch, batch)))
    assert whole[0][1] == whole[1][1]
    assert len({rate for _, rate in whole[0][1]}) > 1
    for (first, rates), (second, later) in zip(whole, resumed, strict=True):
        assert same_bits(first, second)
        assert rates[epoch:] == later


def test_what_is_no_scheduler_for_fit() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(kv.UsageError, match=r"TorchScheduler takes a function .*, not StepLR"):
        callbacks.TorchScheduler(StepLR(optimizer, 3))  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="must return a scheduler, not a NoneType"):
        fit(network(), loader(8, 4), num_epoch=1, epoch_end_callback=callbacks.TorchScheduler(lambda _: None))
    plateau = callbacks.TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer))
    with pytest.raises(kv.UsageError, match="ReduceLROnPlateau needs a metric: pass it as eval_end_callback"):
        fit(network(), loader(8, 4), num_epoch=1, epoch_end_callback=plateau)
    other = callbacks.TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer), monitor="f1")
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor"):
        fit(network(), loader(8, 4), loader(8, 4), num_epoch=1, eval_end_callback=other)
