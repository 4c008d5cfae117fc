from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from recorded import Recorded
from torch import nn

import workers
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
