"""What a description means to torch: the settings of each key's parameter group, with changes and multipliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore.optim.optimizer import describe
from kvstore.optim.param_groups import ParamGroups, Rates, build, first_state

GROUPED: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.9,
    "wd": 0.5,
    "lr_mult": {"w": 2.0},
    "wd_mult": {"b": 0.0},
    "groups": [{"keys": ["b"], "momentum": 0.5}, {"keys": ["c"], "lr": 0.3}],
}


def groups() -> ParamGroups:
    return ParamGroups(describe("sgd", GROUPED))


def test_each_key_has_its_group_and_multipliers() -> None:
    assert groups().rates(["w", "b", "c", "x"]) == [
        Rates(0, 2.0, 1.0),
        Rates(1, 1.0, 0.0),
        Rates(2, 1.0, 1.0),
        Rates(),
    ]
    assert groups().number("c") == 2


def test_keys_may_have_other_names_in_the_description() -> None:
    named = ParamGroups(describe("sgd", GROUPED), {7: "w", 8: "c"}.__getitem__)
    assert named.rates([7, 8]) == [Rates(0, 2.0, 1.0), Rates(2, 1.0, 1.0)]
    assert named.number(8) == 2


def test_without_groups_and_multipliers_all_keys_are_alike() -> None:
    assert ParamGroups(describe("sgd", {})).rates(["a", "b"]) == [Rates(0, 1.0, 1.0)] * 2


def settings(key: str, lr: float = 0.1, changes: Any = None) -> tuple[float, float, float]:
    made = groups()
    settings = made.settings(made.rates([key])[0], lr, changes or {})
    return settings["lr"], settings["momentum"], settings["weight_decay"]


def test_settings_are_those_of_the_group_times_the_multipliers() -> None:
    assert settings("w") == (0.2, 0.9, 0.5)
    assert settings("b") == (0.1, 0.5, 0.0)
    assert settings("c") == (0.3, 0.9, 0.5)


def test_a_new_learning_rate_is_for_groups_that_have_none_of_their_own() -> None:
    assert settings("w", lr=1.0)[0] == 2.0
    assert settings("b", lr=1.0)[0] == 1.0
    assert settings("c", lr=1.0)[0] == 0.3


def test_changes_of_all_keys_leave_what_a_group_has_of_its_own() -> None:
    changes = {(0, "momentum"): 0.25, (2, "lr"): 4.0}
    assert settings("w", changes=changes) == (0.2, 0.25, 0.5)
    assert settings("b", changes=changes) == (0.1, 0.5, 0.0)
    assert settings("c", changes=changes) == (4.0, 0.25, 0.5)


def test_settings_do_not_add_up() -> None:
    made = groups()
    (rates,) = made.rates(["w"])
    assert made.settings(rates, 0.1, {(0, "momentum"): 0.0})["momentum"] == 0.0
    assert made.settings(rates, 0.1, {}) == made.settings(rates, 0.1, {})
    assert made.settings(rates, 0.1, {})["momentum"] == 0.9


@pytest.mark.parametrize("options", [{"lr": -1}, {"momentum": -1}, {"groups": [{"keys": ["a"], "weight_decay": -1}]}])
def test_torchs_own_refusals_are_passed_on(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        ParamGroups(describe("sgd", options))


def test_an_optimizer_is_fused_where_torch_can() -> None:
    assert build(describe("adam", {}), 0, torch.zeros(1)).defaults["fused"]
    assert "fused" not in build(describe("rprop", {}), 0, torch.zeros(1)).defaults


def test_the_first_state_is_that_after_a_step() -> None:
    cpu = torch.device("cpu")
    assert first_state(describe("adam", {}), 0, cpu).keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert first_state(describe("adam", {"amsgrad": True}), 0, cpu).keys() > {"max_exp_avg_sq"}
    assert not any(torch.is_tensor(value) for value in first_state(describe("sgd", {}), 0, cpu).values())
