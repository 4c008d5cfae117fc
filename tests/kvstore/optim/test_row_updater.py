"""What one table's updates are made with: groups, multipliers, hyper-parameters with a push, laziness, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepped_rows import Stepped

from kvstore.errors import UsageError
from kvstore.optim import updater
from kvstore.optim.optimizer import builtin, describe, names, names_for_rows, require_shapes
from kvstore.optim.tensorwise import eager
from kvstore.optim.updater import RowHyperparameters, RowUpdater
from kvstore.table import Table, TableSpec


def _stepped_once(optimizer: Any, hyper: RowHyperparameters, grad: float = 1.0) -> float:
    """Return what one step makes of a row that is 1."""
    rows = torch.ones(1, 1)
    updater = RowUpdater(optimizer, "table", "float32", 1, grows=True)
    updater.step(1, rows, torch.full((1, 1), grad), {}, hyper)
    return float(rows)


def test_gradients_are_rescaled_and_then_clipped() -> None:
    optimizer = describe("sgd", {"learning_rate": 1.0, "rescale_grad": 0.25, "clip_gradient": 0.5})
    assert _stepped_once(optimizer, RowHyperparameters()) == 0.75
    assert _stepped_once(optimizer, RowHyperparameters(), grad=-8.0) == 1.5
    assert _stepped_once(optimizer, RowHyperparameters(rescale=0.125)) == 0.875


def test_groups_and_multipliers_are_by_the_tables_key() -> None:
    optimizer = describe("sgd", {"lr": 1.0, "groups": [{"keys": ["table"], "lr": 0.5, "wd": 1.0}]})
    assert _stepped_once(optimizer, RowHyperparameters(lr=8.0)) == 0.0  # a group's own rate comes first
    optimizer = describe("sgd", {"lr": 1.0, "wd": 1.0, "lr_mult": {"table": 0.5}, "wd_mult": {"table": 0.0}})
    assert _stepped_once(optimizer, RowHyperparameters()) == 0.5


def test_hyper_parameters_with_a_push_are_of_this_push_alone() -> None:
    rows = Stepped("sgd", torch.zeros(1, 1), lr=1.0)
    rows.step([0], torch.ones(1, 1), lr=0.25)
    assert rows.weight.item() == -0.25
    rows.step([0], torch.ones(1, 1))
    assert rows.weight.item() == -1.25
    changes = {(0, "weight_decay"): 1.0}
    assert _stepped_once(describe("sgd", {"lr": 0.5}), RowHyperparameters(None, None, changes)) == 0.0


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        *((name, {}) for name in names_for_rows()),
        *(("sgd", {one: value}) for one, value in [("wd", 0.1), ("clip_gradient", 0.5), ("rescale_grad", 0.5)]),
        *(("sgd", {"momentum": 0.9, one: True}) for one in ("maximize", "nesterov")),
        ("sgd", {"momentum": 0.9, "momentum_style": "mxnet"}),
        *(("adam", {one: value}) for one, value in [("wd", 0.1), ("maximize", True), ("rescale_grad", 0.5)]),
        ("adamw", {"wd": 0.1}),
    ],
)
def test_gradients_can_be_kept(name: str, hyper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updater, "BLOCK", 12)
    torch.manual_seed(3)
    first, grads = torch.randn(10, 3), torch.randn(10, 3)
    results = []
    for keep in (False, True):
        stepped = Stepped(name, first, **hyper)
        for count in (1, 2):
            given = grads.clone()
            stepped.updater.step(count, stepped.weight, given, stepped.states, keep=keep)
        results.append([stepped.weight, *stepped.states.values()])
    assert torch.equal(given, grads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", names_for_rows())
@pytest.mark.parametrize("width", [3, 64])
def test_bits_of_a_row_do_not_depend_on_the_others(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    first, grads = torch.randn(100, width), [torch.randn(100, width) for _ in range(2)]
    together, apart, blocks = (Stepped(name, first) for _ in range(3))
    for grad in grads:
        together.step(torch.arange(100), grad)
        count = apart.count
        for start, stop in ((0, 1), (1, 8), (8, 41), (41, 100)):  # as if on four servers
            apart.count = count
            apart.step(torch.arange(start, stop), grad[start:stop])
    monkeypatch.setattr(updater, "BLOCK", 7 * width)
    for grad in grads:
        blocks.step(torch.arange(100), grad)
    assert torch.equal(together.weight, apart.weight)
    assert torch.equal(together.weight, blocks.weight)


def test_lazy_update_is_mxnets() -> None:
    assert RowUpdater(describe("adam", {}), "table", "float32", 4, grows=False).lazy
    assert describe("adam", {"lazy_update": True}) == describe("adam", {})
    optimizer = describe("adam", {"lazy_update": False, "groups": [{"keys": ["user"], "lazy_update": True}]})
    assert not RowUpdater(optimizer, "item", "float32", 4, grows=False).lazy
    assert RowUpdater(optimizer, "user", "float32", 4, grows=True).lazy
    with pytest.raises(UsageError, match="key 'item' is a table that grows"):
        RowUpdater(optimizer, "item", "float32", 4, grows=True)
    with pytest.raises(UsageError, match="lazy_update='no' must be True or False"):
        describe("adam", {"lazy_update": "no"})
    assert describe("adadelta", {"lazy_update": False}) == describe("adadelta", {})  # of no use there


def test_all_rows_with_zero_gradients_decay_and_move_as_torchs() -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    first = torch.randn(10, 4)
    weight = first.clone().requires_grad_()
    torchs, ours = eager(torch.optim.SGD)([weight], **hyper), Stepped("sgd", first, **hyper)
    for number in range(5):
        grads = torch.zeros(10, 4)
        grads[number] = 1.0
        weight.grad = grads.clone()
        torchs.step()
        ours.step(torch.arange(10), grads)
    torch.testing.assert_close(ours.weight, weight.detach())


def test_an_optimizer_without_a_rule_is_refused_with_those_that_have_one() -> None:
    specs = [("user", TableSpec.of(Table(dim=4)))]
    for name in set(names()) - set(names_for_rows()):
        with pytest.raises(UsageError, match=rf"{name} cannot update key 'user', a table.*adagrad, adam, adamw.*sgd"):
            require_shapes(describe(name, {}), specs)
    for name in names_for_rows():
        require_shapes(describe(name, {}), specs)


def test_groupadagrad_takes_tables_of_any_shape() -> None:
    require_shapes(describe("groupadagrad", {}), [("user", TableSpec.of(Table(dim=(2, 3))))])


def test_sparseadam_is_adam() -> None:
    expected = describe("adam", {"lr": 0.5})
    assert describe("SparseAdam", {"lr": 0.5}) == expected
    assert describe(torch.optim.SparseAdam, {"lr": 0.5}) == expected
    instance = torch.optim.SparseAdam([torch.zeros(1)], lr=0.5, betas=(0.8, 0.9))
    found = describe(instance, {})
    assert (found.name, found.lr, tuple(found.hyper["betas"])) == ("adam", 0.5, (0.8, 0.9))


def test_states_that_updaters_of_one_rule_keep_may_differ() -> None:
    plain, moving = (
        RowUpdater(describe("sgd", hyper), "table", "float32", 4, grows=True) for hyper in ({}, {"momentum": 0.9})
    )
    assert plain.rule == moving.rule
    assert not plain.states
    assert set(moving.states) == {"momentum_buffer"}


def test_numbers_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        RowUpdater(describe("adam", {"lr": -1.0}), "table", "float32", 4, grows=True)


def test_every_rule_says_what_it_keeps() -> None:
    for name in names_for_rows():
        rule = builtin()[name].rows
        assert rule is not None
        updater = RowUpdater(describe(name, {}), "table", "float64", 4, grows=True)
        assert all(state.dtype == "float64" and state.columns in (None, 1) for state in updater.states.values())
