"""``KVStore`` as a class to make stores from, and stores in one process."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import WeightsInDoubt
from kvstore.optim.optimizer import builtin, describe
from kvstore.optim.optimizer_class import OptimizerClass
from kvstore.rows.row_table import RowStates
from kvstore.store import registry as names_of_stores
from kvstore.store.local import LocalStore, LocalTables

# ---- ``KVStore`` as a class to make stores from: what a subclass gets, and what it does not do


@pytest.mark.usefixtures("registry")
def test_a_store_can_be_added() -> None:
    @kv.KVStore.register
    class Doubling(kv.KVStore):
        def __init__(self, factor: float = 2.0) -> None:
            super().__init__()
            self.factor = factor

        def _pushpull(self, values: Any, outs: Any, priority: int, copy: bool) -> kv.Ticket:
            for key, its in outs.items():
                for out in its:
                    out.copy_(self.factor * sum(values[key]))
            return kv.Ticket("pushpull", list(values))

    store = kv.create("DOUBLING", factor=3.0)
    assert type(store) is Doubling
    assert store.type == "doubling"
    out = torch.empty(2)
    store.pushpull("w", [torch.ones(2), torch.ones(2)], out)
    assert out.tolist() == [6, 6]
    assert (store.rank, store.num_workers, store.num_dead_nodes()) == (0, 1, 0)
    assert store.statistics() == kv.Statistics()
    assert "doubling" in names_of_stores.store_names()
    with pytest.raises(kv.UnknownName, match="doubling"):
        kv.create("foo")


def test_only_stores_can_be_added(registry: dict[str, type[kv.KVStore]]) -> None:
    for thing in (dict, 3, LocalStore()):
        with pytest.raises(kv.UsageError, match="only a subclass of KVStore can be registered"):
            kv.KVStore.register(thing)  # type: ignore[type-var]
    assert registry == {}


class Counting(kv.KVStore):
    """Keeps what the methods for subclasses are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def _init(self, values: Any, listed: Any) -> None:
        self.calls.append(("init", values, listed))

    def _push(self, values: Any, priority: int) -> kv.Ticket:
        self.calls.append(("push", values, priority))
        return kv.Ticket("push", list(values))

    def _pull(self, outs: Any, priority: int, copy: bool) -> kv.Ticket:
        self.calls.append(("pull", outs, priority, copy))
        return kv.Ticket("pull", list(outs))

    def _pushpull(self, values: Any, outs: Any, priority: int, copy: bool) -> kv.Ticket:
        self.calls.append(("pushpull", values, outs, priority, copy))
        return kv.Ticket("pushpull", list(values))


def test_a_subclass_gets_keys_with_a_list_of_values_each() -> None:
    store = Counting()
    store.init(["a", "b"], [1.0, 2.0])
    store.push("a", [3.0, 4.0], priority=5)
    store.pull("a", "out", copy=False)
    store.pushpull("a", 6.0)
    store.broadcast("c", 7.0, "out")
    assert store.calls == [
        ("init", {"a": [1.0], "b": [2.0]}, ["a", "b"]),
        ("push", {"a": [3.0, 4.0]}, 5),
        ("pull", {"a": ["out"]}, 0, False),
        ("pushpull", {"a": [6.0]}, {"a": [6.0]}, 0, True),
        ("init", {"c": [7.0]}, ["c"]),
        ("pull", {"c": ["out"]}, 0, True),
    ]


def test_what_an_init_that_fails_has_asked_for_is_not_the_kind_of_keys() -> None:
    class Refusing(Counting):
        def _init(self, values: Any, listed: Any) -> None:
            raise kv.UsageError("no")

    store = Refusing()
    with pytest.raises(kv.UsageError, match="no"):
        store.init("a", 1.0)
    store.push(3, 1.0)


def test_leaving_its_block_closes_a_store_unless_an_error_does() -> None:
    class Closing(kv.KVStore):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    with Closing() as store:
        pass
    assert store.closed == 1  # type: ignore[attr-defined]
    with pytest.raises(KeyError), store:
        raise KeyError
    assert store.closed == 1  # type: ignore[attr-defined]


def test_empty_makes_a_tensor() -> None:
    empty = Counting().empty((2, 3), "int32")
    assert (empty.shape, empty.dtype) == ((2, 3), torch.int32)


@pytest.mark.parametrize("store", [LocalStore, DistStore])
def test_help_of_a_store_is_that_of_the_interface(store: type[kv.KVStore]) -> None:
    assert store.pushpull.__doc__ == kv.KVStore.pushpull.__doc__
    members = {name: inspect.getdoc(member) or "" for name, member in inspect.getmembers(store) if name[0] != "_"}
    assert [name for name, text in members.items() if text.startswith("See ")] == []
    assert members["learning_rate"] == inspect.getdoc(kv.KVStore.learning_rate)


def test_a_store_without_a_job_saves_no_checkpoints() -> None:
    store = kv.create()
    assert store.save_checkpoint(if_due=True) is None
    assert not store.attach("name", torch.nn.Linear(1, 1))
    with pytest.raises(kv.UsageError, match=r"attach\('name', ...\) takes .* load_state_dict, not object"):
        store.attach("name", object())
    with pytest.raises(kv.Unsupported, match="a 'local' store has no save_checkpoint"):
        store.save_checkpoint()


class Alone(kv.KVStore):
    """Of one worker."""


class Several(kv.KVStore):
    """Of three workers."""

    @property
    def num_workers(self) -> int:
        return 3


def test_a_barrier_of_one_worker_is_passed_and_join_returns_its_rank() -> None:
    store = Alone()
    store.barrier()
    assert (store.join(), store.rank, store.num_workers, store.num_dead_nodes()) == (0, 0, 1, 0)
    assert not store.check_finite
    store.report({"loss": 0.5}, input_s=0.1)  # to nobody


def test_workers_that_have_others_cannot_join_by_themselves() -> None:
    with pytest.raises(kv.Unsupported, match="a 'several' store has no join"):
        Several().join()


class Bare(kv.KVStore):
    pass


class Updating(kv.KVStore):
    def __init__(self) -> None:
        super().__init__()
        self.set: list[dict[str, Any]] = []

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        self.set.append({"optimizer": optimizer, **hyperparameters})

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        self.set.append(hyperparameters)


def test_what_a_store_does_not_do_is_unsupported() -> None:
    store, value = Bare(), torch.ones(1)
    for call in (
        lambda: store.init("w", value),
        lambda: store.push("w", value),
        lambda: store.pull("w", value),
        lambda: store.pushpull("w", value),
        lambda: store.broadcast("w", value, value),
        lambda: store._set_updater(lambda key, pushed, stored: None),
        lambda: store.set_optimizer("sgd"),
        lambda: store.set_updater(lambda key, pushed, stored: None),
        lambda: store.learning_rate,
        lambda: store.set_learning_rate(0.1),
        lambda: store.set_hyperparameters(rescale_grad=1.0),
        lambda: store.save_optimizer_states("s"),
        lambda: store.load_optimizer_states("s"),
        lambda: store.row_sparse_pull("t", row_ids=[1]),
        lambda: store.put_rows("t", 1.0),
        lambda: store.table_rows("t"),
        lambda: store.evict("t"),
        lambda: store.table_statistics("t"),
        lambda: store.save_table("t", "dir"),
        lambda: store.load_table("t", "dir"),
    ):
        with pytest.raises(NotImplementedError, match="a 'bare' store has no"):
            call()
    with pytest.raises(NotImplementedError, match="a 'bare' store has no pushpull with row_ids"):
        store.pushpull("t", 1.0, row_ids=[1])
    store.close()


def test_a_rate_is_a_hyper_parameter() -> None:
    store = Updating()
    store.set_learning_rate(0.25)
    assert store.set == [{"learning_rate": 0.25}]


def test_a_store_is_capable_of_an_optimizer_if_it_takes_one() -> None:
    assert Updating().is_capable("Optimizer")
    assert not Bare().is_capable("optimizer")
    with pytest.raises(kv.UnknownName, match="there is no capability 'updater'; choose from optimizer"):
        Bare().is_capable("updater")


# ---- stores in one process, besides what all stores do (``conformance/``)


NAMES = pytest.mark.parametrize("name", ["local", "device"])


@pytest.mark.parametrize("name", ["local", "device"])
def test_what_torch_refuses_is_the_callers_error(name: str) -> None:
    store = kv.create(name)
    with pytest.raises(kv.UsageError, match="sgd: Invalid learning rate: -1"):
        store.set_optimizer("sgd", learning_rate=-1)
    for call in (lambda: store.learning_rate, lambda: store.load_optimizer_states("states")):
        with pytest.raises(kv.UsageError, match="no optimizer is set"):
            call()


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
def test_a_companion_sums_whatever_this_store_does(name: str) -> None:
    store = kv.create(name)
    store.set_optimizer("sgd", learning_rate=0.1)
    beside = store.companion()
    assert beside.type == name
    beside.init("n", torch.zeros(1))
    out = torch.empty(1)
    beside.pushpull("n", [torch.ones(1), torch.ones(1)], out)
    assert out.item() == 2.0


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
