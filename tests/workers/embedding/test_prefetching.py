from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

import kvstore as kv
import workers

BATCHES = [torch.randint(0, 12, (size,), generator=torch.Generator().manual_seed(size)) for size in (6, 3, 8, 5)]


def bag(store: Recorded, key: str = "t", **options: Any) -> workers.Embedding:
    return workers.Embedding(12, 2, store=store, key=key, **options)


def train(module: workers.Embedding, batches: Any) -> torch.Tensor:
    for batch in batches:
        module(batch).square().sum().backward()
    return module.state_dict()["weight"]


def ahead(module: workers.Embedding, **options: Any) -> Any:
    return workers.lookahead(BATCHES, {module: lambda batch: batch}, **options)


def test_rows_are_those_that_a_pull_would_give() -> None:
    store, plain = Recorded("adam"), Recorded("adam")
    module = bag(store)
    assert torch.equal(train(module, ahead(module)), train(bag(plain), BATCHES))
    assert store.names() == ["pull", "pushpull", "pushpull", "pushpull", "push"]
    assert plain.names() == ["pull", "push"] * 4


def test_each_epoch_begins_anew() -> None:
    store = Recorded()
    module = bag(store)
    batches = ahead(module)
    assert len(batches) == 4
    weights = [train(module, batches) for _ in range(2)]
    plain = bag(Recorded())
    assert torch.equal(weights[1], [train(plain, BATCHES) for _ in range(2)][1])
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
    for batch in ahead(module):
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
    for batch in ahead(module):
        seen.append(len(store.calls))
        assert torch.equal(module(batch), module.state_dict()["weight"][batch])
    assert seen == [2, 3, 4, 4]
    assert store.names() == ["pull"] * 4


def test_evaluation_within_an_epoch_of_training() -> None:
    store, plain = Recorded(), bag(Recorded())
    module = bag(store)
    for step, batch in enumerate(ahead(module)):
        module(batch).square().sum().backward()
        if step == 1:
            before = module.state_dict()["weight"]
            with torch.no_grad():
                for other in islice(ahead(module), 2):
                    assert torch.equal(module(other), before[other])
    assert torch.equal(module.state_dict()["weight"], train(plain, BATCHES))


def test_gradients_that_add_up_over_batches() -> None:
    module, plain = bag(Recorded()), bag(Recorded())
    for batches, each in ((ahead(module), module), (BATCHES, plain)):
        for step, batch in enumerate(batches):
            if step % 2 == 0:
                with each.no_sync():
                    each(batch).square().sum().backward()
            else:
                each(batch).square().sum().backward()
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


def test_batches_that_are_not_trained_or_trained_twice() -> None:
    module, plain = bag(Recorded()), bag(Recorded())
    for batches, each in ((ahead(module), module), (BATCHES, plain)):
        for step, batch in enumerate(batches):
            for _ in range(step % 3):
                each(batch).square().sum().backward()
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


def test_the_end_of_an_epoch_that_is_cut_short() -> None:
    store = Recorded()
    module, plain = bag(store), bag(Recorded())
    for each in (module, plain):
        train(each, islice(ahead(each) if each is module else BATCHES, 2))
        train(each, BATCHES)
    assert torch.equal(module.state_dict()["weight"], plain.state_dict()["weight"])


@pytest.mark.parametrize("stale", [1, 2, 9])
def test_stale_rows_lack_so_many_updates(stale: int) -> None:
    module = bag(Recorded())
    history = [module.state_dict()["weight"]]
    for step, batch in enumerate(ahead(module, stale=stale)):
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
        train(module, workers.lookahead(broken(), {module: lambda batch: batch}))
    with pytest.raises(kv.UsageError, match="id 12 at position 0"):
        train(module, workers.lookahead([BATCHES[0], BATCHES[1], torch.tensor([12])], {module: lambda batch: batch}))
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
        ahead(bag(Recorded()), stale=-1)


@pytest.mark.parametrize("options", [{}, {"stale": 2}])
def test_a_batch_that_is_read_ahead_is_not_used_for_a_sampler(options: dict[str, Any]) -> None:
    sampler = workers.SplitBatchSampler(12, 3)
    loader = torch.utils.data.DataLoader(torch.arange(12), batch_sampler=sampler)
    module = bag(Recorded("adam"))
    for used, batch in enumerate(workers.lookahead(loader, {module: lambda batch: batch}, **options), 1):
        assert sampler.state_dict()["epoch"] * 4 + sampler.state_dict()["taken"] == used
        module(batch).square().sum().backward()
    assert sampler.epoch == 1
