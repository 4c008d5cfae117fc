"""A trainer, and modules whose tables are in its store."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from joined import BOTH, SGD, close, loss_of, network, run
from recorded import Recorded
from safetensors.torch import load_model, save_model
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import Trainer
from workers.trainer.gradient_sync import ParameterLists
from workers.trainer.parameters import Parameter


@pytest.fixture
def parts() -> tuple[Recorded, workers.Embedding, nn.Linear]:
    store = Recorded()
    return store, workers.Embedding(5, 2, store=store, key="t", init="zeros"), nn.Linear(2, 1)


def trainer_of(store: Recorded, head: nn.Linear, **options: Any) -> Trainer:
    return Trainer(head.named_parameters(), "sgd", options, kvstore=store, update_on_kvstore=True)


def test_a_step_pushes_the_rows_that_backward_has_touched(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=0.1)
    for ids in ([1, 2], [], [1]):
        trainer.zero_grad()
        head(module(ids) if ids else torch.ones(1, 2)).sum().backward()
        assert store.names() == (["pull"] if ids else [])
        trainer.step()
        assert store.calls == [("push", {"t": len(ids)}, {})]
        store.calls.clear()
    assert store.table_statistics("t")["version"] == 3


@pytest.mark.parametrize("updates", [True, False])
def test_rows_are_divided_by_the_batch_size_as_arrays_are(updates: bool) -> None:
    store = Recorded(learning_rate=1.0, rescale_grad=1.0 if updates else 0.5)
    module, dense = workers.Embedding(5, 1, store=store, key="t", init="zeros"), nn.Parameter(torch.zeros(1))
    trainer = Trainer(
        {"dense": dense}, "sgd", {"lr": 1.0, "rescale_grad": 0.5}, kvstore=store, update_on_kvstore=updates or "auto"
    )
    moved = 0.0
    for size in (8, 3, None, 16):
        trainer.zero_grad()
        (module([1] * 6).sum() + 6 * dense.sum()).backward()
        trainer.step(size)
        moved -= 0.5 * 6 / (size or 1)
        assert dense.item() == pytest.approx(moved)
        assert torch.equal(module([1])[0].detach(), dense.detach())
    with trainer.no_sync():
        (module([1]).sum() + dense.sum()).backward()
    assert store.rescale_grad == (0.5 / 16 if updates else 0.5)  # the program's own pushes are as before


def test_backward_passes_of_a_step_add_up(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=1.0)
    with trainer.no_sync():
        (module([1]).sum() + head(torch.ones(1, 2)).sum()).backward()
    (module([1]).sum() + head(torch.ones(1, 2)).sum()).backward()
    module.flush()  # the step knows better
    assert "push" not in store.names()
    trainer.step(4)
    assert store.names() == ["push"]
    assert module([1]).tolist() == [[-0.5] * 2]


@pytest.mark.parametrize("by", ["trainer", "optimizer", "model"])
def test_gradients_that_are_dropped_are_those_of_rows_too(by: str) -> None:
    store = Recorded()
    model = nn.ModuleDict(
        {"table": workers.Embedding(5, 2, store=store, key="t", init="zeros"), "head": nn.Linear(2, 1)}
    )
    module, head = model["table"], model["head"]
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 1.0}, kvstore=store, update_on_kvstore=True)
    head(module(torch.tensor([1]))).sum().backward()  # of a step that is skipped, for its gradients are not finite
    {"trainer": trainer, "optimizer": trainer.optimizer, "model": model}[by].zero_grad()
    (module(torch.tensor([2])).sum() + head(torch.ones(1, 2)).sum()).backward()
    trainer.step()
    assert module(torch.tensor([1, 2])).tolist() == [[0, 0], [-1, -1]]


def test_rows_with_a_factor_of_their_own_keep_it() -> None:
    store = Recorded()
    module = workers.Embedding(5, 1, store=store, key="t", init="zeros", rescale_grad=0.25)
    head = nn.Linear(1, 1)
    trainer = trainer_of(store, head, learning_rate=1.0)
    (module([1]).sum() + head(torch.ones(1, 1)).sum()).backward()
    trainer.step(8)
    assert module([1]).item() == -0.25


def test_a_store_without_an_optimizer_only_reads_its_tables() -> None:
    store, head = kv.create("local"), nn.Linear(2, 1)
    module = workers.Embedding(5, 2, store=store, key="t", init="zeros").eval()
    trainer = Trainer(head.named_parameters(), "sgd", {"lr": 1.0}, kvstore=store)
    assert not trainer.update_on_kvstore
    head(module([1])).sum().backward()
    trainer.step()


def test_a_trainer_that_has_gone_leaves_pushes_to_backward(
    parts: tuple[Recorded, workers.Embedding, nn.Linear],
) -> None:
    store, module, head = parts
    trainer = Trainer(head.parameters(), "sgd", {"lr": 1.0}, kvstore=store)  # which updates alone
    module([1]).sum().backward()
    assert store.names() == ["pull"]
    del trainer
    gc.collect()
    module([1]).sum().backward()
    assert store.names() == ["pull", "push"]


def test_its_no_sync_is_for_the_tables_too(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=0.1)
    with trainer.no_sync():
        module([1]).sum().backward()
        head(module([2])).sum().backward()
    assert store.table_statistics("t")["version"] == 0
    trainer.step()
    assert store.table_statistics("t")["version"] == 1
    assert module([1]).tolist() == [[pytest.approx(-0.1)] * 2]


def test_its_learning_rates_are_the_tables_too(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, lr_scheduler=lambda update: float(update))
    before = 0.0
    for update in (1, 2, 3):
        (head(torch.ones(1, 2)).sum() + module([1]).sum()).backward()
        trainer.step()
        after = module([1])[0, 0].item()
        assert before - after == pytest.approx(update)
        before = after


# ---- What a Trainer gives to its store: keys, weights and gradients in one order


def parameters(devices: int) -> list[Parameter]:
    return [
        Parameter(key, tuple(nn.Parameter(torch.full((2,), float(device))) for device in range(devices)))
        for key in ("a", "b", "c")
    ]


def test_one_device_gives_tensors_and_several_give_lists() -> None:
    one, two = parameters(1), parameters(2)
    weights = ParameterLists(one, None).weights()
    assert all(weight is param.tensors[0] for weight, param in zip(weights, one, strict=True))
    assert ParameterLists(two, None).weights() == [list(param.tensors) for param in two]


def test_positions_that_are_left_out_are_left_out_of_all_lists() -> None:
    params = parameters(1)
    for number in (0, 2):
        params[number].tensors[0].grad = torch.full((2,), float(number))
    lists = ParameterLists(params, None)
    assert lists.keys() == ["a", "b", "c"]
    assert lists.keys([1]) == ["a", "c"]
    assert len(lists.weights([1])) == 2
    assert [grad.tolist() for grad in lists.gradients([1])] == [[0, 0], [2, 2]]
    with pytest.raises(kv.UsageError, match="parameter 'b' has no gradient"):
        lists.gradients()


def test_zero_grad_drops_gradients_or_zeroes_those_in_the_stores_memory() -> None:
    params = parameters(1)
    tensor = params[0].tensors[0]
    tensor.grad = torch.ones(2)
    ParameterLists(params, None).zero_grad()
    assert tensor.grad is None
    lists = ParameterLists(params, kv.create("local"))
    lists.zero_grad()
    assert tensor.grad is not None
    memory = tensor.grad.data_ptr()
    tensor.grad.add_(1)
    lists.zero_grad()
    assert (tensor.grad.data_ptr(), tensor.grad.tolist()) == (memory, [0, 0])


# ---- Parameters whose data is the store's memory, as files of weights have them


def test_a_model_with_shared_weights_is_saved_as_any_other(pair: ThreadedJob, tmp_path: Path) -> None:
    def work(store: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(2, 2, dtype=torch.bfloat16))
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store, share_weights=True)
        for _ in range(2):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            trainer.step()
            trainer.zero_grad()
        before = [parameter.data_ptr() for parameter in model.parameters()]
        whole = model[0].weight.untyped_storage().nbytes()
        assert whole > model[0].weight.nbytes  # else this test shows nothing
        path = tmp_path / f"model-{store.rank}"
        save_model(model, str(path))
        again = copy.deepcopy(model)
        nn.init.zeros_(again[0].weight)
        load_model(again, str(path))
        for own, loaded in zip(model.parameters(), again.parameters(), strict=True):
            assert own.untyped_storage().nbytes() == own.nbytes
            assert torch.equal(own, loaded)
        assert [parameter.data_ptr() for parameter in model.parameters()] == before  # nothing was copied

    pair.run(work)


@pytest.mark.parametrize("given", ["groups", "wait"])
def test_a_trainer_finds_the_model_of_its_parameters(pair: ThreadedJob, given: str) -> None:
    def work(store: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        params: Any = [{"params": model.parameters()}] if given == "groups" else dict(model.named_parameters())
        wait = model if given == "wait" else None
        trainer = Trainer(params, "sgd", {"lr": 0.1}, kvstore=store, share_weights=True, wait_in_forward=wait)
        model(torch.ones(1, 3)).sum().backward()
        trainer.step()
        state = model.state_dict()
        assert {value.untyped_storage().nbytes() == value.nbytes for value in state.values()} == {True}

    pair.run(work)


# ---- Gradients of several backward passes, and tied weights


@BOTH
def test_gradients_accumulate(pair: ThreadedJob, update_on_kvstore: bool) -> None:
    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        first, middle = 6 * store.rank, 6 * store.rank + 3
        for step in range(4):
            trainer.zero_grad()
            with trainer.no_sync():
                (loss_of(model, step, slice(first, middle)) / 2).backward()
            (loss_of(model, step, slice(middle, middle + 3)) / 2).backward()
            trainer.step()

    theirs = network()
    optimizer = torch.optim.SGD(theirs.parameters(), **SGD)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        optimizer.step()
    close(run(pair, work), theirs)


@BOTH
def test_tied_weights_are_one_key_under_both_names(pair: ThreadedJob, update_on_kvstore: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            nn.init.eye_(self.one.weight)

    models = [Tied(), Tied()]

    def work(store: DistStore) -> int:
        model = models[store.rank]
        named = model.named_parameters(remove_duplicate=False)
        options = {"lr": 1.0, "lr_mult": {"two.weight": 0.5}}
        trainer = Trainer(named, "sgd", options, store, update_on_kvstore)
        model.two(model.one(torch.ones(3))).sum().backward()
        trainer.step(2)
        return store.statistics().keys

    assert pair.run(work) == [1, 1]
    assert torch.allclose(models[0].one.weight, torch.eye(3) - 0.5 * 2)
    assert models[1].two.weight is models[1].one.weight
