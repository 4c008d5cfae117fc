"""nn.Embedding(sparse=True) under a Trainer, against torch with all samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.checkpoint.exported import export
from kvstore.checkpoint.folders import listed
from kvstore.client import DistStore
from kvstore.rule import Rule
from kvstore.sealed_folders import MANIFEST
from workers import Trainer

STEPS = 4
BOTH = pytest.mark.parametrize("on_store", [True, False], ids=["on the store", "in the worker"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(0)  # of its own: workers are threads here
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.head(self.bag(ids)))
        return scores


def ids_of(step: int, rank: int | None) -> torch.Tensor:
    ids = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(step))
    return ids if rank is None else ids[rank::2]


def backward(model: nn.Module, step: int, rank: int | None) -> None:
    (model(ids_of(step, rank)) - 1).square().mean().backward()


def torchs(steps: int = STEPS) -> Model:
    model = Model()
    sparse = torch.optim.SparseAdam(model.bag.parameters(), lr=0.05)
    dense = torch.optim.Adam([*model.head.parameters(), *model.out.parameters()], lr=0.05)
    for step in range(steps):
        model.zero_grad()
        backward(model, step, None)
        sparse.step()
        dense.step()
    return model


def trainer_of(model: Model, store: Any, **options: Any) -> Trainer:
    return Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store, **options)


def run(model: Model, trainer: Trainer, steps: range = range(STEPS), rank: int | None = None) -> Model:
    for step in steps:
        trainer.zero_grad()
        backward(model, step, rank)
        trainer.step()
    return model


def same(one: nn.Module, two: nn.Module, atol: float = 0.0) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {"store": None},
        {"store": "local", "update_on_kvstore": True},
        {"store": "device", "update_on_kvstore": True},
        {"store": "local", "update_on_kvstore": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_one_worker_does_as_torch_and_continues_from_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = Model()
    trainer = trainer_of(model, **options)
    same(run(model, trainer, range(2)), torchs(2), atol=1e-6)
    trainer.save_states(tmp_path / "states")
    again = Model()
    again.load_state_dict(model.state_dict())
    second = trainer_of(again, **options)
    second.load_states(tmp_path / "states")
    same(run(again, second, range(2, STEPS)), torchs(), atol=1e-6)


def test_parameters_by_number_and_on_two_devices() -> None:
    models = [Model(), Model()]
    trainer = Trainer(
        [list(model.parameters()) for model in models],
        "adam",
        {"learning_rate": 0.05},
        kvstore="device",
        update_on_kvstore=True,
    )
    for step in range(STEPS):
        trainer.zero_grad()
        for rank, model in enumerate(models):
            backward(model, step, rank)
        trainer.step()
    same(*models)
    same(models[0], torchs(), atol=1e-5)


@BOTH
@pytest.mark.parametrize("overlap", [False, True])
def test_two_workers_are_as_one(pair: ThreadedJob, on_store: bool, overlap: bool) -> None:
    def work(store: DistStore) -> Model:
        model = Model()
        if store.rank:
            nn.init.zeros_(model.bag.weight)
        return run(model, trainer_of(model, store, update_on_kvstore=on_store, overlap=overlap), rank=store.rank)

    first, second = pair.run(work)
    same(first, second)
    same(first, torchs(), atol=1e-5)


@BOTH
def test_steps_in_which_not_all_workers_have_a_gradient(pair: ThreadedJob, on_store: bool) -> None:
    def work(store: DistStore) -> Model:
        model = Model()
        trainer = trainer_of(model, store, update_on_kvstore=on_store)
        for step, reached in enumerate((store.rank == 1, False, store.rank == 0, True)):
            trainer.zero_grad()
            if reached:
                backward(model, step, store.rank)
            else:
                model.out(model.head(torch.ones(1, 4))).sum().backward()
            trainer.step(ignore_stale_grad=True)
        return model

    same(*pair.run(work))


def test_workers_with_fewer_batches(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> Model:
        model = Model()
        trainer = trainer_of(model, store)
        for _ in range(2):
            run(model, trainer, range(1 + 2 * store.rank), store.rank)
            trainer.join()
        return model

    same(*pair.run(work))


@pytest.mark.parametrize("rule", [Rule("async"), Rule("async", staleness=1), Rule(quorum=1)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_without_full_rounds_rows_are_pushed_and_the_whole_weight_comes_back(
    pair: ThreadedJob, rule: Rule, overlap: bool
) -> None:
    def work(store: DistStore) -> tuple[torch.Tensor, torch.Tensor]:
        model = Model()
        trainer = trainer_of(model, store, overlap=overlap)
        for step in range(STEPS):
            trainer.zero_grad()
            (model(ids_of(step, store.rank) % 20) - 1).square().mean().backward()
            trainer.step()
        store.barrier()
        pulled = torch.empty(30, 4)
        store.pull("bag.weight", pulled)
        return pulled, model.bag.weight.detach()

    (pulled, weight), (other, _) = pair.run(work, mode=rule.mode, rule=rule)
    assert torch.equal(pulled, other)
    for moved in (pulled, weight):
        assert torch.equal(moved[20:], Model().bag.weight.detach()[20:])
        assert (moved[:20] != Model().bag.weight.detach()[:20]).any()


def test_sums_of_sparse_gradients_need_full_rounds(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = Model()
        run(model, trainer_of(model, store, update_on_kvstore=False), rank=store.rank)

    with pytest.raises(kv.UsageError, match=r"gradient of 'bag.weight' is sparse, .* use workers.Embedding"):
        pair.run(work, rule=Rule(quorum=1))


def test_optimizers_without_a_rule_for_rows() -> None:
    model = Model()
    trainer = Trainer(model.named_parameters(), "rmsprop", kvstore=None)
    with pytest.raises(kv.KVStoreError, match="rmsprop"):
        run(model, trainer)


def test_sparse_gradients_are_not_clipped() -> None:
    model = Model()
    trainer = trainer_of(model, "local", update_on_kvstore=True)
    backward(model, 0, None)
    with pytest.raises(kv.Unsupported, match=r"that of 'bag.weight' is sparse"):
        trainer.clip_grad_norm_(1.0)


class Small(nn.Module):
    """Rows of which every batch reaches all, so that lazy updates are those of a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 2, mode="sum", sparse=sparse)
        self.head = nn.Linear(2, 1)
        generator = torch.Generator().manual_seed(1)
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def loss(self, step: int, rank: int | None = None) -> torch.Tensor:
        ids = torch.arange(24).remainder(6).view(12, 2) if step % 2 else torch.arange(24).view(12, 2).remainder(5)
        ids = torch.cat([ids, torch.full((12, 1), 5)], 1)
        chosen = ids if rank is None else ids[rank::2]
        loss: torch.Tensor = (self.head(self.bag(chosen)) - step).square().mean()
        return loss


BASE = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}
# By name: what the group of the table is given, what all are given, and what torch's group then has.
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lr": ({"lr": 0.2}, {}, {"lr": 0.2}),
    "wd": ({"wd": 0.5}, {}, {"weight_decay": 0.5}),
    "momentum": ({"momentum": 0.3}, {}, {"momentum": 0.3}),
    "lr_mult": ({"lr_mult": 3.0}, {}, {"lr": 0.15}),
    "wd_mult": ({"wd_mult": 20.0}, {}, {"weight_decay": 0.2}),
    "lr_mult of 0": ({"lr_mult": 0.0}, {}, {"lr": 0.0}),
    "lr_mult by name": ({}, {"lr_mult": {"bag.weight": 3.0}}, {"lr": 0.15}),
    "wd_mult by name": ({}, {"wd_mult": {"bag.weight": 0.0}}, {"weight_decay": 0.0}),
}


def dense_by_torch(of_group: dict[str, Any], doubled: bool = True) -> Small:
    model = Small(sparse=False)
    groups = [{"params": model.bag.parameters(), **of_group}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        if doubled and step == STEPS - 1:
            optimizer.param_groups[0]["lr"] *= 2
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
    return model


def said_to_a_trainer(
    model: Small, said: str, store: Any, *, on_store: Any, by_name: bool = True, rank: int | None = None
) -> Small:
    group, options, _ = SAID[said]
    bag: Any = model.bag.weight if not by_name else [("bag.weight", model.bag.weight)]
    head: Any = model.head.parameters() if not by_name else [(f"head.{n}", p) for n, p in model.head.named_parameters()]
    params = [{"params": bag, **group}, {"params": head}]
    if not by_name:  # keys are positions
        options = {name: {0: factors["bag.weight"]} for name, factors in options.items()}
    trainer = Trainer(params, "sgd", BASE | options, kvstore=store, update_on_kvstore=on_store)
    for step in range(STEPS):
        if step == STEPS - 1:
            trainer.optimizer.param_groups[0]["lr"] *= 2
        trainer.zero_grad()
        model.loss(step, rank).backward()
        trainer.step()
    return model


WHERE = [(None, "auto"), ("local", True), ("device", True), ("local", False)]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by number"])
def test_what_is_said_of_a_parameter_is_said_of_its_rows(said: str, by_name: bool) -> None:
    right = dense_by_torch(SAID[said][2])
    for store, on_store in WHERE:
        model = said_to_a_trainer(Small(sparse=True), said, store, on_store=on_store, by_name=by_name)
        same(model, right, atol=1e-5)


@BOTH
def test_what_is_said_of_a_parameter_is_said_of_its_rows_on_servers(pair: ThreadedJob, on_store: bool) -> None:
    for said in SAID:

        def work(store: DistStore, said: str = said) -> Small:
            return said_to_a_trainer(Small(sparse=True), said, store, on_store=on_store, rank=store.rank)

        first, second = pair.run(work)
        same(first, second)
        same(first, dense_by_torch(SAID[said][2]), atol=1e-5)


def one_step(store: Any, **options: Any) -> tuple[Small, Trainer]:
    model = Small(sparse=True)
    named = [("bag", model.bag.weight)]
    trainer = Trainer(named, "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=True, **options)
    model.loss(0).backward()
    trainer.step()
    return model, trainer


def pulled_by_its_name(store: Any) -> None:
    model, _ = one_step(store)
    whole, rows = torch.zeros(6, 2), torch.zeros(2, 2)
    store.pull("bag", whole)
    store.row_sparse_pull("bag", out=rows, row_ids=[4, 0])
    assert torch.equal(whole, model.bag.weight)
    assert torch.equal(rows, model.bag.weight[[4, 0]])
    with pytest.raises(kv.KVStoreError, match="'bag'"):
        store.push("bag", torch.ones(6, 2), wait=True)
    assert sum(len(page) for page in store.table_rows("bag")) == 6
    assert store.table_statistics("bag")["version"] == 1
    store.put_rows("bag", kv.RowSparse([3], torch.full((1, 2), 9.0), (6, 2)))
    store.pull("bag", whole)
    assert whole[3].tolist() == [9, 9]


def test_a_pull_by_the_name_of_a_parameter_gives_its_rows_of_now() -> None:
    pulled_by_its_name(kv.create("local"))
    with ThreadedJob(1, 2) as alone:
        alone.run(pulled_by_its_name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("on_store", [False, True])
def test_parameters_of_half_precision_are_updated_through_float32(dtype: torch.dtype, on_store: bool) -> None:
    embedding = nn.Embedding(4, 3, sparse=True, _weight=torch.full((4, 3), 256.0, dtype=dtype))
    trainer = Trainer(embedding.parameters(), "sgd", {"lr": 2.0**22}, kvstore="local", update_on_kvstore=on_store)
    ids = torch.tensor([1, *[2] * 1025])
    factors = torch.tensor([512.0, 4096.0, *[1.0] * 1024], dtype=dtype)  # in half precision the ones would be lost
    for _ in range(8):
        trainer.zero_grad()
        (embedding(ids) * factors[:, None]).sum().backward()
        trainer.step(2**34)  # divided by so much, float16 would be 0
    assert embedding.weight[:, 0].tolist() == [256, 255, 246, 256]


def not_finite(store: Any) -> None:
    model, trainer = one_step(store)
    trainer.zero_grad()
    (model.loss(0) * float("inf")).backward()
    with pytest.raises(kv.NotFinite, match=r"of (key )?'bag'"):
        trainer.step()


def test_messages_have_the_name_of_the_parameter() -> None:
    not_finite(kv.create("local", check_finite=True))
    with ThreadedJob(1, 1) as alone:
        alone.run(not_finite, rule=Rule(finite=True))
    model = Small(sparse=True)
    for numbered, name in ((model.parameters(), "0"), (model.named_parameters(), "'bag.weight'")):
        trainer = Trainer(numbered, "rmsprop", kvstore="local", update_on_kvstore=True)
        model.loss(0).backward()
        with pytest.raises(kv.UsageError, match=f"cannot update key {name}, a table"):
            trainer.step()


def resumable(steps: int, turned: bool) -> Callable[[DistStore], Small]:
    """A program of ``steps`` steps in all, with a checkpoint unless they are all; ``turned``, with another order."""

    def work(store: DistStore) -> Small:
        model = Small(sparse=True)
        named = list(model.named_parameters())
        options = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01, "lr_mult": {"bag.weight": 4.0}}
        trainer = Trainer(reversed(named) if turned else named, "sgd", options, kvstore=store)
        for step in range(trainer.num_update, steps):
            trainer.zero_grad()
            model.loss(step, store.rank).backward()
            trainer.step()
        if steps < STEPS:
            store.save_checkpoint(wait=True)
        return model

    return work


def job(directory: Path, work: Callable[[DistStore], Small], servers: int = 2, **more: Any) -> Small:
    with ThreadedJob(2, servers, checkpoint_dir=str(directory), **more) as made:
        first, second = made.run(work)
    same(first, second)
    return first


def before_tables_had_parameters(manifest: str) -> str:
    fields = json.loads(manifest)
    for store in fields["stores"]:
        store["tables"] = [[kind, described[:9]] for kind, described in store["tables"]]
    return json.dumps(fields)


def test_a_resumed_job_has_what_was_said_and_an_export_has_the_names(tmp_path: Path) -> None:
    right = dense_by_torch({"lr": 0.2}, doubled=False)
    model = job(tmp_path, resumable(2, turned=False))
    folder = listed(tmp_path)[-1].path
    export(folder, tmp_path / "plain.safetensors", states=True)
    plain = load_file(tmp_path / "plain.safetensors")
    assert {name for name in plain if "momentum" not in name} == {*model.state_dict(), "bag.weight.ids"}
    assert all(torch.equal(plain[name], value) for name, value in model.state_dict().items())
    assert plain["bag.weight.momentum_buffer"].shape == (6, 2)
    for turned in (False, True):
        again = job(tmp_path / f"{turned}", resumable(STEPS, turned), servers=3, checkpoint_resume=str(folder))
        same(again, right, atol=1e-5)
    manifest = folder / MANIFEST
    manifest.write_text(before_tables_had_parameters(manifest.read_text()))
    same(job(tmp_path / "old", resumable(STEPS, False), checkpoint_resume=str(folder)), right, atol=1e-5)
