"""What every worker has from rank 0 when a Trainer is made, and what is trained of parameters that are frozen first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer
from workers.common.tensors import fingerprint
from workers.trainer.parameters import buffers_beside

FREEZE = 3  # steps for which the first layer is frozen


def varied(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0 + rank)
    model[0].requires_grad_(False)
    model[1].running_mean.fill_(float(rank))  # type: ignore[operator, union-attr]
    model.register_buffer("mask", torch.arange(3) + rank, persistent=False)
    model.register_buffer("sparse", odd_tensors(rank)["csr"])
    model.register_buffer("few", odd_tensors(rank)["expanded"])
    return model


def prints(model: nn.Module) -> dict[str, int]:
    everything = [*model.named_parameters(), *model.named_buffers()]
    return {name: fingerprint(tensor) for name, tensor in everything}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("give", [lambda model: model.named_parameters(), lambda model: model.parameters()])
def test_every_worker_has_all_of_rank_zeros_model(
    cluster: ThreadedJob, give: Callable[[nn.Module], Any], mode: str
) -> None:
    def work(store: DistStore) -> None:
        model = varied(store.rank)
        Trainer(give(model), "sgd", {"lr": 0.1}, kvstore=store)
        assert prints(model) == prints(varied(0))

    cluster.run(work, mode=mode)


def test_a_dict_does_not_know_its_buffers_but_has_frozen_parameters(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[Any]:
        model = varied(store.rank)
        Trainer(dict(model.named_parameters()), "sgd", {"lr": 0.1}, kvstore=store)
        return [model[0].weight.tolist(), model.mask.tolist()]  # type: ignore[operator, union-attr, index]

    one, two = pair.run(work)
    assert one[0] == two[0]
    assert (one[1], two[1]) == ([0, 1, 2], [1, 2, 3])


def test_which_modules_are_known() -> None:
    model = varied(0)
    assert set(buffers_beside(model.named_parameters())[0]) == set(dict(model.named_buffers()))
    assert set(buffers_beside(model.parameters(recurse=False))[0]) == {"mask", "sparse", "few"}
    groups = [{"params": model[1].parameters()}, {"params": [model[2].weight]}]
    assert set(buffers_beside(groups)[0]) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert [len(one) for one in buffers_beside([varied(0).parameters(), varied(1).parameters()])] == [6, 6]
    assert buffers_beside(dict(model.named_parameters())) == buffers_beside(list(model.parameters())) == [{}]
    read = model.parameters()
    list(read)
    assert buffers_beside(read) == [{}]


def test_devices_of_one_process_get_the_buffers_and_frozen_parameters_of_the_first() -> None:
    models = [varied(0), varied(1)]
    Trainer([model.named_parameters() for model in models], "sgd", {"lr": 0.1}, kvstore="device")
    assert prints(models[0]) == prints(models[1]) == prints(varied(0))


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 1))
    generator = torch.Generator().manual_seed(0)  # torch's own is everybody's, and workers are threads here
    for param in model.parameters():
        nn.init.uniform_(param, -0.5, 0.5, generator=generator)
    return model


def train(model: nn.Module, step: Callable[[], object], part: slice, steps: int = 6, begin: int = 0) -> None:
    for number in range(begin, steps):
        model[0].requires_grad_(number >= FREEZE)  # type: ignore[index, union-attr]
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)
        model.zero_grad()
        (model(x[part]) - y[part]).pow(2).mean().backward()
        step()


def expected(steps: int = 6) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer.step, slice(None), steps)
    return model


def same(model: nn.Module, other: nn.Module) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index, union-attr]
    return model


SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"overlap": True, "update_on_kvstore": False},
        {"share_gradients": True, "share_weights": True},
        {"update_on_kvstore": False},
        "wait",
    ],
    ids=str,
)
@pytest.mark.parametrize("ignore", [False, True])
def test_what_is_unfrozen_is_trained(pair: ThreadedJob, options: Any, ignore: bool) -> None:
    def work(store: DistStore) -> None:
        model = frozen()
        more = {"wait_in_forward": model, "overlap": True} if options == "wait" else options
        trainer = Trainer(model.named_parameters(), "sgd", SGD, kvstore=store, **more)
        train(model, lambda: trainer.step(ignore_stale_grad=ignore), slice(store.rank, None, 2), 9)
        trainer.synchronize()
        same(model, expected(9))
        assert trainer.overlaps == ("overlap" in more)

    pair.run(work)


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_what_is_unfrozen_is_trained_alone_too(how: dict[str, Any]) -> None:
    model = frozen()
    trainer = Trainer(model.named_parameters(), "sgd", SGD, **how)
    train(model, trainer.step, slice(None))
    same(model, expected())


def test_the_norm_of_all_gradients_has_those_of_what_is_unfrozen(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = frozen()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, kvstore=store)

        def step() -> None:
            trainer.clip_grad_norm_(1e9)
            trainer.step()

        train(model, step, slice(store.rank, None, 2))
        same(model, expected())

    pair.run(work)


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_states_of_what_was_unfrozen_are_loaded_by_a_trainer_that_begins_frozen(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    model = frozen()
    trainer = Trainer(model.named_parameters(), "sgd", SGD, **how)
    train(model, trainer.step, slice(None), 5)
    trainer.save_states(tmp_path / "states")
    again = frozen()
    again.load_state_dict(model.state_dict())
    other = Trainer(again.named_parameters(), "sgd", SGD, **how)
    other.load_states(tmp_path / "states")
    train(again, other.step, slice(None), 6, begin=5)
    same(again, expected())


def test_a_frozen_parameter_may_be_loaded_before_it_is_trained(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        w, v = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Parameter(torch.zeros(2))
        trainer = Trainer({"w": w, "v": v}, "sgd", {"lr": 1.0}, kvstore=store)
        for step in range(2):
            w.data.fill_(5.0 + step)
            w.requires_grad_(step == 1)
            w.grad = torch.ones(2) if step else None
            v.grad = torch.ones(2)
            trainer.step()
        return [*w.tolist(), *v.tolist()]

    assert pair.run(work) == [[5, 5, -2, -2]] * 2


def test_nothing_of_what_is_frozen_is_in_the_store() -> None:
    store = kv.create("device")
    model = frozen()
    Trainer(model.named_parameters(), "sgd", SGD, kvstore=store, update_on_kvstore=True)
    assert store.statistics().keys == 2
