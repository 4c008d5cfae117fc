"""MXNet's learning-rate schedules: values by its formulas, written out here as its classes compute them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kvstore as kv
from workers import Trainer
from workers.schedules import CosineScheduler, FactorScheduler, LRScheduler, MultiFactorScheduler, PolyScheduler

WARM = {"warmup_steps": 4, "warmup_begin_lr": 0.1}


def factor(step: int, by: float, stop: float, base: float) -> Callable[[int], float]:
    """MXNet's loop, which keeps its count."""
    state = {"count": 0, "lr": base}

    def lr(n: int) -> float:
        while n > state["count"] + step:
            state["count"] += step
            state["lr"] = max(state["lr"] * by, stop)
        return state["lr"]

    return lr


def multifactor(n: int) -> float:
    return 1.0 * 0.3 if 5 < n <= 8 else 1.0 * 0.3 * 0.3 if n > 8 else 1.0


def warmed(after: Callable[[int], float], mode: str = "linear") -> Callable[[int], float]:
    def lr(n: int) -> float:
        if n >= 4:
            return after(n)
        return 0.1 + (1.0 - 0.1) * float(n) / float(4) if mode == "linear" else 0.1

    return lr


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (FactorScheduler(3, 0.7, 0.2, 1.0), factor(3, 0.7, 0.2, 1.0)),
        (FactorScheduler(1, 0.9, base_lr=1.0, **WARM), warmed(factor(1, 0.9, 1e-8, 1.0))),
        (MultiFactorScheduler([5, 8], 0.3, 1.0), multifactor),
        (MultiFactorScheduler([5, 8], 0.3, 1.0, **WARM, warmup_mode="constant"), warmed(multifactor, "constant")),
        (PolyScheduler(12, 1.0), lambda n: 0 + (1.0 - 0) * pow(1 - float(n) / float(12), 2)),
        (
            PolyScheduler(12, 1.0, 3, 0.05, **WARM),
            warmed(lambda n: 0.05 + (1.0 - 0.05) * pow(1 - float(n - 4) / float(8), 3)),
        ),
        (CosineScheduler(12, 1.0), lambda n: 0 + (1.0 - 0) * (1 + cos(pi * n / 12)) / 2),
        (
            CosineScheduler(12, 1.0, 0.05, **WARM),
            warmed(lambda n: 0.05 + (1.0 - 0.05) * (1 + cos(pi * (n - 4) / 8)) / 2),
        ),
    ],
    ids=lambda its: type(its).__name__,
)
def test_mxnets_values(schedule: LRScheduler, formula: Callable[[int], float]) -> None:
    values = [schedule(n) for n in range(13)]
    assert values == [formula(n) for n in range(13)]
    assert schedule(30) == schedule(12) or isinstance(schedule, FactorScheduler)
    assert schedule(6) == values[6], "asked again, out of order"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FactorScheduler(0), "step=0 must be an integer, at least 1"),
        (lambda: FactorScheduler(1, 1.5), "factor=1.5 must be at most 1"),
        (lambda: MultiFactorScheduler([3, 2]), "increasing"),
        (lambda: MultiFactorScheduler([]), "increasing"),
        (lambda: PolyScheduler(5, warmup_steps=5), "max_update=5 must be more than warmup_steps=5"),
        (lambda: CosineScheduler(1.5), "max_update=1.5"),  # type: ignore[arg-type]
        (lambda: CosineScheduler(9, 0.1, warmup_begin_lr=0.2), "warmup_begin_lr=0.2 must be at most base_lr=0.1"),
        (lambda: CosineScheduler(9, warmup_steps=3, warmup_mode="cubic"), "choose from linear, constant"),
        (lambda: CosineScheduler(9, warmup_steps=-1), "warmup_steps=-1"),
    ],
)
def test_what_is_no_schedule(make: Callable[[], object], text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        make()


def trained(steps: int, options: dict[str, Any], **how: Any) -> tuple[list[float], Trainer]:
    """The weight after each step with a gradient of one, and the Trainer."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    trainer = Trainer([param], "sgd", options, **how)
    weights = [0.0]
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        trainer.step()
        weights.append(param.item())
    return weights, trainer


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_a_trainer_asks_for_the_number_of_its_update(how: dict[str, Any]) -> None:
    schedule = MultiFactorScheduler([1, 3], 0.5, 1.0)
    weights, trainer = trained(5, {"lr_scheduler": schedule}, **how)
    assert weights == [0, -1, -1.5, -2, -2.25, -2.5]
    assert trainer.learning_rate == 0.25
    with pytest.raises(kv.UsageError, match="the lr_scheduler sets the learning rate"):
        trainer.set_learning_rate(1.0)


def test_the_learning_rate_takes_the_base_rates_place() -> None:
    assert trained(3, {"learning_rate": 2.0, "lr_scheduler": FactorScheduler(1, 0.5)})[0] == [0, -2, -3, -3.5]


def test_updates_that_were_made_before_count() -> None:
    options = {"lr_scheduler": lambda n: 1.0 / n, "begin_num_update": 3}
    assert trained(2, options)[0] == [0, -0.25, -0.45]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr_scheduler": 3}, "must be a function of the number of the update"),
        ({"begin_num_update": -1}, "begin_num_update=-1"),
        ({"lr_scheduler": lambda n: float("nan")}, "not a finite number"),
    ],
)
def test_what_a_trainer_cannot_use(options: dict[str, Any], text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        trained(1, options)


def test_two_that_set_the_rate_are_told() -> None:
    param = nn.Parameter(torch.zeros(1))
    trainer = Trainer([param], "sgd", {"lr_scheduler": FactorScheduler(1, 0.5)})
    for again in (False, True):
        param.grad = torch.ones(1)
        if not again:
            trainer.step()
    trainer.optimizer.param_groups[0]["lr"] = 5.0
    with pytest.raises(kv.UsageError, match=r"both the lr_scheduler .* set the learning rate"):
        trainer.step()
    groups = [{"params": [param], "lr": 0.1}]
    with pytest.raises(kv.UsageError, match="give the group lr_mult"):
        Trainer(groups, "sgd", {"lr_scheduler": FactorScheduler(1, 0.5)})


def test_a_run_that_goes_on_from_a_file_knows_how_many_updates_it_has_made(tmp_path: Path) -> None:
    options = {"lr_scheduler": PolyScheduler(10, 1.0)}
    whole, _ = trained(6, options)
    first, trainer = trained(3, options)
    trainer.save_states(tmp_path / "states")
    resumed = trained(0, options)[1]
    resumed.load_states(tmp_path / "states")
    assert resumed.learning_rate == trainer.learning_rate
    param = resumed.optimizer.param_groups[0]["params"][0]
    param.data.fill_(first[-1])
    for expected in whole[4:]:
        param.grad = torch.ones_like(param)
        resumed.step()
        assert param.item() == expected
    grouped = Trainer([{"params": [param]}, {"params": []}], "sgd", {"lr": 1.0})
    with pytest.raises(kv.UsageError, match="a run with 1 parameter groups, but this trainer has 2"):
        grouped.load_states(tmp_path / "states")


def test_numbers_of_a_schedule_are_of_the_moment_in_which_they_were_taken() -> None:
    rate, factor = torch.tensor(0.5), np.array(0.5)
    schedule = FactorScheduler(np.int64(2), factor, base_lr=rate)
    poly = PolyScheduler(torch.tensor(10), rate, np.float32(1), final_lr=Fraction(1, 4))
    rate.fill_(9.0), factor.fill(0.1)
    assert [schedule(number) for number in (1, 3, 5)] == [0.5, 0.25, 0.125]
    assert [poly(number) for number in (0, 10)] == [0.5, 0.25]
    assert {type(schedule(3)), type(poly(3))} == {float}
