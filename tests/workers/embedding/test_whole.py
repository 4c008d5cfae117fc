"""Embeddings whose rows are read as a whole, and ones that are only read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from reading_job import KeyedJob, reader_of
from recorded import Recorded
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers.embedding import modules


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "CHUNK_BYTES", 24)  # three rows of two


def model(store: Recorded, rows: int | None = 7) -> nn.Sequential:
    table = workers.Embedding(rows, 2, store=store, key="t", padding_idx=1)
    return nn.Sequential(OrderedDict(table=table, head=nn.Linear(2, 1)))


def test_a_table_with_a_shape_is_a_weight() -> None:
    first, second = model(Recorded()), model(Recorded())
    first.table([0, 6]).sum().backward()
    state = first.state_dict()
    assert list(state) == ["table.weight", "head.weight", "head.bias"]
    assert torch.equal(state["table.weight"][[6, 0]], first.table([6, 0]))
    assert not state["table.weight"][1].any()
    second.load_state_dict(state)
    assert torch.equal(second.state_dict()["table.weight"], state["table.weight"])


def test_torch_has_the_same_names() -> None:
    torchs = nn.Sequential(OrderedDict(table=nn.Embedding(7, 2, padding_idx=1), head=nn.Linear(2, 1)))
    ours = model(Recorded())
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours.table([0, 1, 5]), torchs.table(torch.tensor([0, 1, 5])))
    torchs.load_state_dict(ours.state_dict())


def test_a_table_that_grows_is_ids_and_rows() -> None:
    first, second = model(Recorded(), None), model(Recorded(), None)
    ids = torch.tensor([2**60, -4, 7, 0])
    first.table(ids).sum().backward()
    state = first.state_dict()
    assert state["table.ids"].tolist() == [-4, 0, 7, 2**60]
    assert torch.equal(state["table.rows"][[3, 0, 2, 1]], first.table(ids))
    second.load_state_dict(state)
    assert torch.equal(second.table(ids), first.table(ids))
    assert second.table.store.table_statistics("t")["rows"] == 4


def test_what_does_not_fit() -> None:
    ours = model(Recorded())
    before = ours.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "table.weight"'):
        ours.load_state_dict({name: value for name, value in before.items() if name != "table.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "table.rows"'):
        ours.load_state_dict(before | {"table.rows": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"table 't' at table: its rows have the shape \(6, 2\), but should"):
        ours.load_state_dict(before | {"table.weight": torch.zeros(6, 2)})
    with pytest.raises(RuntimeError, match="row 1 is that of the padding"):
        ours.load_state_dict(before | {"table.weight": torch.ones(7, 2)})
    assert torch.equal(ours.state_dict()["table.weight"], before["table.weight"])
    ours.load_state_dict({}, strict=False)


# ---- a model is written once: trained with a store, and read with a reader, or with open tables


class Model(nn.Module):
    def __init__(self, store: Any) -> None:
        super().__init__()
        self.items = workers.Embedding(30, 4, store=store, key="item", padding_idx=0)
        self.history = workers.EmbeddingBag.of(self.items, mode="sum")
        self.users = workers.Embedding(None, 4, store=store, key="user", scale=0.5)
        self.head = nn.Linear(12, 1)

    def forward(self, item: torch.Tensor, history: torch.Tensor, user: torch.Tensor) -> Any:
        return self.head(torch.cat([self.items(item), self.history(history), self.users(user)], 1))


BATCH = torch.tensor([3, 0, 7]), torch.tensor([[1, 2], [0, 3], [9, 9]]), torch.tensor([2**60, -5, 1])
IDS: Any = [lambda batch: batch[0], lambda batch: batch[1], lambda batch: batch[2]]


def trained(store: kv.KVStore) -> Model:
    torch.manual_seed(0)
    model = Model(store)
    for _ in range(3):
        model(*BATCH).square().sum().backward()
    return model


def test_open_tables_serve_the_model_that_a_store_has_trained(tmp_path: Path) -> None:
    store = Recorded("sgd", learning_rate=0.1)
    model = trained(store)
    for key in ("item", "user"):
        store.save_table(key, tmp_path / key).wait()
    tables = {key: kv.open_table(tmp_path / key) for key in ("item", "user")}
    serving = Model(tables)
    assert set(serving.state_dict()) == {"head.weight", "head.bias"}
    assert serving.load_state_dict(model.state_dict()).missing_keys == []
    assert serving.load_state_dict(serving.state_dict()).missing_keys == []
    wanted = model(*BATCH)
    assert torch.equal(serving(*BATCH), wanted)
    ids = dict(zip([serving.items, serving.history, serving.users], IDS, strict=True))
    assert [torch.equal(serving(*batch), wanted) for batch in workers.lookahead([BATCH] * 2, ids)] == [True, True]
    serving(*BATCH).sum().backward()  # trains the rest: all its tables are frozen
    assert serving.head.weight.grad is not None
    assert serving.items.frozen
    model(*BATCH).square().sum().backward()
    store.save_table("item", tmp_path / "item").wait()
    assert tables["item"].update()
    assert torch.equal(serving.items(BATCH[0]), model.items(BATCH[0]))
    serving.items.requires_grad_()
    with pytest.raises(kv.Unsupported, match="only read cannot be trained"):
        serving(*BATCH).sum().backward()


def test_a_reader_serves_the_model_that_a_job_trains() -> None:
    with KeyedJob(workers=1, servers=2) as job:

        def work(store: DistStore) -> Any:
            store.set_optimizer("sgd", learning_rate=0.1)
            model = trained(store)
            with reader_of(job) as reader:
                serving = Model(reader)
                serving.load_state_dict(model.state_dict())
                return model(*BATCH).tolist(), serving(*BATCH).tolist()

        ((wanted, served),) = job.run(work)
    assert served == wanted


def test_tables_that_are_others_are_refused(tmp_path: Path) -> None:
    store = kv.create("local")
    store.init("item", kv.Table(shape=(30, 4)))
    store.save_table("item", tmp_path).wait()
    tables: Any = {"item": kv.open_table(tmp_path)}
    with pytest.raises(kv.Mismatch, match=r"for a table of float32\[31, 4\], but what is read there is .*\[30, 4\]"):
        workers.Embedding(31, 4, store=tables, key="item")
    with pytest.raises(kv.UsageError, match=r"no table 'user' among the ones to read: \['item'\]"):
        workers.Embedding(30, 4, store=tables, key="user")
    with pytest.raises(kv.UsageError, match=r"pass a reader, or a dict of what kvstore\.open_table returns"):
        workers.Embedding(30, 4, store={"item": tmp_path}, key="item")  # type: ignore[dict-item]
