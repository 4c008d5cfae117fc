"""What a trainer trains: whose values its parameters begin with, in which memory, its states, and wrong arguments."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from trained import on_devices, weights

import kvstore as kv
from kvstore import UsageError
from kvstore.client import DistStore
from kvstore.member.session import Session
from kvstore.optim import states_file
from workers import Trainer
from workers.trainer.parameters import collect


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_states_of_a_dist_store(pair: ThreadedJob, update_on_kvstore: bool, tmp_path: Path) -> None:
    def work(session: Session) -> None:
        params = weights(1.0, 1.0)
        stores = [DistStore(session) for _ in params]
        trainers = [
            Trainer([param], "adam", {"lr": 0.1}, store, update_on_kvstore)
            for param, store in zip(params, stores, strict=True)
        ]

        def steps(i: int, count: int) -> None:
            for _ in range(count):
                params[i].grad = torch.full((2,), 0.5)
                trainers[i].step()

        steps(0, 2)
        steps(1, 2)
        path = tmp_path / f"s{session.rank * (not update_on_kvstore)}"
        if session.rank == 0 or not update_on_kvstore:
            trainers[0].save_states(path)
        stores[0].barrier()
        trainers[1].load_states(path)
        steps(0, 2)
        steps(1, 2)
        assert torch.equal(*params)

    pair.run_sessions(work)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((([],)), kv.UsageError, "no parameters"),
        ((weights(0.0), "sdg"), kv.UnknownName, "no optimizer 'sdg'"),
        ((weights(0.0), "sgd", {"momentun": 1}), kv.UnknownName, "no hyper-parameter 'momentun'"),
        ((weights(0.0), "sgd", {"rescale_grad": "half"}), kv.UsageError, "rescale_grad='half' is not a finite number"),
        ((weights(0.0), "sgd", None, "disc"), kv.UnknownName, "no store 'disc'"),
        ((weights(0.0), "sgd", None, "dist_sync"), kv.ConfigError, "launch.py"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Trainer(*arguments)


def test_the_weights_of_rank_zero_count(pair: ThreadedJob) -> None:
    for mode in ("sync", "async"):

        def work(store: DistStore) -> list[list[float]]:
            params = weights(5.0 + store.rank, 7.0)
            Trainer(on_devices(params), "sgd", None, store)
            return [param.tolist() for param in params]

        assert pair.run(work, mode=mode) == [[[5, 5], [5, 5]]] * 2


@pytest.mark.parametrize(
    "share", [{"share_gradients": True}, {"share_weights": True}, {"share_gradients": True, "share_weights": True}]
)
def test_memory_that_is_shared_gives_the_same_weights(share: dict[str, bool]) -> None:
    def train(store: Any, **options: bool) -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
        for number, param in enumerate(model.parameters()):  # threads share torch's own generator
            torch.nn.init.normal_(param, std=0.3, generator=torch.Generator().manual_seed(number))
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, store, **options)
        for step in range(9):
            model[0].requires_grad_(not 3 <= step < 6)  # frozen for a while, in which momentum moves nothing
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + store.rank))
            trainer.zero_grad()
            model(batch).square().mean().backward()
            trainer.step(ignore_stale_grad=step >= 3)
        return [param.detach().clone() for param in model.parameters()]

    results = []
    for options in ({}, share):
        with ThreadedJob(2, 2, bigarray_bound=2**40) as pair:
            results.append(pair.run(lambda store, options=options: train(store, **options)))
    for plain, shared in zip(*results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, shared, strict=True))


class Layers(nn.Module):
    """Two layers of one shape, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(3)
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def steps(self, trainer: Trainer, *numbers: int) -> Layers:
        for number in numbers:
            trainer.zero_grad()
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            self.last(self.second(self.first(inputs).tanh()).tanh()).square().mean().backward()
            trainer.step()
        return self

    def turned(self) -> list[nn.Parameter]:
        return [*self.second.parameters(), *self.first.parameters(), *self.last.parameters()]


ON = [{"kvstore": None}, {"kvstore": "local", "update_on_kvstore": True}]
on = pytest.mark.parametrize("on", ON, ids=["in the worker", "on the store"])
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}


def saved_layers(on: dict[str, Any], path: Path, **options: Any) -> tuple[Layers, Trainer]:
    model = Layers()
    trainer = Trainer(model.parameters(), "sgd", MOMENTUM | options, **on)
    model.steps(trainer, 0, 1)
    trainer.save_states(path)
    return model, trainer


def copied(model: Layers) -> Layers:
    other = Layers()
    other.load_state_dict(model.state_dict())
    return other


def equal_weights(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), two.parameters(), strict=True))


@on
def test_states_of_parameters_without_names_are_of_the_same_order(on: dict[str, Any], tmp_path: Path) -> None:
    model, first = saved_layers(on, tmp_path / "s")
    again = copied(model)
    trainer = Trainer(again.parameters(), "sgd", MOMENTUM, **on)
    trainer.load_states(tmp_path / "s")
    before = copied(model)
    assert equal_weights(again.steps(trainer, 2), model.steps(first, 2))
    first.load_states(tmp_path / "s")  # of itself, it knows the order whatever the values are by now
    model = before
    turned = Trainer(copied(model).turned(), "sgd", MOMENTUM, **on)
    with pytest.raises(kv.UsageError, match=r"in another order: parameter 0 was .*named_parameters\(\)"):
        turned.load_states(tmp_path / "s")
    swapped = copied(model)
    odd = Trainer([*swapped.last.parameters(), *swapped.first.parameters()], "sgd", MOMENTUM, **on)
    with pytest.raises(kv.UsageError, match=r"in another order: parameter 0 was float32\[3, 3\].* is float32\[1, 3\]"):
        odd.load_states(tmp_path / "s")


@on
def test_an_order_that_cannot_be_known_is_refused(on: dict[str, Any], tmp_path: Path) -> None:
    saved_layers(on, tmp_path / "s")
    fresh = Trainer(Layers().parameters(), "sgd", MOMENTUM, **on)
    with pytest.raises(kv.UsageError, match=r"cannot be told .* Load the weights that were saved with it"):
        fresh.load_states(tmp_path / "s")
    for lr, refused in ((0.0, True), (0.1, False)):
        model = Layers()
        nn.init.zeros_(model.first.bias), nn.init.zeros_(model.second.bias)
        trainer = Trainer(model.parameters(), "sgd", {"learning_rate": lr, "momentum": 0.9}, **on)
        model.steps(trainer, 0)
        trainer.save_states(tmp_path / "equal")
        other = Trainer(copied(model).parameters(), "sgd", MOMENTUM, **on)
        if refused:
            with pytest.raises(kv.UsageError, match="1 and 3 have no names, one shape, equal values and different"):
                other.load_states(tmp_path / "equal")
        else:
            other.load_states(tmp_path / "equal")


@on
def test_parameters_with_names_may_come_in_any_order(on: dict[str, Any], tmp_path: Path) -> None:
    model = Layers()
    trainer = Trainer(model.named_parameters(), "sgd", MOMENTUM, **on)
    model.steps(trainer, 0, 1)
    trainer.save_states(tmp_path / "s")
    again = copied(model)
    turned = Trainer(list(reversed(list(again.named_parameters()))), "sgd", MOMENTUM, **on)
    turned.load_states(tmp_path / "s")
    assert equal_weights(again.steps(turned, 2), model.steps(trainer, 2))


@on
def test_a_parameter_without_states_in_the_file_is_said(
    on: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Layers()
    named = dict(model.named_parameters())
    bias = named.pop("second.bias")
    trainer = Trainer(named, "sgd", MOMENTUM, **on)
    model.steps(trainer, 0)
    trainer.save_states(tmp_path / "s")
    more = Trainer(copied(model).named_parameters(), "sgd", MOMENTUM, **on)
    more.load_states(tmp_path / "s")
    assert bias is not None
    (said,) = [record.getMessage() for record in caplog.records if "has no states" in record.getMessage()]
    assert "has no states of 'second.bias'" in said


@on
def test_files_of_before_are_loaded_as_before(on: dict[str, Any], tmp_path: Path) -> None:
    model, trainer = saved_layers(on, tmp_path / "s")
    name, states = states_file.read(tmp_path / "s")
    note = json.loads(states_file.read_note(tmp_path / "s") or "")
    old = json.dumps({"num_update": note["num_update"], "groups": note["groups"], "tables": []})
    states_file.write(tmp_path / "old", name, states, note=old)
    again = copied(model)
    other = Trainer(again.parameters(), "sgd", MOMENTUM, **on)
    other.load_states(tmp_path / "old")
    assert other.num_update == 2
    assert equal_weights(again.steps(other, 2), model.steps(trainer, 2))
    for wrong in ([[1]], [["a", 1, 2, 3]], 5):
        states_file.write(tmp_path / "odd", name, states, note=json.dumps(note | {"unnamed": wrong}))
        with pytest.raises(kv.UsageError, match="is damaged"):
            Trainer(copied(model).parameters(), "sgd", MOMENTUM, **on).load_states(tmp_path / "odd")


class Resumed(type(kv.create("local"))):  # type: ignore[misc]
    """A store whose job continues from a checkpoint that has states by these names."""

    def __init__(self, **states: Any) -> None:
        super().__init__()
        self.states = states

    def attach(self, name: str, thing: Any, *, shared: bool = False) -> bool:
        state = self.states.get(name.replace(" ", "_"))
        if state is not None:
            thing.load_state_dict(state)
        return state is not None


def test_a_checkpoint_is_found_whatever_the_order_of_the_parameters() -> None:
    state = {"rates": json.dumps({"num_update": 7, "groups": [{"lr": 0.125}]})}
    for order, name in ((["w", "b"], "trainer_of_w"), (["w", "b"], "trainer_of_b"), (["b", "w"], "trainer_of_b")):
        store = Resumed(**{name: state})  # older versions called it after the first parameter
        trainer = Trainer({key: weights(0.0)[0] for key in order}, "sgd", {"lr": 0.25}, store, True)
        assert (trainer.num_update, trainer.learning_rate) == (7, 0.125)


# ---- The parameters of a Trainer: whatever torch gives becomes one list by key, with a tensor per device


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]


@pytest.mark.parametrize(
    ("give", "keys"),
    [
        (lambda model: model.named_parameters(), NAMES),
        (lambda model: list(model.named_parameters()), NAMES),
        (lambda model: dict(model.named_parameters()), NAMES),
        (lambda model: model.parameters(), [0, 1, 2, 3, 4]),
        (lambda model: tuple(model.parameters()), [0, 1, 2, 3, 4]),
        (lambda model: [(7, model[0].weight)], [7]),
        (lambda model: {"w": model[0].weight}, ["w"]),
        (lambda model: [list(model.parameters())], [0, 1, 2, 3, 4]),
    ],
)
def test_one_device(give: Any, keys: list[Any]) -> None:
    model = network()
    params = collect(give(model)).params
    assert [param.key for param in params] == keys
    assert all(len(param.tensors) == 1 for param in params)
    assert params[0].tensors[0] is model[0].weight


@pytest.mark.parametrize(
    "give",
    [
        lambda model: model.named_parameters(),
        lambda model: model.parameters(),
        lambda model: dict(model.named_parameters()),
        lambda model: list(model.parameters()),
    ],
)
def test_several_devices(give: Any) -> None:
    models = [network() for _ in range(3)]
    params = collect([give(model) for model in models]).params
    assert len(params) == 5
    for i, model in enumerate(models):
        assert params[0].tensors[i] is model[0].weight
        assert params[4].tensors[i] is model[2].weight


def test_parameters_that_are_not_trained_are_left_out() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    assert [param.key for param in collect(model.named_parameters()).params] == NAMES[1:]
    assert [param.key for param in collect(model.parameters()).params] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ([], "no parameters"),
        ({}, "no parameters"),
        ([[]], "no parameters"),
        ([torch.zeros(1)], "no parameters that require a gradient"),
        ([("w", nn.Parameter(torch.zeros(1)))] * 2, "the same name"),
        ([("w", 3)], "not tuple"),
        ({"w": 3}, "a parameter must be a tensor"),
        ([[3]], "not int"),
        ([nn.Parameter(torch.zeros(1)), 3], "not int"),
    ],
)
def test_what_is_no_list_of_parameters(params: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        collect(params)


@pytest.mark.parametrize(
    "model",
    [network(), nn.Bilinear(2, 2, 1), nn.ModuleList([network()]), [network()] * 2],
    ids=lambda model: type(model).__name__,
)
def test_a_model_in_place_of_its_parameters(model: Any) -> None:
    with pytest.raises(UsageError, match=r"not the model: pass model\.named_parameters\(\)"):
        collect(model)


def test_a_parameter_list_is_a_list() -> None:
    assert [param.key for param in collect(nn.ParameterList([torch.zeros(1), torch.zeros(2)])).params] == [0, 1]


def test_devices_with_different_parameters() -> None:
    one, two = network(), copy.deepcopy(network())
    two[0] = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="different parameters"):
        collect([one.named_parameters(), two.named_parameters()])
    with pytest.raises(UsageError, match="different parameters"):
        collect([one.named_parameters(), one.parameters()])
    with pytest.raises(UsageError, match="different parameters"):
        collect([one.parameters(), list(one.parameters())[:-1]])


def test_gradients() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    (param,) = collect([{"w": weight} for weight in weights]).params
    weights[0].grad = torch.ones(2)
    with pytest.raises(UsageError, match=r"'w' has no gradient: call backward\(\)"):
        param.gradients()
    weights[1].grad = torch.zeros(2)
    assert [grad.tolist() for grad in param.gradients()] == [[1, 1], [0, 0]]


def test_a_parameter_without_elements_takes_no_number() -> None:
    model = network()
    empty = nn.Parameter(torch.empty(0, 4))  # such as that of workers.Embedding
    listed = [empty, *model[0].parameters(), empty, *model[1].parameters()]  # type: ignore[index, operator]
    for given in (listed, [{"params": listed[:3]}, {"params": listed[4:]}]):
        assert [param.key for param in collect(given).params] == [0, 1, 2, 3]
