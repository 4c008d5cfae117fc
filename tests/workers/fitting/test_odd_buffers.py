"""Buffers that are no ordinary arrays of floats, through a whole fit: first values, averages, checkpoints, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CLASSES, FEATURES, SGD, loader, run
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from workers import Checkpoint, Reducer, callbacks, fit
from workers.common.tensors import fingerprint

LOW = torch.finfo(torch.float32).min


class Odd(nn.Module):
    """A linear model with a frozen layer; its buffers change in no step, except for those of the norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.norm = nn.BatchNorm1d(FEATURES)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.1 + seed)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, LOW, float("-inf")]))
        for name, tensor in odd_tensors(seed).items():
            self.register_buffer(name.replace(" ", "_").replace(",", ""), tensor)
        self.register_buffer("own", torch.arange(3) + seed, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(x)))  # type: ignore[no-any-return]


def prints(model: nn.Module) -> dict[str, int]:
    named = {**dict(model.named_buffers()), "frozen": model.frozen.weight}  # type: ignore[union-attr]
    return {name: fingerprint(tensor) for name, tensor in named.items() if not name.startswith("norm")}  # type: ignore[arg-type]


def test_every_worker_trains_with_rank_zeros_and_constants_stay(cluster: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        model = Odd(store.rank)
        fit(model, loader(8, 4), num_epoch=2, kvstore=store, reducer=reducer, optimizer_params=SGD)
        assert prints(model) == prints(Odd(0))

    run(cluster, work)


def test_with_diloco_too(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        model = Odd(store.rank)
        how: dict[str, Any] = {"kvstore": store, "reducer": reducer, "optimizer_params": SGD}
        fit(model, loader(8, 4), num_epoch=2, diloco={"inner_steps": 2}, **how)
        assert prints(model) == prints(Odd(0))

    run(pair, work)


@pytest.mark.parametrize("kvstore", [None, "local"])
def test_one_process(kvstore: str | None) -> None:
    model = Odd(3)
    fit(model, loader(8, 4), loader(4, 4), num_epoch=1, kvstore=kvstore, optimizer_params=SGD)
    assert prints(model) == prints(Odd(3))


def test_several_devices() -> None:
    model = Odd(3)
    fit(model, loader(8, 4), num_epoch=1, kvstore="device", devices=["cpu", "cpu"], optimizer_params=SGD)
    assert prints(model) == prints(Odd(3))
    assert model.norm.running_mean is not None
    assert torch.isfinite(model.norm.running_mean).all()


def test_a_checkpoint_has_them(tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")
    fit(
        *(Odd(3), loader(8, 4)),
        num_epoch=1,
        optimizer_params=SGD,
        epoch_end_callback=callbacks.do_checkpoint(prefix),
    )
    again = Odd(0)
    fit(again, loader(8, 4), num_epoch=2, optimizer_params=SGD, resume=Checkpoint(prefix, 1))
    assert prints(again) == prints(Odd(3))
    alone = Odd(0)
    Checkpoint(prefix, 1).load_weights(alone)
    assert {name: value for name, value in prints(alone).items() if name != "own"} == {
        name: value for name, value in prints(Odd(3)).items() if name != "own"
    }
