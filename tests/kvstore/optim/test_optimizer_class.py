"""What is known of an optimizer's class, and how it is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import counting
import pytest
import torch
from counting import Counting

from kvstore.errors import ConfigError, UnknownName, UsageError
from kvstore.job.valid_values import ClassReference
from kvstore.optim.algorithms.tensorwise import Signum
from kvstore.optim.optimizer import describe
from kvstore.optim.optimizer_class import COUNT, OptimizerClass, SGDClass, TorchClass, allowed, load, with_own_counts
from kvstore.optim.updater import Updater

WEIGHT = [torch.zeros(2, 2)]


def test_hyperparameters_are_those_of_the_constructor_that_say_what_to_compute() -> None:
    assert OptimizerClass(Signum).hyperparameters == {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "wd_lh": 0.0}
    assert {"fused", "foreach", "params", "capturable"}.isdisjoint(TorchClass(torch.optim.Adam).hyperparameters)


def test_torchs_are_fused_where_torch_can() -> None:
    assert TorchClass(torch.optim.Adam).build(WEIGHT, {"lr": 0.5}).defaults["fused"]
    assert "fused" not in TorchClass(torch.optim.RMSprop).build(WEIGHT, {}).defaults


def test_words_are_checked() -> None:
    SGDClass(torch.optim.SGD).require({"momentum_style": "mxnet", "momentum": 0.9})
    with pytest.raises(UsageError, match="momentum_style=1 is not valid; choose from mxnet, torch"):
        SGDClass(torch.optim.SGD).require({"momentum_style": 1})


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Allows classes."""
    return lambda text: monkeypatch.setenv("KVSTORE_OPTIMIZERS", text)


def test_nothing_is_allowed_by_default() -> None:
    with pytest.raises(UnknownName, match=r"no optimizer 'counting'; choose from .*; KVSTORE_OPTIMIZERS allows others"):
        describe("counting", {})
    with pytest.raises(UsageError, match=r"counting\.Counting cannot travel to a server.* KVSTORE_OPTIMIZERS"):
        describe(counting.Counting, {})


def test_a_class_that_is_allowed_is_an_optimizer_like_others(operator: Any) -> None:
    operator("counting:Counting, mine=counting:Elementwise")
    described = describe("Counting", {"learning_rate": 0.5, "beta1": 0.5, "lr_mult": {"b": 2.0}})
    assert (described.name, described.lr, described.hyper) == ("counting", 0.5, {"betas": [0.5, 0.9]})
    assert described.whole, "it may look at norms: it has not said otherwise"
    assert describe(counting.Counting, {"lr": 0.5}) == describe("counting", {"lr": 0.5})
    assert describe(counting.Elementwise([torch.zeros(1)], lr=0.25), {}).lr == 0.25
    mine = describe("mine", {"rate": 0.5})
    assert (mine.name, mine.lr, mine.whole) == ("mine", 0.5, False)


def test_its_states_are_saved_and_go_on(operator: Any) -> None:
    operator("counting:Counting")
    updater, weights = Updater(describe("counting", {})), {"a": torch.zeros(2), "b": torch.zeros(2)}
    updater.update([("a", weights["a"], torch.ones(2))])
    updater.update([(key, weight, torch.ones(2)) for key, weight in weights.items()])
    assert [weight.tolist() for weight in weights.values()] == [[-3, -3], [-1, -1]]
    states = {where: value.clone() for where, value in updater.states.of(weights).items()}
    assert {where: value.tolist() for where, value in states.items()} == {
        ("a", "sum"): [2, 2],
        ("a", "group_step"): 2,
        ("b", "sum"): [1, 1],
        ("b", "group_step"): 1,
    }
    other = Updater(describe("counting", {}))
    other.states.load(states, weights)
    other.update([(key, weight, torch.ones(2)) for key, weight in weights.items()])
    assert [weight.tolist() for weight in weights.values()] == [[-6, -6], [-3, -3]]
    with pytest.raises(UsageError, match="group_step of key 'a' is nan"):
        other.states.load(states | {("a", "group_step"): torch.tensor(torch.nan)}, weights)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("KeepsInGroup", "it keeps total in the param group, which all keys share"),
        ("KeepsWords", "it keeps kind of each parameter, which is no tensor"),
        ("KeepsElsewhere", "it keeps state that belongs to no parameter"),
        ("Demanding", "its hyper-parameters need defaults, and total_steps has none"),
        ("Failing", "needs a closure"),
        ("NOT_ONE", "which is no torch.optim.Optimizer"),
        ("Missing", "which is not there"),
    ],
)
def test_a_class_that_a_server_cannot_use_is_refused(operator: Any, name: str, why: str) -> None:
    operator(f"counting:{name}")
    with pytest.raises(UsageError, match=rf"optimizer '{name.lower()}'.*counting:{name}.*{why}"):
        describe(name, {})


def test_a_module_that_is_not_there_is_named_and_so_is_the_extra_that_brings_it(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator("absent.module:Class, pytorch_optimizer:Lion")
    with pytest.raises(UsageError, match="optimizer 'class' needs the module 'absent' on the servers and the workers"):
        describe("class", {})
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)  # as if it were not installed
    load.cache_clear()
    with pytest.raises(
        UsageError, match=r"'lion' needs the module 'pytorch_optimizer' \(pip install pytorch-optimizer\) on the"
    ):
        describe("lion", {})


@pytest.mark.parametrize("value", ["x", [1.0, "x"]], ids=str)
def test_hyper_parameters_are_numbers(operator: Any, value: Any) -> None:
    operator("counting:Counting")
    with pytest.raises(UnknownName, match="has no hyper-parameter 'mode'"):
        describe("counting", {"mode": "b"})
    with pytest.raises(UsageError, match=r"betas.* is not a"):
        describe("counting", {"betas": value})
    with pytest.raises(UsageError, match=r"betas.* is not a"):
        describe("counting", {"groups": [{"keys": ["w"], "betas": value}]})


def test_a_name_that_is_taken_is_refused(operator: Any) -> None:
    operator("sgd=counting:Counting")
    with pytest.raises(ConfigError, match="'sgd', which another optimizer has; give it a name"):
        describe("counting", {})
    assert describe("sgd", {}).found.cls is torch.optim.SGD


def test_an_installed_distribution_may_bring_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "brings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvstore.optimizers]\nbrought = counting:Elementwise\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert allowed([]) == {"brought": ClassReference("brought", "counting", "Elementwise")}
    assert describe("brought", {}).found.cls is counting.Elementwise


@pytest.mark.parametrize(
    "name",
    ["planted", "planted:Planted", "planted.Planted", "torch.optim:SGD", "os:system", "__import__", "other=planted:P"],
)
def test_a_name_imports_nothing_that_is_not_allowed(
    operator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """What a member of the job sends is looked up, never imported or evaluated."""
    (tmp_path / "planted.py").write_text("from counting import Counting as Planted\nP = Planted\n")
    monkeypatch.syspath_prepend(tmp_path)
    operator("counting:Counting, allowed=planted:Planted")
    with pytest.raises(UnknownName, match="no optimizer"):
        describe(name, {})
    assert "planted" not in sys.modules, "it is imported when it is asked for by the name that it has"


def test_a_class_of_the_library_that_the_extra_brings(operator: Any) -> None:
    library = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
    operator("pytorch_optimizer:Lion, pyo_lamb=pytorch_optimizer:Lamb")
    for name, cls in (("lion", library.Lion), ("pyo_lamb", library.Lamb)):
        ours, theirs = torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(-1, 1, 6).view(2, 3)
        updater, optimizer = (
            Updater(describe(name, {"learning_rate": 0.1, "wd": 0.1})),
            cls([theirs], lr=0.1, weight_decay=0.1),
        )
        for step in range(3):
            grad = torch.linspace(1, step, 6).view(2, 3)
            theirs.grad = grad.clone()
            optimizer.step()
            updater.update([("w", ours, grad)])
        torch.testing.assert_close(ours, theirs)


def stepped(optimizer: torch.optim.Optimizer, *params: torch.Tensor, grad: float = 1.0) -> list[float]:
    for param in params:
        param.grad = torch.full_like(param, grad)
    optimizer.param_groups[0]["params"] = list(params)
    optimizer.step()
    return [param.item() for param in params]


def test_each_parameter_has_its_own_count() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    cls: Any = with_own_counts(Counting)
    optimizer = cls([one])
    assert stepped(optimizer, one) == [-1]
    assert stepped(optimizer, one, other) == [-3, -1]
    assert stepped(optimizer, other, one) == [-3, -6]
    assert {param: state[COUNT].item() for param, state in optimizer.state.items()} == {one: 3, other: 2}
    assert optimizer.param_groups[0]["params"] == [other, one]
    assert "step" not in optimizer.param_groups[0]


def test_a_count_goes_on_where_it_was() -> None:
    weight = torch.zeros(1)
    cls: Any = with_own_counts(Counting)
    optimizer = cls([weight])
    optimizer.state[weight] = {"sum": torch.ones(1), COUNT: torch.tensor(4.0)}
    assert stepped(optimizer, weight) == [-5]
    assert optimizer.state[weight]["sum"].item() == 2


def test_a_step_that_fails_counts_nothing_and_loses_nothing() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    cls: Any = with_own_counts(Counting)
    optimizer = cls([one])
    stepped(optimizer, one)
    with pytest.raises(FloatingPointError):
        stepped(optimizer, other, one, grad=float("nan"))
    assert optimizer.state[one][COUNT].item() == 1
    assert COUNT not in optimizer.state.get(other, {})
    assert optimizer.param_groups[0]["params"] == [other, one]
