"""The modules in jobs of two workers, and rows that are fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorded
from threaded import ThreadedJob, shared_job
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import Trainer

# ---- the modules in jobs of two workers: as one process with all samples; lookahead; uneven workers; whole tables


STEPS = 6


cluster = shared_job(workers=2, servers=2)


class Recommender(nn.Module):
    """Scores of pairs of an item and a bag of users' ids."""

    def __init__(self, store: Any, optimizer: str | None = "adam") -> None:
        super().__init__()
        if optimizer is not None:
            store.set_optimizer(optimizer, learning_rate=0.05)
        self.item = workers.Embedding(30, 4, store=store, key="item", scale=0.5)
        self.user = workers.EmbeddingBag(None, 4, store=store, key="user", scale=0.5, mode="sum")
        self.head = nn.Linear(4, 1)
        with torch.no_grad():  # not at random: workers are threads here
            self.head.weight.copy_(torch.tensor([[0.5, -0.25, 0.75, -1.0]]))
            self.head.bias.zero_()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.item(batch[:, 0]) * self.user(batch[:, 1:] * 10**10))
        return scores


def batches(rank: int | None, steps: int = STEPS) -> list[torch.Tensor]:
    """All samples of each step, or those of one of two workers."""
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randint(0, 30, (8, 3), generator=generator) for _ in range(steps)]
    return whole if rank is None else [batch[rank::2] for batch in whole]


def ahead(model: Recommender, data: Any) -> Any:
    return workers.lookahead(
        data, {model.item: lambda batch: batch[:, 0], model.user: lambda batch: batch[:, 1:] * 10**10}
    )


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    target = (batch.sum(1, keepdim=True) % 2).float()
    return nn.functional.binary_cross_entropy_with_logits(model(batch), target)


def train(store: Any, rank: int | None, lookahead: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train tables and head in one store; return all that the model has."""
    model = Recommender(store, None)
    trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store, **options)
    data = batches(rank)
    for batch in ahead(model, data) if lookahead else data:
        trainer.zero_grad()
        loss_of(model, batch).backward()
        trainer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return train(kv.create("local"), None, update_on_kvstore=True)


def test_two_workers_are_as_one_with_all_samples(cluster: ThreadedJob, alone: dict[str, torch.Tensor]) -> None:
    first, second = cluster.run(lambda store: train(store, store.rank))
    assert equal(first, second)
    assert first["user.ids"].tolist() == alone["user.ids"].tolist()
    for name in alone:
        torch.testing.assert_close(first[name], alone[name], rtol=0, atol=2e-5)
    third, _ = cluster.run(lambda store: train(store, store.rank, lookahead=True))
    assert equal(first, third)


def test_workers_with_fewer_batches_or_without_tables_in_a_step(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> dict[str, torch.Tensor]:
        model = Recommender(store, None)
        trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store)
        for _ in range(2):
            for number, batch in enumerate(ahead(model, batches(store.rank)[: 3 + 2 * store.rank])):
                trainer.zero_grad()
                if number == 1 and store.rank == 0:
                    model.head(torch.ones(1, 4)).sum().backward()
                else:
                    loss_of(model, batch).backward()
                trainer.step()
            trainer.join()
        state: dict[str, torch.Tensor] = model.state_dict()
        return state

    assert equal(*cluster.run(work))


def test_rank_0_loads_for_all(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> dict[str, torch.Tensor]:
        model = Recommender(store)
        state = {
            "item.weight": torch.full((30, 4), 5.0 + store.rank),
            "user.ids": torch.tensor([3, 2**50]),
            "user.rows": torch.full((2, 4), 7.0 + store.rank),
            **model.head.state_dict(prefix="head."),
        }
        model.load_state_dict(state)
        loaded: dict[str, torch.Tensor] = model.state_dict()
        return loaded

    first, second = cluster.run(work)
    assert equal(first, second)
    assert first["item.weight"].unique().tolist() == [5]
    assert (first["user.ids"].tolist(), first["user.rows"].unique().tolist()) == ([3, 2**50], [7])


@pytest.mark.parametrize("stale", [0, 1])
def test_asynchronous_workers_find_the_signal(cluster: ThreadedJob, stale: int) -> None:
    def work(store: DistStore) -> tuple[float, float]:
        model = Recommender(store)
        (batch,) = batches(store.rank, 1)
        before = float(loss_of(model.eval(), batch).detach())
        model.train()
        for each in workers.lookahead([batch] * 30, {model.item: lambda batch: batch[:, 0]}, stale=stale):
            loss_of(model, each).backward()
        store.barrier()
        return before, float(loss_of(model.eval(), batch).detach())

    for before, after in cluster.run(work, mode="async"):
        assert after < 0.7 * before


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_divide_rows_by_their_batch_size_as_they_do_arrays(cluster: ThreadedJob, mode: str) -> None:
    def work(store: DistStore) -> list[float]:
        dense, rows = nn.Parameter(torch.zeros(1)), workers.Embedding(4, 1, store=store, key="rows", init="zeros")
        trainer = Trainer({"dense": dense}, "sgd", {"lr": 1.0, "rescale_grad": 0.5}, kvstore=store)
        for size in (16, 3, None):
            trainer.zero_grad()
            with trainer.no_sync():
                (rows(torch.ones(5, dtype=torch.long)).sum() + 5 * dense.sum()).backward()
            (rows(torch.ones(3, dtype=torch.long)).sum() + 3 * dense.sum()).backward()
            trainer.step(size)
        store.barrier()
        with torch.no_grad():
            row = rows(torch.tensor([1])).item()
        store.pull("dense", dense)
        assert row == dense.item()
        return [row]

    first, second = cluster.run(work, mode=mode)
    assert first == second == [pytest.approx(-0.5 * 16 * (1 / 16 + 1 / 3 + 1 / 2), abs=1e-5)]


def test_workers_must_freeze_the_same_tables(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> tuple[int, int]:
        store.set_optimizer("sgd", learning_rate=1.0)
        first, second = (workers.Embedding(4, 1, store=store, key=key, init="zeros") for key in "ab")
        for step in range(4):
            first.requires_grad_(step == 0)
            (first([1]).sum() + second([1]).sum()).backward()
        assert [first([1]).item(), second([1]).item()] == [-1, -4]
        versions = tuple(store.table_statistics(key)["version"] for key in "ab")
        second.requires_grad_(store.rank > 0)
        first.requires_grad_(True)

        def meet() -> None:
            (first([1]).sum() + second([1]).sum()).backward()
            store.close()  # which waits for the round

        with pytest.raises(kv.Mismatch, match=r"rescale_grad .* round of 'b': 0 \(frozen there\) on worker 0, 0.5 on"):
            meet()
        return versions

    assert cluster.run(work) == [(2, 4), (2, 4)]  # each change of what is frozen is one round


def test_rows_that_another_worker_has_replaced_before_a_barrier_are_pulled_again(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        store.set_optimizer("sgd", learning_rate=1.0)
        module = workers.Embedding(4, 1, store=store, key="rows", init="zeros")
        seen = []
        for step, batch in enumerate(workers.lookahead([torch.tensor([1])] * 3, {module: lambda batch: batch})):
            if step == 1:
                store.barrier()
                if store.rank == 0:
                    store.put_rows("rows", kv.RowSparse([1], torch.full((1, 1), 5.0)))
                store.barrier()
            rows = module(batch)
            seen.append(rows.item())
            rows.sum().backward()
        return seen

    assert cluster.run(work) == [[0, 5, 4]] * 2


# ---- prefetching


BATCHES = [torch.randint(0, 12, (size,), generator=torch.Generator().manual_seed(size)) for size in (6, 3, 8, 5)]


def bag(store: Recorded, key: str = "t", **options: Any) -> workers.Embedding:
    return workers.Embedding(12, 2, store=store, key=key, **options)


def trained(module: workers.Embedding, batches: Any) -> torch.Tensor:
    for batch in batches:
        module(batch).square().sum().backward()
    return module.state_dict()["weight"]


def looked_ahead(module: workers.Embedding, **options: Any) -> Any:
    return workers.lookahead(BATCHES, {module: lambda batch: batch}, **options)


def test_rows_are_those_that_a_pull_would_give() -> None:
    store, plain = Recorded("adam"), Recorded("adam")
    module = bag(store)
    assert torch.equal(trained(module, looked_ahead(module)), trained(bag(plain), BATCHES))
    assert store.names() == ["pull", "pushpull", "pushpull", "pushpull", "push"]
    assert plain.names() == ["pull", "push"] * 4


def test_each_epoch_begins_anew() -> None:
    store = Recorded()
    module = bag(store)
    batches = looked_ahead(module)
    assert len(batches) == 4
    weights = [trained(module, batches) for _ in range(2)]
    plain = bag(Recorded())
    assert torch.equal(weights[1], [trained(plain, BATCHES) for _ in range(2)][1])
    assert store.names() == ["pull", "pushpull", "pushpull", "pushpull", "push"] * 2


def test_several_modules_share_messages() -> None:
    store = Recorded()
    first, second = bag(store, "a"), bag(store, "b")
    for batch in workers.lookahead(BATCHES[:2], {first: lambda batch: batch, second: lambda batch: batch % 3}):
        (first(batch).sum() + second(batch % 3).sum()).backward()
    unique = [len(batch.unique()) for batch in BATCHES[:2]]
    small = [len((batch % 3).unique()) for batch in BATCHES[:2]]
    assert store.calls == [
        ("pull", {}, {"a": unique[0], "b": small[0]}),
        ("pushpull", {"a": unique[0], "b": small[0]}, {"a": unique[1], "b": small[1]}),
        ("push", {"a": unique[1], "b": small[1]}, {}),
    ]


def test_modules_of_two_stores() -> None:
    stores = [Recorded(), Recorded()]
    first, second = bag(stores[0]), bag(stores[1])
    for batch in workers.lookahead(BATCHES, {first: lambda batch: batch, second: lambda batch: batch}):
        (first(batch) * second(batch)).sum().backward()
    assert [store.names() for store in stores] == [["pull", "pushpull", "pushpull", "pushpull", "push"]] * 2


def test_a_part_of_the_rows_and_others_beside_them() -> None:
    store = Recorded()
    module = bag(store)
    for batch in looked_ahead(module):
        (module(batch[:2]).sum() + module(torch.arange(12)).sum()).backward()
    assert store.names() == ["pull", "pull", "pushpull", "pull", "pushpull", "pull", "pushpull", "pull", "push"]
    plain = bag(Recorded())
    for batch in BATCHES:
        (plain(batch[:2]).sum() + plain(torch.arange(12)).sum()).backward()
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


def test_in_evaluation_rows_are_asked_for_one_batch_ahead() -> None:
    store = Recorded()
    module = bag(store).eval()
    seen = []
    for batch in looked_ahead(module):
        seen.append(len(store.calls))
        assert torch.equal(module(batch), module.state_dict()["weight"][batch])
    assert seen == [2, 3, 4, 4]
    assert store.names() == ["pull"] * 4


def test_evaluation_within_an_epoch_of_training() -> None:
    store, plain = Recorded(), bag(Recorded())
    module = bag(store)
    for step, batch in enumerate(looked_ahead(module)):
        module(batch).square().sum().backward()
        if step == 1:
            before = module.state_dict()["weight"]
            with torch.no_grad():
                for other in islice(looked_ahead(module), 2):
                    assert torch.equal(module(other), before[other])
    assert torch.equal(module.state_dict()["weight"], trained(plain, BATCHES))


def test_gradients_that_add_up_over_batches() -> None:
    module, plain = bag(Recorded()), bag(Recorded())
    for batches, each in ((looked_ahead(module), module), (BATCHES, plain)):
        for step, batch in enumerate(batches):
            if step % 2 == 0:
                with each.no_sync():
                    each(batch).square().sum().backward()
            else:
                each(batch).square().sum().backward()
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


def test_batches_that_are_not_trained_or_trained_twice() -> None:
    module, plain = bag(Recorded()), bag(Recorded())
    for batches, each in ((looked_ahead(module), module), (BATCHES, plain)):
        for step, batch in enumerate(batches):
            for _ in range(step % 3):
                each(batch).square().sum().backward()
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


def test_the_end_of_an_epoch_that_is_cut_short() -> None:
    store = Recorded()
    module, plain = bag(store), bag(Recorded())
    for each in (module, plain):
        trained(each, islice(looked_ahead(each) if each is module else BATCHES, 2))
        trained(each, BATCHES)
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


@pytest.mark.parametrize("stale", [1, 2, 9])
def test_stale_rows_lack_so_many_updates(stale: int) -> None:
    module = bag(Recorded())
    history = [module.state_dict()["weight"]]
    for step, batch in enumerate(looked_ahead(module, stale=stale)):
        rows = module(batch)
        assert torch.equal(rows, history[max(0, step - stale)][batch])
        rows.square().sum().backward()
        history.append(module.state_dict()["weight"])


def test_an_error_of_the_loader_or_of_the_loop() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield from BATCHES[:2]
        raise OSError("a disk")

    store = Recorded()
    module = bag(store)
    with pytest.raises(OSError, match="a disk"):
        trained(module, workers.lookahead(broken(), {module: lambda batch: batch}))
    with pytest.raises(kv.UsageError, match="id 12 at position 0"):
        trained(module, workers.lookahead([BATCHES[0], BATCHES[1], torch.tensor([12])], {module: lambda batch: batch}))
    before = module.state_dict()["weight"]
    assert torch.equal(module(BATCHES[0]), before[BATCHES[0]])


def test_rows_are_those_of_a_pull_after_whatever_changes_a_table(tmp_path: Path) -> None:
    data = [*BATCHES, BATCHES[0]]

    def change(store: Recorded, step: int) -> None:
        ids = data[step].unique()
        rows = kv.RowSparse(ids, torch.full((len(ids), 2), step + 1.0))
        if step == 1:
            store.push("t", rows)
        elif step == 2:
            store.put_rows("t", rows)
        elif step == 3:
            store.push("t", kv.RowSparse([99], torch.ones(1, 2)))
            store.push("t", kv.RowSparse([99], torch.ones(1, 2)))
            store.evict("t")
        elif step == 4:
            store.load_table("t", tmp_path)

    for stale in (0, 2):
        store = Recorded(learning_rate=1.0)
        module = workers.Embedding(None, 2, store=store, key="t", evict=kv.Unseen(rounds=1))
        store.push("t", kv.RowSparse(torch.arange(12), torch.ones(12, 2)))
        store.save_table("t", tmp_path).wait()
        for step, batch in enumerate(workers.lookahead(data, {module: lambda batch: batch}, stale=stale)):
            change(store, step)
            rows = module(batch)
            if step:
                assert torch.equal(rows, store.row_sparse_pull("t", row_ids=batch)), step
            rows.square().sum().backward()


def test_gradients_of_rows_that_a_load_has_replaced_go_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Recorded(learning_rate=1.0)
    module = bag(store, init="zeros")
    store.put_rows("t", kv.RowSparse(torch.arange(12), torch.ones(12, 2)))
    store.save_table("t", tmp_path).wait()
    with module.no_sync():
        module([1]).sum().backward()
    before = module([2]).sum()
    store.load_table("t", tmp_path)
    (before + module([3]).sum()).backward()
    assert store.calls[-1] == ("push", {"t": 1}, {})
    assert module([1, 2, 3])[:, 0].tolist() == [1, 1, 0]
    assert "gradients of table 't' are dropped" in caplog.text
    before = module([2]).sum()
    module.load_state_dict({"weight": torch.ones(12, 2)})
    before.backward()
    assert module([2]).tolist() == [[1, 1]]


def test_a_frozen_table_beside_one_that_is_trained() -> None:
    store = Recorded()
    first, second = bag(store, "a"), bag(store, "b")
    first.requires_grad_(False)
    for batch in workers.lookahead(BATCHES[:3], {first: lambda batch: batch, second: lambda batch: batch}):
        for each in (first, second):
            assert torch.equal(each(batch), store.row_sparse_pull(each.key, row_ids=batch))
        (first(batch) * second(batch)).sum().backward()
    assert store.names() == ["pull", "pushpull", "pull", "pushpull", "pull", "push"]
    second.requires_grad_(False)
    for batch in workers.lookahead(BATCHES[:3], {first: lambda batch: batch, second: lambda batch: batch}):
        assert not (first(batch) * second(batch)).requires_grad
    assert store.names() == ["pull"] * 3


def test_it_has_what_the_loader_has() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_size=4)
    module = bag(Recorded())
    batches = workers.lookahead(loader, {module: lambda batch: batch})
    assert (len(batches), batches.batch_size) == (3, 4)
    assert [len(batch) for batch in batches] == [4, 4, 2]


def test_what_is_refused() -> None:
    with pytest.raises(kv.UsageError, match=r"lookahead is for workers\.Embedding .* not for a Linear"):
        workers.lookahead([], {nn.Linear(1, 1): lambda batch: batch})
    with pytest.raises(kv.UsageError, match="stale"):
        looked_ahead(bag(Recorded()), stale=-1)


@pytest.mark.parametrize("options", [{}, {"stale": 2}])
def test_a_batch_that_is_read_ahead_is_not_used_for_a_sampler(options: dict[str, Any]) -> None:
    sampler = workers.SplitBatchSampler(12, 3)
    loader = torch.utils.data.DataLoader(torch.arange(12), batch_sampler=sampler)
    module = bag(Recorded("adam"))
    for used, batch in enumerate(workers.lookahead(loader, {module: lambda batch: batch}, **options), 1):
        assert sampler.state_dict()["epoch"] * 4 + sampler.state_dict()["taken"] == used
        module(batch).square().sum().backward()
    assert sampler.epoch == 1
