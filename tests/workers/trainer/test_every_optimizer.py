"""Trainer against torch.optim in one process on the joined batch: every optimizer, groups, on the servers and here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from kvstore.optim.optimizer import find, names
from workers import Trainer

STEPS = 12  # more than t0 of ASGD
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    "amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "nadam": ("NAdam", {"lr": 0.01}),
    "radam": ("RAdam", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
    "rmsprop": ("RMSprop", {"lr": 0.001, "momentum": 0.9, "centered": True}),
    "rprop": ("Rprop", {"lr": 0.001}),
    "asgd": ("ASGD", {"lr": 0.1, "t0": 10.0}),
    "adafactor": ("Adafactor", {"lr": 0.01}),
    "muon": ("Muon", {"lr": 0.01}),
    "adabelief": ("AdaBelief", {"lr": 0.01, "weight_decay": 0.01}),
    "dcasgd": ("DCASGD", {"lr": 0.1, "momentum": 0.9, "lamda": 0.5}),
    "ftml": ("FTML", {"lr": 0.01}),
    "ftrl": ("Ftrl", {"lr": 0.5, "lamda1": 0.001}),
    "groupadagrad": ("GroupAdaGrad", {"lr": 0.1}),
    "lamb": ("LAMB", {"lr": 0.01, "weight_decay": 0.01}),
    "lans": ("LANS", {"lr": 0.01, "weight_decay": 0.01}),
    "lars": ("LARS", {"lr": 0.1, "momentum": 0.9, "eta": 0.1, "weight_decay": 0.01}),
    "rowwiseadagrad": ("RowWiseAdagrad", {"lr": 0.1}),
    "rowwiseadam": ("RowWiseAdam", {"lr": 0.01, "weight_decay": 0.01}),
    "signum": ("Signum", {"lr": 0.003}),
}
HERE = {case: its for case, its in CASES.items() if its[0].lower() in names()}


def network(*, matrices: bool = False) -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 8, bias=not matrices), nn.Tanh(), nn.Linear(8, 3, bias=not matrices))
    generator = torch.Generator().manual_seed(0)
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 3
    return made


def backward(model: nn.Module, step: int, part: slice) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    data, labels = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(data[part]), labels[part]).backward()


def together(pair: ThreadedJob, build: Callable[[nn.Module, DistStore], Any], **network_options: Any) -> nn.Module:
    """The model that two workers have after the steps of what ``build`` gives; the same on both."""
    models = [network(**network_options) for _ in range(2)]

    def work(store: DistStore) -> None:
        stepper = build(models[store.rank], store)
        for step in range(STEPS):
            backward(models[store.rank], step, slice(6 * store.rank, 6 * store.rank + 6))
            stepper()

    pair.run(work)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    return models[0]


def alone(build: Callable[[nn.Module], Any], **network_options: Any) -> nn.Module:
    model = network(**network_options)
    stepper = build(model)
    for step in range(STEPS):
        backward(model, step, slice(0, 12))
        stepper()
    return model


def difference(one: nn.Module, two: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_every_optimizer_has_a_case() -> None:
    assert {name.lower() for name, _ in HERE.values()} == set(names()) - {"nag", "sgld"}


# Workers step an optimizer of the class itself: one of torch's, one of ours, and each that needs all of a matrix.
IN_WORKERS = {"momentum", "amsgrad", "muon", "adafactor", "ftml", "lans"} & HERE.keys()


@pytest.mark.parametrize(
    ("case", "update_on_kvstore"), [*((case, True) for case in HERE), *((case, False) for case in sorted(IN_WORKERS))]
)
def test_as_torch_on_the_joined_batch(pair: ThreadedJob, case: str, update_on_kvstore: bool) -> None:
    name, options = HERE[case]
    matrices = find(name.lower()).dims == 2

    def trainer(model: nn.Module, store: DistStore) -> Any:
        return Trainer(model.named_parameters(), name, options, store, update_on_kvstore).step

    ours = together(pair, trainer, matrices=matrices)
    cls: Any = find(name.lower()).cls
    theirs = alone(lambda model: cls(model.parameters(), **options).step, matrices=matrices)
    assert difference(theirs, network(matrices=matrices)) > 1e-3
    assert difference(ours, theirs) <= 1e-5


def groups_of(model: nn.Module, **first: Any) -> list[dict[str, Any]]:
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": weights, **first}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]


@pytest.mark.parametrize("update_on_kvstore", [True, False], ids=["on the servers", "in the workers"])
@pytest.mark.parametrize(
    ("name", "options", "first"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.5}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}, {"betas": (0.8, 0.99)}),
        ("Adagrad", {"lr": 0.01}, {"lr_decay": 0.5}),
        ("SGD", {"lr": 0.1}, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_parameter_groups(
    pair: ThreadedJob, name: str, options: dict[str, Any], first: dict[str, Any], update_on_kvstore: bool
) -> None:
    def trainer(model: nn.Module, store: DistStore) -> Any:
        return Trainer(groups_of(model, **first), name, options, store, update_on_kvstore).step

    cls = getattr(torch.optim, name)
    theirs = alone(lambda model: cls(groups_of(model, **first), **options).step)
    assert difference(together(pair, trainer), theirs) <= 1e-5
    assert difference(alone(lambda model: cls(model.parameters(), **options).step), theirs) > 1e-3


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_groups_where_every_push_is_an_update(mode: str) -> None:
    """One worker, so that the order of updates is one."""
    from kvstore.rule import Rule

    options = {"lr": 0.1, "momentum": 0.9}
    rule = Rule("async", 3 if mode == "ssp" else None)
    model = network()

    def work(store: DistStore) -> None:
        trainer = Trainer(groups_of(model), "sgd", options, store)
        for step in range(STEPS):
            backward(model, step, slice(0, 12))
            trainer.step()

    with ThreadedJob(workers=1, servers=2, bigarray_bound=30) as pair:
        pair.run(work, mode=mode, rule=rule)
    assert difference(model, alone(lambda model: torch.optim.SGD(groups_of(model), **options).step)) <= 1e-5


def test_the_groups_of_an_instance(pair: ThreadedJob) -> None:
    def trainer(model: nn.Module, store: DistStore) -> Any:
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        return Trainer(model.named_parameters(), optimizer, None, store).step

    theirs = alone(lambda model: torch.optim.AdamW(groups_of(model), lr=0.01).step)
    assert difference(together(pair, trainer), theirs) <= 1e-5


def test_an_instance_has_its_groups_rate_not_its_default() -> None:
    param = nn.Parameter(torch.zeros(1))
    trainer = Trainer([param], torch.optim.SGD([{"params": [param], "lr": 0.5}], lr=0.1), None, None)
    assert trainer.learning_rate == 0.5


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_multipliers_in_a_group(how: dict[str, Any]) -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": params[:1], "lr_mult": 0.5, "wd_mult": 0.0}, {"params": params[1]}]
    trainer = Trainer(groups, "sgd", {"learning_rate": 1.0, "wd": 0.5}, **how)
    for param in params:
        param.grad = torch.full((1,), 0.25)
    trainer.step(1)
    assert [param.item() for param in params] == [1 - 0.5 * 0.25, 1 - 0.75]
    trainer.set_learning_rate(0.0)
    trainer.step(1)
    assert [param.item() for param in params] == [1 - 0.5 * 0.25, 1 - 0.75]


@pytest.mark.parametrize("update_on_kvstore", [True, False], ids=["on the servers", "in the workers"])
def test_states_of_groups_are_saved_and_loaded(pair: ThreadedJob, update_on_kvstore: bool, tmp_path: Any) -> None:
    """The second half of a run that goes on from a file has the bits of one that was not interrupted."""

    def train(store: DistStore, model: nn.Module, steps: range, path: str, load: bool) -> None:
        mine = f"{path}{0 if update_on_kvstore else store.rank}"
        trainer = Trainer(groups_of(model, momentum=0.5), "sgd", {"lr": 0.1}, store, update_on_kvstore)
        if load:
            trainer.load_states(mine)
        for step in steps:
            backward(model, step, slice(6 * store.rank, 6 * store.rank + 6))
            trainer.step()
        if not load and (store.rank == 0 or not update_on_kvstore):
            trainer.save_states(mine)
        store.barrier()

    whole, parts = [network() for _ in range(2)], [network() for _ in range(2)]
    path = str(tmp_path / "states")
    pair.run(lambda store: train(store, whole[store.rank], range(6), path + "whole", False))
    pair.run(lambda store: train(store, parts[store.rank], range(3), path, False))
    pair.run(lambda store: train(store, parts[store.rank], range(3, 6), path, True))
    assert difference(whole[0], parts[0]) == 0


def test_workers_with_other_groups_are_told(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        groups = [{"keys": ["a"], "lr": 0.5 + store.rank}]
        if store.rank == 0:
            store.set_optimizer("sgd", groups=groups)
        else:
            with pytest.raises(kv.Mismatch, match="set_optimizer differs from worker 0's"):
                store.set_optimizer("sgd", groups=groups)
        store.barrier()

    pair.run(work)


def test_a_changed_momentum_acts_and_disagreement_is_told(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        store.set_optimizer("sgd", lr=1.0, momentum=0.5, groups=[{"keys": ["b"], "lr": 0.5}])
        store.init(["a", "b"], [torch.zeros(1), torch.zeros(1)])
        out = [torch.zeros(1), torch.zeros(1)]
        ones = [torch.full((1,), 0.5)] * 2
        store.pushpull(["a", "b"], ones, out)
        store.set_hyperparameters(momentum=0.25, groups=[{"lr": 0.125}])
        store.pushpull(["a", "b"], ones, out)
        store.set_hyperparameters(momentum=0.25 + store.rank / 4)
        with pytest.raises(kv.Mismatch, match=r"disagree on the momentum .*0\.25 on worker 0, 0\.5 on worker 1"):
            store.pushpull(["a", "b"], ones, out)
        store.set_hyperparameters(momentum=0.25, groups=[{"learning_rate": 0.25 + store.rank}])
        with pytest.raises(kv.Mismatch, match=r"learning rate of group 0 .*0\.25 on worker 0, 1\.25 on worker 1"):
            store.push("b", ones[0]).wait()
        return [its.item() for its in out]

    assert pair.run(work) == [[-1 - 1.25, -0.5 - 0.125 * 1.25]] * 2


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"momentun": 0.5}, kv.UnknownName, "no hyper-parameter 'momentun'"),
        ({"nesterov": True}, kv.UsageError, "only numbers can change; call set_optimizer"),
        ({"momentum": 0.5}, kv.UsageError, "give the optimizer one from the start"),
        ({"groups": [{}, {}]}, kv.UsageError, "2 groups were given, but set_optimizer had 1"),
        ({"groups": [{"lr": "x"}]}, kv.UsageError, "only numbers can change"),
    ],
)
def test_what_cannot_change(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    store = kv.create("local")
    store.set_optimizer("sgd", lr=1.0, groups=[{"keys": ["a"]}])
    with pytest.raises(error, match=text):
        store.set_hyperparameters(**changes)


@pytest.mark.parametrize(
    ("groups", "error", "text"),
    [
        ({"keys": ["a"]}, kv.UsageError, "list of at most"),
        ([{"lr": 1.0}], kv.UsageError, "a list of 'keys'"),
        ([{"keys": ["a"]}, {"keys": ["a"]}], kv.UsageError, "'a' is in two groups"),
        ([{"keys": ["a"], "lrr": 1.0}], kv.UnknownName, "no hyper-parameter 'lrr'"),
        ([{"keys": ["a"], "lr": "fast"}], kv.UsageError, "learning_rate='fast' is not a finite number"),
        ([{"keys": ["a"], "lr": -1.0}], kv.UsageError, "Invalid learning rate"),
    ],
)
def test_groups_that_are_none(groups: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kv.create("local").set_optimizer("sgd", groups=groups)


@pytest.mark.parametrize(("optimizer", "text"), [("LBFGS", "evaluates the loss several times"), ("sdg", "choose from")])
def test_optimizers_that_there_are_not(optimizer: str, text: str) -> None:
    with pytest.raises(kv.UnknownName, match=text):
        Trainer([nn.Parameter(torch.zeros(1))], optimizer)
    if hasattr(torch.optim, optimizer):
        with pytest.raises(kv.UsageError, match=text):
            Trainer([nn.Parameter(torch.zeros(1))], getattr(torch.optim, optimizer))


@pytest.mark.skipif("muon" not in names(), reason="this torch has no Muon")
@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_muon_says_that_it_is_for_matrices(how: dict[str, Any]) -> None:
    with pytest.raises(kv.UsageError, match=r"muon updates matrices only, and key 'v' is float32\[3\]"):
        Trainer({"v": nn.Parameter(torch.zeros(3))}, "muon", **how)
