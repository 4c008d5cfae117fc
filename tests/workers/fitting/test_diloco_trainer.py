"""``fit`` with DiLoCo: what it trains, checkpoints to go on from, batches that are not even, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import FEATURES, go_on, loader, network, run, same_bits, state
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from workers import Checkpoint, CheckpointError, DiLoCo, Reducer, callbacks, fit

STREAMING = {"inner_steps": 4, "fragments": 2, "overlap": 3}
ADAM = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}}


def plain(store: kv.KVStore, model: nn.Module, data: Any, epochs: int, **options: Any) -> None:
    """What a loop with ``DiLoCo`` makes of the model."""
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    outer = DiLoCo(model, inner, store, **options)
    for epoch in range(epochs):
        data.sampler.set_epoch(epoch)
        for inputs, labels in data:
            inner.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            outer.step()
        outer.finish()


@pytest.mark.parametrize("options", [{"inner_steps": 4}, STREAMING], ids=["whole", "streaming"])
def test_it_is_the_plain_loop(pair: ThreadedJob, options: dict[str, Any]) -> None:
    def with_fit(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model = network(seed=store.rank, batch_norm=False)
        fit(model, loader(40, 4, 2, store.rank), num_epoch=2, kvstore=store, reducer=reducer, diloco=options, **ADAM)
        return state(model)

    def with_loop(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model = network(seed=store.rank, batch_norm=False)
        plain(store, model, loader(40, 4, 2, store.rank), 2, **options)
        return state(model)

    fitted, looped = run(pair, with_fit), run(pair, with_loop)
    assert same_bits(*fitted)
    for mine, theirs in zip(fitted, looped, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"compression_params": {"type": "int8"}}], ids=["plain", "int8"])
@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (1, 3), (1, 4)])
def test_it_goes_on_to_the_bit(pair: ThreadedJob, tmp_path: Path, how: dict[str, Any], epoch: int, batch: int) -> None:
    """At the end of an epoch; with both fragments on their way; and just when one leaves."""
    prefix = str(tmp_path / "model")

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, data = network(seed=7 if resume else store.rank), loader(40, 4, 2, store.rank)
        saving: dict[str, Any] = {
            "epoch_end_callback": callbacks.do_checkpoint(prefix),
            "batch_end_callback": callbacks.do_batch_checkpoint(prefix, max(batch, 1)),
        }
        history = fit(
            *(model, data, data),
            num_epoch=3,
            kvstore=store,
            reducer=reducer,
            resume=resume,
            diloco={**STREAMING, **how},
            **({} if resume else saving),
            **ADAM,
        )
        return state(model), history

    whole = run(pair, work)
    resumed = run(pair, lambda *stores: work(*stores, resume=Checkpoint(prefix, epoch, batch)))
    for (first, history), (second, later) in zip(whole, resumed, strict=True):
        assert same_bits(first, second)
        assert history[epoch:] == later
    names = {path.name for path in tmp_path.iterdir() if f"model-{epoch:04d}." in path.name}
    if not batch:
        expected = {"safetensors", "states", "worker.0", "worker.1", "inner.0", "inner.1"}
        assert names == {f"model-000{epoch}.{kind}" for kind in expected | ({"states.1"} if how else set())}


def test_workers_with_more_and_less_data(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> dict[str, torch.Tensor]:
        model, data = network(seed=store.rank, batch_norm=False), loader(28 if store.rank else 16, 4)
        fit(model, data, num_epoch=2, kvstore=store, reducer=reducer, diloco=STREAMING, **ADAM)
        return state(model)

    assert same_bits(*run(pair, work))


def test_alone_an_evaluation_sees_the_global_weights() -> None:
    """With an outer rate of 0 the global weights stay what they were."""
    model = network(batch_norm=False)
    before = state(model)
    fit(
        model,
        loader(8, 4),
        num_epoch=1,
        kvstore="local",
        diloco={"inner_steps": 3, "outer_optimizer": "sgd", "outer_params": {"lr": 0.0}},
    )
    assert same_bits(before, state(model))


def test_callbacks_reach_the_inner_optimizer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3)

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.layer(inputs)

    rates: list[float] = []
    fit(
        Model(),
        loader(8, 4),
        num_epoch=3,
        kvstore="local",
        optimizer_params={"learning_rate": 0.5},
        batch_end_callback=[lambda param: rates.append(param.locals["trainer"].learning_rate)],
        epoch_end_callback=callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1)),
        diloco={"inner_steps": 2},
    )
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.5 / 3, 0.5 / 3]


def files(prefix: Path) -> Checkpoint:
    fit(
        network(),
        loader(8, 4),
        num_epoch=1,
        diloco={"inner_steps": 2},
        epoch_end_callback=callbacks.do_checkpoint(str(prefix)),
    )
    return Checkpoint(str(prefix), 1)


def test_files_that_are_missing_or_of_another_run(tmp_path: Path, saved: Checkpoint) -> None:
    checkpoint = files(tmp_path / "model")
    with pytest.raises(kv.UsageError, match="has 1 fragments, but there are 2: use the settings of the run"):
        go_on(checkpoint, diloco={"inner_steps": 2, "fragments": 2}, optimizer_params=None)
    checkpoint.inner(0).unlink()
    with pytest.raises(CheckpointError, match=r"inner.0: missing; without it the inner optimizer cannot continue"):
        go_on(checkpoint, diloco={"inner_steps": 2}, optimizer_params=None)
    with pytest.raises(kv.UsageError, match="holds the states of sgd, but the optimizer is nag"):
        go_on(saved, diloco={"inner_steps": 2})


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"kvstore": None, "diloco": {}}, kv.UsageError, "diloco needs a store"),
        (
            {"diloco": {"inner_step": 3}},
            kv.UnknownName,
            "diloco has no argument 'inner_step'; choose from .*inner_steps",
        ),
        ({"diloco": {"kvstore": "local"}}, kv.UnknownName, "diloco has no argument 'kvstore'"),
        ({"diloco": {}, "overlap": False}, kv.UsageError, "diloco does not go with overlap"),
        ({"diloco": {}, "devices": ["cpu", "cpu"]}, kv.UsageError, "one device per process, and devices lists 2"),
        ({"diloco": {"inner_steps": 0}}, kv.UsageError, "inner_steps=0 must be an integer"),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], error: type[Exception], text: str) -> None:
    data: Iterable[Any] = loader(8, 4)
    with pytest.raises(error, match=text):
        fit(network(), data, num_epoch=1, **how)
