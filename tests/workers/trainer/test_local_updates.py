"""Updates in the worker: in place, with states in files, and none where a gradient is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trained import HOWS, stepped_and_saved, weights

import kvstore as kv
from kvstore.optim import states_file
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowHyperparameters
from workers import Trainer
from workers.trainer.local_updates import LocalRows


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_alone_weights_are_updated_in_place_so_that_they_may_be_changed_between_steps(kvstore: str | None) -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    trainer = Trainer({"w": weight}, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore)
    pushed = torch.arange(120.0).view(2, 3, 4, 5)  # other strides than the weight's
    for _ in range(2):
        with torch.no_grad():
            weight.fill_(100.0)
        weight.grad = pushed.clone()
        trainer.step()
        assert torch.equal(weight.grad, pushed)
    assert torch.equal(weight, 100 - 1.5 * pushed)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam, "instance"])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_states_are_saved_and_loaded(how: dict[str, Any], optimizer: Any, tmp_path: Path) -> None:
    def trainer_of(param: nn.Parameter) -> Trainer:
        if optimizer == "instance":
            return Trainer({"w": param}, torch.optim.Adam([param], lr=0.1), **how)
        return Trainer({"w": param}, optimizer, {"learning_rate": 0.1}, **how)

    def steps(trainer: Trainer, param: nn.Parameter, grads: list[float]) -> None:
        for grad in grads:
            param.grad = torch.full((2,), grad)
            trainer.step()

    (whole,) = weights(1.0)
    first = trainer_of(whole)
    steps(first, whole, [1.0, -0.5])
    first.save_states(tmp_path / "s")
    half = nn.Parameter(whole.detach().clone())
    steps(first, whole, [0.25, 2.0])
    second = trainer_of(half)
    second.load_states(tmp_path / "s")
    steps(second, half, [0.25, 2.0])
    assert torch.equal(half, whole)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_states_that_torch_would_read_past_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    trainer, name, found = stepped_and_saved(how, tmp_path / "s")
    one = {where: torch.tensor(1.0) for where in found}
    states_file.write(tmp_path / "odd", name, one, note=states_file.read_note(tmp_path / "s"))
    with pytest.raises(kv.Mismatch, match=r"these are not adam's states of key 'w': .*exp_avg float32\[\]"):
        trainer.load_states(tmp_path / "odd")
    trainer.save_states(tmp_path / "after")
    assert all(torch.equal(value, found[where]) for where, value in states_file.read(tmp_path / "after")[1].items())


def test_a_trainer_that_checks_leaves_the_parameters_alone_where_a_gradient_is_not_finite() -> None:
    layer = nn.Linear(2, 1)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    trainer = Trainer(layer.named_parameters(), "sgd", {"learning_rate": 0.1}, check_finite=True)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer.bias.grad.fill_(float("inf"))
    with pytest.raises(kv.NotFinite, match="the gradient of 'bias' has NaN or infinite elements in update 1"):
        trainer.step(1)
    assert all(torch.equal(parameter, old) for parameter, old in zip(layer.parameters(), before, strict=True))
    with kv.create("local") as store, pytest.raises(kv.UsageError, match="does not check; make it with"):
        Trainer(layer.named_parameters(), kvstore=store, check_finite=True)


OWN = RowHyperparameters()


def gradient(*ids: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([list(ids)], torch.ones(len(ids), 2), (4, 2), check_invariants=True)


def test_rows_with_a_gradient_are_updated() -> None:
    rows, weight = LocalRows(describe("sgd", {"learning_rate": 0.5, "momentum": 0.5})), torch.zeros(4, 2)
    rows.begin("w", weight, {})
    assert "w" in rows
    rows.update("w", weight, gradient(1, 3, 1), OWN)
    rows.update("w", weight, gradient(3), RowHyperparameters(rescale=2.0))
    assert weight[:, 0].tolist() == [0, -1, 0, -0.5 - 0.5 * 2.5]
    assert rows.of()["w", "momentum_buffer"][:, 0].tolist() == [0, 2, 0, 2.5]


def test_an_optimizer_that_is_not_lazy_updates_all_rows() -> None:
    options = {"learning_rate": 0.5, "momentum": 0.5, "lazy_update": False}
    rows, weight = LocalRows(describe("sgd", options)), torch.zeros(4, 2)
    rows.begin("w", weight, {})
    rows.update("w", weight, gradient(1), OWN)
    rows.update("w", weight, gradient(3), OWN)
    assert weight[:, 0].tolist() == [0, -0.75, 0, -0.5]


def test_states_that_are_there_already_go_on() -> None:
    optimizer = describe("adam", {"learning_rate": 0.1})
    first, second = LocalRows(optimizer), LocalRows(optimizer)
    weights = [torch.ones(4, 2), torch.ones(4, 2)]
    first.begin("w", weights[0], {})
    first.update("w", weights[0], gradient(0, 2), OWN)
    weights[1].copy_(weights[0])
    second.begin("w", weights[1], first.of())
    for rows, weight in zip((first, second), weights, strict=True):
        rows.update("w", weight, gradient(2), OWN)
    assert torch.equal(*weights)
    assert int(second.of()["w", "step"]) == 2


def test_optimizers_that_have_no_rule_for_rows() -> None:
    with pytest.raises(kv.KVStoreError, match="rmsprop"):
        LocalRows(describe("rmsprop", {})).begin("w", torch.zeros(4, 2), {})
