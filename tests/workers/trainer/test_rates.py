"""Learning rates and other hyper-parameters: how they change, and files of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from torch.optim import lr_scheduler
from trained import HOWS, backward, batch, network, stepped_and_saved, weights

import kvstore as kv
from kvstore.client import DistStore
from kvstore.optim import states_file
from workers import Trainer


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_rescale_grad_and_batch_size_both_count(how: dict[str, Any]) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0, "rescale_grad": 0.5}, **how)
    for batch_size, expected in ((1, -0.5), (2, -0.75), (None, -1.25)):
        param.grad = torch.ones(2)
        trainer.step(batch_size)
        assert param.tolist() == [expected, expected]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_multipliers_by_name(how: dict[str, Any]) -> None:
    params = {"fast": nn.Parameter(torch.zeros(1)), "slow": nn.Parameter(torch.zeros(1))}
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "lr_mult": {"slow": 0.25}}, **how)
    for param in params.values():
        param.grad = torch.ones(1)
    trainer.step()
    assert [param.item() for param in params.values()] == [-1, -0.25]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_learning_rate_changes_and_momentum_stays(how: dict[str, Any]) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, **how)
    assert trainer.learning_rate == 1.0
    for lr, expected in ((1.0, -1.0), (0.1, -1.15)):
        trainer.set_learning_rate(lr)
        assert trainer.learning_rate == lr
        param.grad = torch.ones(2)
        trainer.step()
        assert param.tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_the_learning_rate_changes_on_the_servers(pair: ThreadedJob, update_on_kvstore: bool) -> None:
    """MXNet's set_learning_rate does nothing on a dist store."""

    def work(store: DistStore) -> list[float]:
        (param,) = weights(0.0)
        trainer = Trainer([param], "sgd", {"learning_rate": 1.0}, store, update_on_kvstore)
        for lr in (1.0, 0.25):
            trainer.set_learning_rate(lr)
            param.grad = torch.ones(2)
            trainer.step()
        return param.tolist()

    assert pair.run(work) == [[-1.25, -1.25]] * 2


DAMAGED = [
    "no JSON",
    "[" * 100_000,
    '{"groups": [{}]}',
    '{"num_update": 1e999, "groups": [{}]}',
    '{"num_update": -1, "groups": [{}]}',
    '{"num_update": 1, "groups": [5]}',
    '{"num_update": 1, "groups": [{"lr": 0.5, "betas": ["x", 1]}]}',
]


@pytest.mark.parametrize("note", DAMAGED)
@pytest.mark.parametrize("how", HOWS[:2], ids=str)
def test_damaged_hyperparameters_change_nothing(how: dict[str, Any], note: str, tmp_path: Path) -> None:
    trainer, name, found = stepped_and_saved(how, tmp_path / "s")
    states_file.write(tmp_path / "odd", name, {where: value + 1 for where, value in found.items()}, note=note)
    with pytest.raises(kv.UsageError, match=r"are damaged|betas='x'"):
        trainer.load_states(tmp_path / "odd")
    trainer.save_states(tmp_path / "after")
    assert all(torch.equal(value, found[where]) for where, value in states_file.read(tmp_path / "after")[1].items())
    assert trainer.learning_rate == 0.1


def steps(model: nn.Module, optimizer: Any, scheduler: Any, number: int = 6) -> list[float]:
    for step in range(number):
        backward(model, *batch(step))
        optimizer.step()
        scheduler.step()
    return [value for param in model.parameters() for value in param.flatten().tolist()]


TENSOR_SCHEDULERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a tensor, StepLR": (lambda: torch.tensor(0.1), lambda its: lr_scheduler.StepLR(its, 2, 0.5)),
    "a tensor, OneCycleLR": (lambda: torch.tensor(0.1), lambda its: lr_scheduler.OneCycleLR(its, 0.2, total_steps=8)),
    "a number, LambdaLR by a tensor": (
        lambda: 0.1,
        lambda its: lr_scheduler.LambdaLR(its, lambda step: torch.tensor(0.5) ** step),
    ),
    "a number, LambdaLR by numpy": (
        lambda: 0.1,
        lambda its: lr_scheduler.LambdaLR(its, lambda step: np.float32(0.5) ** step),
    ),
}


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("name", TENSOR_SCHEDULERS)
def test_schedulers_that_fill_a_tensor_are_followed(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    rate, make = TENSOR_SCHEDULERS[name]
    theirs = network()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=rate(), momentum=0.9)
    right = steps(theirs, optimizer, make(optimizer))
    ours = network()
    trainer = Trainer(ours.named_parameters(), "sgd", {"learning_rate": rate(), "momentum": 0.9}, **how)
    assert steps(ours, trainer.optimizer, make(trainer.optimizer)) == pytest.approx(right, abs=1e-6)
    assert trainer.learning_rate == pytest.approx(float(optimizer.param_groups[0]["lr"]))
    trainer.save_states(tmp_path / "s")
    (loaded,) = json.loads(states_file.read_note(tmp_path / "s") or "")["groups"]
    assert loaded["lr"] == trainer.learning_rate


def filled(where: str, rate: torch.Tensor, param: nn.Parameter, how: dict[str, Any]) -> Trainer:
    """A trainer whose rate is the tensor ``rate``."""
    if where == "in the options":
        return Trainer([param], "sgd", {"learning_rate": rate}, **how)
    if where == "in a group":
        return Trainer([{"params": [param], "lr": rate}], "sgd", **how)
    if where == "in an instance":
        return Trainer([param], torch.optim.SGD([param], lr=rate), **how)
    if where == "in an instance's group":
        other = nn.Parameter(torch.zeros(1))
        other.grad = torch.zeros(1)
        given = torch.optim.SGD([{"params": [param], "lr": rate}, {"params": [other]}], lr=0.5)
        return Trainer([param, other], given, **how)
    trainer = Trainer([param], "sgd", {"learning_rate": 0.5}, **how)
    trainer.optimizer.param_groups[0]["lr"] = rate
    return trainer


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize(
    "where", ["in the options", "in a group", "in an instance", "in an instance's group", "in param_groups"]
)
def test_a_rate_that_is_filled_in_place_is_the_next_steps(where: str, how: dict[str, Any]) -> None:
    (param,) = weights(0.0)
    rate = torch.tensor(1.0)
    trainer = filled(where, rate, param, how)
    for value, expected in ((1.0, -1.0), (0.25, -1.25), (0.5, -1.75)):
        rate.fill_(value)
        param.grad = torch.ones(2)
        trainer.step()
        assert param.tolist() == [expected, expected]
    if where in ("in a group", "in an instance's group"):  # a rate of its own, which the trainer's does not replace
        return
    trainer.set_learning_rate(0.125)
    assert (rate.item(), trainer.learning_rate) == (0.125, 0.125)
    rate.fill_(0.25)
    trainer.step()
    assert param.tolist() == [-2.0, -2.0]


def test_betas_that_are_filled_in_place_are_the_next_steps() -> None:
    def trained(beta: Any, change: Callable[[dict[str, Any]], None], how: dict[str, Any]) -> list[float]:
        (param,) = weights(0.0)
        trainer = Trainer([param], "adam", {"lr": 0.1, "betas": (0.5, 0.75)}, **how)
        (group,) = trainer.optimizer.param_groups
        group["betas"] = (beta, 0.75)
        for step in range(4):
            param.grad = torch.full((2,), 1.0 + step)
            trainer.step()
            change(group)
        values: list[float] = param.tolist()
        return values

    for how in HOWS:
        by_hand = trained(0.5, lambda group: group.update(betas=(0.25, 0.75)), how)
        assert trained(torch.tensor(0.5), lambda group: group["betas"][0].fill_(0.25), how) == by_hand


@pytest.mark.parametrize("how", HOWS[:4:3], ids=str)
@pytest.mark.parametrize("mine", [torch.tensor(0.75), np.float32(0.75), np.float64(0.75), Fraction(3, 4)], ids=repr)
def test_states_are_saved_whatever_the_rate_is_and_come_back(how: dict[str, Any], mine: Any, tmp_path: Path) -> None:
    (param,) = weights(0.0)
    first, second = (Trainer([param], "sgd", {"lr": 0.5, "momentum": 0.5}, **how) for _ in range(2))
    for trainer in (first, second):
        trainer.optimizer.param_groups[0]["lr"] = mine
    param.grad = torch.ones(2)
    first.step()
    first.save_states(tmp_path / "s")
    first.set_learning_rate(0.25)
    second.set_learning_rate(0.25)
    second.load_states(tmp_path / "s")
    assert (first.learning_rate, second.learning_rate) == ((0.75, 0.75) if torch.is_tensor(mine) else (0.25, 0.75))


@pytest.mark.parametrize("wrong", [torch.ones(2), "fast", None, True, math.nan], ids=repr)
def test_a_rate_that_is_no_number_is_refused_at_the_step(wrong: Any) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"lr": 0.5})
    trainer.optimizer.param_groups[0]["lr"] = wrong
    param.grad = torch.ones(2)
    with pytest.raises(kv.UsageError, match=r"learning_rate=.* is not a finite number"):
        trainer.step()


def test_a_schedule_sees_what_else_fills_the_rate() -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"lr_scheduler": lambda _: 0.1})
    rate = trainer.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    for _ in range(2):
        param.grad = torch.ones(2)
        trainer.step()
    rate.fill_(0.2)
    with pytest.raises(kv.UsageError, match="keep one of them"):
        trainer.step()


def test_a_batch_size_may_be_a_number_of_any_library() -> None:
    for size in (np.int64(4), torch.tensor(4), 4):
        (param,) = weights(0.0)
        trainer = Trainer([param], "sgd", {"lr": 1.0})
        param.grad = torch.full((2,), 2.0)
        trainer.step(size)
        assert param.tolist() == [-0.5, -0.5]


def two_rates(how: dict[str, Any], **options: Any) -> tuple[list[nn.Parameter], Trainer]:
    params = [nn.Parameter(torch.full((2,), 8.0)) for _ in range(2)]
    groups = [{"params": [("a", params[0])], "lr_mult": 2.0}, {"params": [("b", params[1])]}]
    return params, Trainer(groups, "sgd", {"lr": 1.0, "wd": 0.5} | options, **how)


def values_after(params: list[nn.Parameter], trainer: Trainer) -> list[float]:
    for param in params:
        param.grad = torch.ones(2)
    trainer.step(1)
    return [param[0].item() for param in params]


def changed_multipliers(how: dict[str, Any], path: Path) -> list[list[float]]:
    params, trainer = two_rates(how)
    one, two = trainer.optimizer.param_groups
    found = [values_after(params, trainer)]  # 8 - 2·(1 + 4), 8 - (1 + 4)
    one["lr_mult"] *= 0.25
    two["wd_mult"] = 0
    found.append(values_after(params, trainer))  # -2 - 0.5·(1 - 1), 3 - 1
    trainer.save_states(path)
    one["lr_mult"], two["lr_mult"] = 0.0, np.float32(0.5)
    found.append(values_after(params, trainer))  # -2, 2 - 0.5
    trainer.load_states(path)
    assert (one["lr_mult"], two["wd_mult"]) == (0.5, 0)
    return found


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_multipliers_that_change_between_steps_count(how: dict[str, Any], tmp_path: Path) -> None:
    assert changed_multipliers(how, tmp_path / "s") == [[-2, 3], [-2, 2], [-2, 1.5]]
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"lr": 1.0}, **how)  # without groups
    trainer.optimizer.param_groups[0]["lr_mult"] = torch.tensor(0.5)
    assert values_after([param], trainer) == [-0.5]


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_multipliers_change_on_servers(pair: ThreadedJob, update_on_kvstore: bool, tmp_path: Path) -> None:
    def work(store: DistStore) -> list[list[float]]:
        how = {"kvstore": store, "update_on_kvstore": update_on_kvstore}
        return changed_multipliers(how, tmp_path / f"{0 if update_on_kvstore else store.rank}")

    assert pair.run(work) == [[[-4, 2], [-4, 0], [-4, -1]]] * 2  # the sums of gradients are 2


def test_multipliers_that_differ_between_workers_are_an_error_on_all(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        params, trainer = two_rates({"kvstore": store})
        values_after(params, trainer)
        trainer.optimizer.param_groups[1]["lr_mult"] = 0.5 + store.rank
        with pytest.raises(kv.Mismatch, match=r"on the lr_mult of group 1 for .*: 0.5 on worker 0, 1.5 on worker 1"):
            values_after(params, trainer)

    pair.run(work)


CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("MXNet's name", lambda group: group.update(wd=0.1), "'wd'.*write 'weight_decay'"),
    ("of all", lambda group: group.update(clip_gradient=1.0), "'clip_gradient', which cannot change"),
    ("a bool", lambda group: group.update(nesterov=True), "nesterov cannot become True"),
    ("not a number", lambda group: group.update(lr_mult="much"), "lr_mult cannot become 'much'"),
    ("gone", lambda group: group.pop("dampening"), "no 'dampening' any more"),
    ("another tensor", lambda group: group.update(params=weights(1.0)), "other ones than those"),
    ("a new tensor", lambda group: group["params"].append(weights(1.0)[0]), "other ones than those"),
]


@pytest.mark.parametrize(("change", "refusal"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES])
def test_what_cannot_change_in_a_group_is_refused_at_the_step(
    change: Callable[[dict[str, Any]], Any], refusal: str
) -> None:
    for how in HOWS[:4:3]:
        params, trainer = two_rates(how)
        trainer.optimizer.param_groups[1]["max_lr"] = 1.0  # a scheduler's own
        before = values_after(params, trainer)
        change(trainer.optimizer.param_groups[1])
        with pytest.raises(kv.UsageError, match=refusal):
            values_after(params, trainer)
        assert [param[0].item() for param in params] == before


def test_a_groups_multiplier_and_one_by_name_exclude_each_other() -> None:
    params, trainer = two_rates({"kvstore": None})
    trainer.optimizer.param_groups.append({"params": weights(1.0)})
    with pytest.raises(kv.UsageError, match=r"it has 2, and there are 3 now"):
        values_after(params, trainer)
    param, other = weights(0.0, 0.0)
    trainer = Trainer([("a", param), ("b", other)], "sgd", {"lr": 1.0, "lr_mult": {"b": 3.0}}, kvstore=None)
    trainer.optimizer.param_groups[0]["lr_mult"] = 2.0
    with pytest.raises(kv.UsageError, match=r"factors of their own, as here 1, 3: make them groups"):
        values_after([param, other], trainer)
