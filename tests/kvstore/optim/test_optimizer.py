"""Optimizers by name and numbers: what is understood, and what a refusal lists."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import UnknownName, UsageError
from kvstore.optim.algorithms.tensorwise import MxnetSGD, eager
from kvstore.optim.hyperparameters import finite, is_number, plain, positive
from kvstore.optim.optimizer import builtin, describe, find, names
from kvstore.wire.fields import MAX_HYPER_LIST, MAX_HYPER_TEXT

WEIGHT = [torch.zeros(2, 2)]
CLASSES = {name: known.cls for name, known in builtin().items() if name != "nag"}


@pytest.mark.parametrize("name", names())
def test_names_in_upper_and_lower_case(name: str) -> None:
    assert describe(name.upper(), {}) == describe(name, {})


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnknownName, match="no optimizer 'sdg'; choose from") as caught:
        describe("sdg", {})
    assert all(name in str(caught.value) for name in names())


def test_mxnets_names_for_hyper_parameters() -> None:
    given = {"learning_rate": 0.2, "wd": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6}
    theirs = {"lr": 0.2, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    assert describe("adam", given) == describe("adam", theirs)
    assert describe("adam", {"beta1": 0.8}).hyper["betas"] == [0.8, 0.999]
    assert describe("adam", {"betas": (0.7, 0.6), "beta2": 0.5}).hyper["betas"] == [0.7, 0.5]


@pytest.mark.parametrize(
    ("name", "given", "theirs"),
    [
        ("rmsprop", {"gamma1": 0.9, "centered": True}, {"alpha": 0.9, "centered": True}),
        ("rmsprop", {"rho": 0.8}, {"alpha": 0.8}),
        ("nadam", {"schedule_decay": 0.01}, {"momentum_decay": 0.01}),
        ("adadelta", {"rho": 0.8}, {"rho": 0.8}),
    ],
)
def test_mxnets_names_for_what_one_optimizer_has(name: str, given: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert describe(name, given) == describe(name, theirs)


def test_what_mxnet_asks_for_that_is_always_so_changes_nothing() -> None:
    given: dict[str, Any] = {"multi_precision": True, "lazy_update": True, "aggregate_num": 4, "use_fused_step": True}
    group = {"keys": ["w"], "lr": 0.5}
    described = describe("sgd", {"momentum": 0.9, **given, "groups": [{**group, **given}]})
    assert described == describe("sgd", {"momentum": 0.9, "groups": [group]})
    assert described.changes(given, [given]) == {}


def test_whether_updates_are_lazy_cannot_change_with_a_push() -> None:
    described = describe("sgd", {"momentum": 0.9, "lazy_update": False})
    assert described.changes({"lazy_update": False}) == {}
    with pytest.raises(UsageError, match="lazy_update cannot become True from False between updates"):
        described.changes({"lazy_update": True})


@pytest.mark.parametrize(("old", "new"), [("learning_rate", "lr"), ("wd", "weight_decay"), ("epsilon", "eps")])
def test_one_thing_by_two_names(old: str, new: str) -> None:
    with pytest.raises(UsageError, match=f"{old} and {new} are the same"):
        describe("adam", {old: 0.1, new: 0.1})


def test_an_unknown_hyper_parameter_lists_those_there_are() -> None:
    with pytest.raises(UnknownName, match="sgd has no hyper-parameter 'momentun'; choose from") as caught:
        describe("sgd", {"momentun": 0.9})
    for name in ("momentum", "nesterov", "lr", "learning_rate", "wd", "clip_gradient", "rescale_grad", "lr_mult"):
        assert name in str(caught.value)


@pytest.mark.parametrize("name", names())
def test_every_name_that_a_refusal_lists_is_one(name: str) -> None:
    with pytest.raises(UnknownName, match=f"{name} has no hyper-parameter 'gamma2'") as caught:
        describe(name, {"gamma2": 0.5})
    offered = str(caught.value).partition("choose from ")[2].partition(";")[0].split(", ")
    assert ("beta1" in offered) == ("beta2" in offered) == ("betas" in offered)
    assert ("gamma1" in offered) == (name == "rmsprop")
    for one in offered:
        describe(name, {one: {} if one.endswith("_mult") else "mxnet" if one == "momentum_style" else 0.5})


@pytest.mark.parametrize("name", ["epsilon", "rho", "beta1"])
def test_a_refusal_has_the_name_that_was_given(name: str) -> None:
    with pytest.raises(UnknownName, match=f"sgd has no hyper-parameter '{name}'"):
        describe("sgd", {name: 0.5})


@pytest.mark.parametrize("how", ["fused", "foreach", "capturable", "differentiable", "params", "beta1"])
def test_how_to_run_is_not_the_callers(how: str) -> None:
    with pytest.raises(UnknownName, match=f"no hyper-parameter '{how}'"):
        describe("sgd", {how: True})


def test_nag_is_sgd_with_nesterov_momentum() -> None:
    assert describe("nag", {}).hyper == {"momentum": 0.9, "nesterov": True}
    assert describe("nag", {"momentum": 0.5}).hyper == {"momentum": 0.5, "nesterov": True}


def test_the_learning_rate_of_torch_is_the_default() -> None:
    assert describe("adam", {}).lr == 1e-3
    assert describe("adadelta", {}).lr == 1.0


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_a_class_and_an_unused_instance_are_as_good_as_the_name(cls: Any) -> None:
    name = cls.__name__.lower()
    assert describe(cls, {"lr": 0.3}) == describe(name, {"lr": 0.3})
    instance = cls(WEIGHT, lr=0.25)
    described = describe(instance, {})
    assert (described.name, described.lr) == (name, 0.25)
    assert describe(name, {**described.hyper, "lr": 0.25}) == described


def test_the_defaults_of_an_instance_are_taken_and_can_be_changed() -> None:
    instance = torch.optim.SGD(WEIGHT, lr=0.5, momentum=0.7, weight_decay=0.01, nesterov=True)
    described = describe(instance, {"learning_rate": 0.1})
    assert described.lr == 0.1
    assert described.hyper["momentum"] == 0.7
    assert described.hyper["weight_decay"] == 0.01
    assert described.hyper["nesterov"] is True


@pytest.mark.parametrize(
    "make",
    [
        *(torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop),
        lambda params: torch.optim.SGD(params, momentum=0.9),
    ],
)
def test_a_used_instance_is_refused(make: Any) -> None:
    weight = torch.zeros(2, 2)
    instance = make([weight])
    weight.grad = torch.ones(2, 2)
    instance.step()
    with pytest.raises(UsageError, match="has made steps"):
        describe(instance, {})


def test_several_parameter_groups_are_refused() -> None:
    instance = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.5}], lr=0.1)
    with pytest.raises(UsageError, match="pass groups="):
        describe(instance, {})


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize("optimizer", [Mine, Mine(WEIGHT), torch.optim.LBFGS, torch.optim.Optimizer, 3, None, dict])
def test_what_cannot_travel_by_name(optimizer: Any) -> None:
    with pytest.raises(UsageError, match=r"cannot travel to a server.*sgd"):
        describe(optimizer, {})


def test_multipliers_by_key() -> None:
    described = describe("sgd", {"lr_mult": {"w": 0.5, 3: 2}, "wd_mult": {"w": 0}})
    assert described.lr_mult == {"w": 0.5, 3: 2}
    assert described.wd_mult == {"w": 0}
    for bad in ([1], {"w": "x"}, {1.5: 1}, {"w": float("nan")}):
        with pytest.raises(UsageError):
            describe("sgd", {"lr_mult": bad})


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(3), torch.tensor(0.5), torch.ones(1)])
def test_numbers_of_any_library(value: Any) -> None:
    number = finite("lr", value)
    assert number == value
    assert type(number) in (int, float)


@pytest.mark.parametrize(
    "value",
    [
        "0.1",
        None,
        True,
        float("nan"),
        float("inf"),
        1j,
        [0.1],
        torch.ones(2),
        np.ones(2),
        10**400,
        -(10**400),
        np.True_,
    ],
    ids=str,
)
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^learning_rate=.* is not a finite number"):
        describe("sgd", {"learning_rate": value})


def test_a_number_fits_the_wire() -> None:
    assert finite("lr", 2**63 - 1) == 2**63 - 1
    assert type(finite("lr", 2**70)) is float


@pytest.mark.parametrize("clip", [0, -1])
def test_a_gradient_is_not_clipped_to_nothing(clip: float) -> None:
    with pytest.raises(UsageError, match="clip_gradient"):
        describe("sgd", {"clip_gradient": clip})


@pytest.mark.parametrize("value", ["x" * 65, [0.1] * 9, {"a": 1}, ["a"]])
def test_a_hyper_parameter_that_the_wire_has_no_room_for(value: Any) -> None:
    with pytest.raises(UsageError, match="momentum"):
        describe("sgd", {"momentum": value})


def test_the_same_rule_is_the_same_name() -> None:
    adam = describe("adam", {})
    assert adam.same_rule(describe("adam", {"lr": 7}))
    assert not adam.same_rule(describe("adamw", {}))
    assert not adam.same_rule(None)


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_another_momentum_is_another_rule(name: str) -> None:
    torchs, mxnets = (describe(name, {"momentum": 0.9, "momentum_style": style}) for style in ("torch", "mxnet"))
    assert torchs.same_rule(describe(name, {"lr": 7}))
    assert not mxnets.same_rule(torchs)
    assert mxnets.same_rule(describe(name, {"momentum_style": "mxnet"}))
    assert (torchs.rule, mxnets.rule) == (name, f"{name} momentum_style=mxnet")


def test_a_momentum_style_is_one_of_two_and_of_all_keys() -> None:
    with pytest.raises(UsageError, match="momentum_style='keras' is not valid; choose from mxnet, torch"):
        describe("sgd", {"momentum_style": "keras"})
    with pytest.raises(UsageError, match="momentum_style is one for all keys"):
        describe("sgd", {"groups": [{"keys": ["w"], "momentum_style": "mxnet"}]})
    described = describe("sgd", {"momentum_style": "mxnet", "groups": [{"keys": ["w"], "momentum": 0.9}]})
    with pytest.raises(UsageError, match="momentum_style cannot become 'torch' from 'mxnet' between updates"):
        described.changes({"momentum_style": "torch"})


def test_optimizers_that_need_whole_tensors() -> None:
    assert describe("lamb", {}).whole
    assert not describe("signum", {}).whole


def test_what_is_described_is_of_the_moment_in_which_it_was_taken() -> None:
    rate, beta, factors, group = torch.tensor(0.5), torch.tensor(0.75), {"w": np.float32(2)}, {"keys": ["b"]}
    given = {
        "lr": rate,
        "betas": [np.float32(0.5), beta],
        "amsgrad": np.True_,
        "weight_decay": Fraction(1, 4),
        "clip_gradient": Decimal("0.5"),
        "rescale_grad": np.array([0.25]),
        "lr_mult": factors,
        "groups": [group | {"lr": torch.tensor([0.125]), "eps": np.float64(0.5)}],
        "lazy_update": np.False_,
    }
    described = describe("adam", given)
    rate.fill_(9.0), beta.fill_(0.1), factors.update(w=9.0), given["betas"].reverse()
    plain = {
        "lr": 0.5,
        "betas": [0.5, 0.75],
        "amsgrad": True,
        "weight_decay": 0.25,
        "clip_gradient": 0.5,
        "rescale_grad": 0.25,
        "lr_mult": {"w": 2.0},
        "groups": [{"keys": ["b"], "lr": 0.125, "eps": 0.5}],
        "lazy_update": False,
    }
    assert repr(described) == repr(describe("adam", plain))


def test_changes_are_of_the_moment_in_which_they_were_taken() -> None:
    described = describe("adam", {"lr": 0.5, "groups": [{"keys": ["b"], "lr": 0.25}]})
    beta, rate = torch.tensor(0.75), torch.tensor(0.125)
    changes = described.changes({"betas": (0.5, beta)}, [{"lr": rate}])
    beta.fill_(0.0), rate.fill_(0.0)
    assert changes == {(0, "betas"): [0.5, 0.75], (1, "lr"): 0.125}


@pytest.mark.parametrize("option", ["lr", "weight_decay", "clip_gradient", "rescale_grad"])
@pytest.mark.parametrize("wrong", [torch.ones(2), np.ones((3, 1)), 1j], ids=repr)
def test_what_is_no_number_is_refused_by_its_name(option: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=rf"{'learning_rate' if option == 'lr' else option}="):
        describe("sgd", {option: wrong})


def test_mxnets_optimizers_are_there() -> None:
    mxnets = {"sgd", "nag", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "signum", "lamb"}
    mxnets |= {"lars", "lans", "ftrl", "ftml", "adabelief", "groupadagrad", "dcasgd", "sgld"}
    assert mxnets <= set(names())
    assert {"lbfgs", "sparseadam", "optimizer"}.isdisjoint(names())
    assert find("sparseadam") is find("adam")


def test_what_is_not_there_has_a_reason_or_a_list() -> None:
    with pytest.raises(UnknownName, match="no optimizer 'lbfgs': it evaluates the loss several times"):
        find("lbfgs")
    with pytest.raises(UnknownName, match=r"no optimizer 'sdg'; choose from .*lamb.*sgd"):
        find("sdg")


def test_those_that_need_whole_arrays_or_matrices() -> None:
    whole = {name for name, known in builtin().items() if not known.elementwise}
    assert whole == {
        "adafactor",
        "groupadagrad",
        "lamb",
        "lans",
        "lars",
        "muon",
        "rowwiseadagrad",
        "rowwiseadam",
    } & set(names())
    assert {name for name, known in builtin().items() if known.dims == 2} <= {
        "groupadagrad",
        "muon",
        "rowwiseadagrad",
        "rowwiseadam",
    }


def test_aliases_are_of_hyper_parameters_that_there_are() -> None:
    for name, known in builtin().items():
        assert set(known.aliases.values()) <= set(known.hyperparameters), name
    assert find("lars").aliases["lars_eta"] == "eta"
    assert "epsilon" not in find("signum").aliases


@pytest.mark.parametrize("name", names())
def test_every_one_can_be_built(name: str) -> None:
    built = find(name).build([torch.zeros(2, 2)], {})
    assert set(find(name).hyperparameters) - {"momentum_style"} <= set(built.param_groups[0])


def test_torchs_own_class_is_used_for_torchs_momentum() -> None:
    assert type(find("sgd").build([torch.zeros(1)], {"momentum": 0.9, "momentum_style": "torch"})) is eager(
        torch.optim.SGD
    )
    built = find("nag").build([torch.zeros(1)], {"momentum": 0.9, "nesterov": True, "momentum_style": "mxnet"})
    assert type(built) is MxnetSGD
    assert built.defaults["fused"]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array([2]), torch.tensor(2.0), torch.tensor([[2]])])
def test_numbers_of_any_library_become_pythons(value: Any) -> None:
    assert finite("x", value) == 2
    assert type(finite("x", value)) in (int, float)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "2", None, True, [2], np.ones(2), 10**400, torch.tensor(True), torch.ones((), device="meta")],
)
def test_what_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match="momentum="):
        finite("momentum", value)


def test_integers_that_the_wire_has_no_room_for_become_floats() -> None:
    assert isinstance(finite("x", 2**63 - 1), int)
    assert isinstance(finite("x", 2**63), float)


@pytest.mark.parametrize("value", [0, -1.5])
def test_what_must_be_positive_is(value: float) -> None:
    assert positive("clip_gradient", 0.5) == 0.5
    with pytest.raises(UsageError, match=f"clip_gradient={value!r} must be positive"):
        positive("clip_gradient", value)


def test_a_bool_is_no_number() -> None:
    assert is_number(1)
    assert is_number(1.5)
    assert not is_number(True)
    assert not is_number("1")


@pytest.mark.parametrize("value", [None, True, "cosine", 3, 0.25])
def test_plain_values_stay(value: Any) -> None:
    assert plain("x", value) is value


def test_lists_are_of_numbers() -> None:
    assert plain("betas", (0.9, torch.tensor(0.5), None)) == [0.9, 0.5, None]
    assert plain("nesterov", np.True_) is True
    with pytest.raises(UsageError, match="betas="):
        plain("betas", [0.9, "x"])


@pytest.mark.parametrize("value", ["x" * (MAX_HYPER_TEXT + 1), [0.5] * (MAX_HYPER_LIST + 1)])
def test_what_is_too_long_is_refused(value: Any) -> None:
    assert plain("x", value[:-1]) == value[:-1]
    with pytest.raises(UsageError, match="too long"):
        plain("x", value)


def test_what_the_wire_has_no_form_for_is_refused() -> None:
    with pytest.raises(UsageError, match="x="):
        plain("x", {"a": 1})
