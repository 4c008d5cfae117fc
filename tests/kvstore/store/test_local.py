"""Stores in one process, besides what all stores do (``conformance/``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.errors import WeightsInDoubt
from kvstore.optim.optimizer import builtin, describe
from kvstore.optim.optimizer_class import OptimizerClass
from kvstore.rows.row_table import RowStates
from kvstore.store.local import LocalTables

NAMES = pytest.mark.parametrize("name", ["local", "device"])


@pytest.mark.parametrize("name", ["local", "device"])
def test_what_torch_refuses_is_the_callers_error(name: str) -> None:
    store = kv.create(name)
    with pytest.raises(kv.UsageError, match="sgd: Invalid learning rate: -1"):
        store.set_optimizer("sgd", learning_rate=-1)
    with pytest.raises(kv.UsageError, match="no optimizer is set"):
        _ = store.learning_rate


@pytest.mark.parametrize("name", ["local", "device"])
def test_a_local_store_has_one_option(name: str) -> None:
    with pytest.raises(kv.UnknownName, match="no option 'timeout'; choose from check_finite"):
        kv.create(name, timeout=3)


@NAMES
def test_an_updater_changes_the_value_and_an_optimizer_takes_its_place(name: str) -> None:
    store = kv.create(name)
    store.init("w", torch.zeros(2))
    seen: list[Any] = []

    def double(key: Any, pushed: Any, stored: Any) -> None:
        seen.append(key)
        stored += 2 * pushed

    store.set_updater(double)
    out = torch.empty(2)
    store.pushpull("w", [torch.ones(2), torch.ones(2)], out)
    assert (seen, out.tolist()) == (["w"], [4.0, 4.0])
    store.set_optimizer("sgd", learning_rate=1.0)
    store.pushpull("w", torch.ones(2), out)
    assert (seen, out.tolist()) == (["w"], [3.0, 3.0])
    store.set_updater(double)
    with pytest.raises(kv.UsageError, match="no optimizer is set"):
        store.set_learning_rate(0.1)


@NAMES
def test_an_update_leaves_the_callers_gradient_as_it_is(name: str) -> None:
    store = kv.create(name)
    store.init("w", torch.ones(3))
    store.set_optimizer("sgd", learning_rate=0.5, wd=0.1, rescale_grad=0.25, momentum=0.9)
    grad = torch.full((3,), 2.0)
    store.push("w", grad)
    assert grad.tolist() == [2.0, 2.0, 2.0]


@NAMES
def test_a_refused_push_changes_nothing(name: str) -> None:
    store = kv.create(name, check_finite=True)
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(kv.NotFinite, match="push 1 of 'b'"):
        store.push(["a", "b"], [torch.ones(2), torch.tensor([1.0, float("nan")])])
    out = torch.empty(2)
    store.pull("a", out)
    assert out.tolist() == [0.0, 0.0]
    assert store.statistics().pushes == 0


@NAMES
def test_states_of_other_keys_or_optimizers_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "states"
    one = kv.create(name)
    one.init("w", torch.zeros(2))
    one.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
    one.push("w", torch.ones(2))
    one.save_optimizer_states(path)
    other = kv.create(name)
    other.init("w", torch.zeros(2))
    with pytest.raises(kv.UsageError, match="no optimizer is set"):
        other.load_optimizer_states(path)
    other.set_optimizer("adam", learning_rate=0.1)
    with pytest.raises(kv.UsageError, match="holds the states of sgd, but the optimizer is adam"):
        other.load_optimizer_states(path)


@NAMES
def test_a_companion_sums_whatever_this_store_does(name: str) -> None:
    store = kv.create(name)
    store.set_optimizer("sgd", learning_rate=0.1)
    beside = store.companion()
    assert beside.type == name
    beside.init("n", torch.zeros(1))
    out = torch.empty(1)
    beside.pushpull("n", [torch.ones(1), torch.ones(1)], out)
    assert out.item() == 2.0


@NAMES
def test_a_closed_store_says_so(name: str) -> None:
    store = kv.create(name)
    store.init("w", torch.zeros(1))
    store.close()
    store.close()
    for call in (lambda: store.push("w", torch.ones(1)), lambda: store.set_optimizer("sgd", learning_rate=0.1)):
        with pytest.raises(kv.UsageError, match="this store is closed"):
            call()


class Diverges(torch.optim.RMSprop):
    """It changes arrays one after the other, and fails at one of two elements."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.numel() == 2:
                raise ArithmeticError("it diverged")
            with torch.no_grad():
                param.sub_(param.grad)


def test_what_an_optimizer_may_have_half_updated_cannot_be_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = kv.create("local")
    store.init(["a", "b", "c"], [torch.zeros(1), torch.zeros(2), torch.zeros(3)])
    monkeypatch.setitem(builtin(), "rmsprop", OptimizerClass(Diverges))
    store.set_optimizer("rmsprop", learning_rate=1.0)
    with pytest.raises(ArithmeticError, match="it diverged"):  # nothing was changed before
        store.push("b", torch.ones(2))
    calls = [
        lambda: store.push(["a", "b"], [torch.ones(1), torch.ones(2)]),
        lambda: store.push("a", torch.ones(1)),
        lambda: store.pull("a", torch.empty(1)),
        lambda: store.save_optimizer_states("states"),
    ]
    for call in calls:
        with pytest.raises(WeightsInDoubt, match="rmsprop failed in the middle of an update of 'a', which may be half"):
            call()
    for key, size, expected in (("b", 2, 0), ("c", 3, 0)):
        out = torch.empty(size)
        store.pull(key, out)
        assert out.tolist() == [expected] * size
    store.push("c", torch.ones(3))


def test_tables_are_made_together_or_not_at_all() -> None:
    tables = LocalTables(finite=False)
    tables.use(describe("sgd", {"lazy_update": False}))
    with pytest.raises(kv.UsageError, match="lazy_update"):
        tables.add({"a": kv.Table(shape=(2, 2)), "b": kv.Table(dim=2)})
    assert len(tables) == 0
    tables.add({"a": kv.Table(shape=(2, 2))})
    assert "a" in tables


def test_states_of_rows_that_are_not_there_yet() -> None:
    tables = LocalTables(finite=False)
    tables.use(describe("sgd", {"momentum": 0.5}))
    tables.add({"fixed": kv.Table(shape=(9, 2), init="constant"), "grows": kv.Table(dim=2, init="constant")})
    states = RowStates(np.array([3]), {"state.momentum_buffer": np.full((1, 2), 8, np.float32)}, 5)
    tables.load_states({"fixed": states, "grows": states})
    saved: dict[Any, torch.Tensor] = tables.states()
    assert saved["fixed", "rows.state.momentum_buffer"].tolist() == [[8, 8]]
    assert saved["fixed", "rows.steps"] == saved["grows", "rows.steps"] == 5
    assert len(saved["grows", "rows.ids"]) == 0
    assert tables.rows("fixed", np.array([3])).tolist() == [[1, 1]]
    with pytest.raises(kv.UsageError, match="file holds states of table 'other'"):
        tables.require_keys({"other": states}, "file")


def test_a_reading_that_is_given_up_keeps_nothing() -> None:
    store = kv.create()
    store.init("t", kv.Table(dim=2))
    store.push("t", kv.RowSparse(torch.arange(100), torch.ones(100, 2)))
    before = store.table_statistics("t")["bytes"]
    readings = [store.table_rows("t") for _ in range(2)]
    next(readings[0])
    assert store.table_statistics("t")["bytes"] > before
    readings.clear()
    assert store.table_statistics("t")["bytes"] == before


def test_an_update_leaves_the_sums_as_they_are() -> None:
    store = kv.create()
    store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=3.0)
    store.init("t", kv.Table(shape=(9, 2)))
    value = kv.RowSparse([1, 2], torch.ones(2, 2))
    store.push("t", value)
    assert value.rows.unique().tolist() == [1]
