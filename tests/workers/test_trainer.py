"""Trainer: Gluon's decisions and numbers, alone, on several devices and on several workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.dist import DistStore
from kvstore.member.session import Session
from kvstore.optim import states_file
from kvstore.optim.states import OptimizerStates
from workers import Trainer

HOWS: list[dict[str, Any]] = [
    {"kvstore": None},
    {"kvstore": "local"},
    {"kvstore": "device"},
    {"kvstore": "device", "update_on_kvstore": True},
    {"kvstore": "local", "update_on_kvstore": False},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def backward(model: nn.Module, data: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(data), labels, reduction=reduction).backward()


def plain_run(steps: int, **options: Any) -> nn.Module:
    """What torch.optim alone makes of the network."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(steps):
        backward(model, *batch(step))
        optimizer.step()
    return model


def same(one: nn.Module, two: nn.Module, atol: float = 1e-6) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def weights(*values: float) -> list[nn.Parameter]:
    """One parameter ``w`` on as many devices as there are values."""
    return [nn.Parameter(torch.full((2,), value)) for value in values]


def on_devices(params: list[nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    return [{"w": param} for param in params]


# ---- Gluon's decision table


def decided(devices: int, environ: str = "1", **how: Any) -> tuple[str | None, bool]:
    """The type of the store that is used, and whether it updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)
        trainer = Trainer(on_devices(weights(*[0.0] * devices)), "sgd", **how)
    return (None if trainer._store is None else trainer._store.type), trainer.update_on_kvstore


@pytest.mark.parametrize(
    ("devices", "how", "decision"),
    [
        (1, {}, (None, False)),
        (2, {}, ("device", True)),
        (1, {"kvstore": None}, (None, False)),
        (1, {"kvstore": "local"}, (None, False)),
        (2, {"kvstore": "local"}, ("local", True)),
        (2, {"kvstore": "local", "environ": "0"}, ("local", False)),
        (2, {"kvstore": "device", "environ": "0"}, ("device", False)),
        (2, {"kvstore": "device", "environ": "0", "update_on_kvstore": True}, ("device", True)),
        (2, {"kvstore": "device", "update_on_kvstore": False}, ("device", False)),
        (1, {"kvstore": "device", "update_on_kvstore": True}, ("device", True)),
        (1, {"kvstore": "device", "update_on_kvstore": False}, ("device", False)),
        (1, {"kvstore": None, "update_on_kvstore": True}, (None, False)),
    ],
)
def test_local_stores(devices: int, how: dict[str, Any], decision: tuple[str | None, bool]) -> None:
    assert decided(devices, **how) == decision


def test_several_devices_need_a_store() -> None:
    with pytest.raises(kv.UsageError, match="pass kvstore='device'"):
        Trainer(on_devices(weights(0.0, 0.0)), "sgd", kvstore=None)


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


@pytest.mark.parametrize(
    ("mode", "environ", "wanted", "updates"),
    [
        ("sync", "1", None, True),
        ("sync", "0", None, False),
        ("sync", "1", False, False),
        ("sync", "0", True, True),
        ("async", "1", None, True),
        ("async", "0", None, True),
        ("async", "0", True, True),
    ],
)
def test_dist_stores(
    cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch, mode: str, environ: str, wanted: bool | None, updates: bool
) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)

    def work(store: DistStore) -> bool:
        return Trainer(on_devices(weights(0.0)), "sgd", kvstore=store, update_on_kvstore=wanted).update_on_kvstore

    assert cluster.run(work, mode=mode) == [updates] * 2


def test_an_async_store_must_update(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        with pytest.raises(kv.UsageError, match="update_on_kvstore=False cannot be"):
            Trainer(on_devices(weights(0.0)), "sgd", kvstore=store, update_on_kvstore=False)

    cluster.run(work, mode="async")


def test_a_store_that_cannot_update_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    store = kv.create("device")
    monkeypatch.setattr(store, "is_capable", lambda capability: False)
    trainer = Trainer(on_devices(weights(0.0, 0.0)), "sgd", kvstore=store)
    assert (trainer._store, trainer.update_on_kvstore) == (store, False)


# ---- steps


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_alone_it_is_torch_optim(how: dict[str, Any]) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", options, **how)
    for step in range(5):
        backward(model, *batch(step))
        trainer.step()
    same(model, plain_run(5, **options))


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_batch_size_divides_the_gradient_of_a_sum(how: dict[str, Any]) -> None:
    model = network()
    trainer = Trainer(model.parameters(), "sgd", {"learning_rate": 0.1}, **how)
    for step in range(3):
        backward(model, *batch(step), reduction="sum")
        trainer.step(12)
    same(model, plain_run(3, lr=0.1))


@pytest.mark.parametrize("how", HOWS[1:], ids=str)
def test_two_devices_do_as_one_with_both_batches(how: dict[str, Any]) -> None:
    models = [network(0), network(1)]
    options = {"lr": 0.1, "momentum": 0.9}
    trainer = Trainer([model.named_parameters() for model in models], "sgd", options, **how)
    same(*models, atol=0)  # the first one's weights count
    for step in range(4):
        data, labels = batch(step)
        for model, part in zip(models, (slice(0, 6), slice(6, 12)), strict=True):
            backward(model, data[part], labels[part])
        trainer.step()
        same(*models, atol=0)
    same(models[0], plain_run(4, **options))


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_two_workers_do_as_one_with_both_batches(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    options = {"lr": 0.1, "momentum": 0.9}

    def work(store: DistStore) -> nn.Module:
        model = models[store.rank]
        trainer = Trainer(model.named_parameters(), "sgd", options, store, update_on_kvstore)
        for step in range(4):
            data, labels = (half[6 * store.rank : 6 * store.rank + 6] for half in batch(step))
            backward(model, data, labels)
            trainer.step()
        return model

    models = [network(0), network(1)]
    one, two = cluster.run(work)
    same(one, two, atol=0)
    same(one, plain_run(4, **options))


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_gluon_step_on_several_workers(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    """MXNet's nightly test: every worker's gradient is its rank + 1, so w == 1 - n(n+1)/2."""

    def work(store: DistStore) -> list[float]:
        (param,) = weights(1.0)
        trainer = Trainer({"w": param}, "sgd", {"learning_rate": 1.0}, store, update_on_kvstore)
        param.grad = torch.full((2,), store.rank + 1.0)
        trainer.step(1)
        return param.tolist()

    assert cluster.run(work) == [[-2.0, -2.0]] * 2


def test_an_async_store_updates_for_every_worker(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        (param,) = weights(1.0)
        trainer = Trainer({"w": param}, "sgd", {"learning_rate": 1.0}, store)
        param.grad = torch.full((2,), store.rank + 1.0)
        trainer.step(1)
        store.barrier()
        param.grad = torch.zeros(2)
        trainer.step(1)
        return param.tolist()

    assert cluster.run(work, mode="async") == [[-2.0, -2.0]] * 2


def test_gluons_own_numbers_on_two_devices() -> None:
    """MXNet's test_trainer: gradients of one on two devices, lr 1, momentum 0.5."""
    params = weights(0.0, 0.0)
    trainer = Trainer(on_devices(params), "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    for expected in (-2, -5):
        for param in params:
            param.grad = torch.ones(2)
        trainer.step(1)
        assert [param.tolist() for param in params] == [[expected] * 2] * 2


def test_allreduce_grads_and_then_update() -> None:
    params = weights(0.0, 0.0)
    trainer = Trainer(on_devices(params), "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    for i, param in enumerate(params):
        param.grad = torch.full((2,), float(i))
    trainer.allreduce_grads()
    assert [param.grad.tolist() for param in params if param.grad is not None] == [[1, 1], [1, 1]]
    for param in params:
        assert param.grad is not None
        param.grad.clamp_(max=0.5)
    trainer.update(1)
    assert [param.tolist() for param in params] == [[-0.5, -0.5]] * 2


def test_without_a_store_there_is_nothing_to_sum() -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0}, None)
    param.grad = torch.ones(2)
    trainer.allreduce_grads()
    trainer.update()
    assert param.tolist() == [-1, -1]


def test_on_the_store_the_two_halves_of_a_step_are_one() -> None:
    trainer = Trainer(on_devices(weights(0.0, 0.0)), "sgd")
    with pytest.raises(kv.UsageError, match=r"allreduce_grads\(\) is for update_on_kvstore=False"):
        trainer.allreduce_grads()
    with pytest.raises(kv.UsageError, match=r"update\(\) is for update_on_kvstore=False"):
        trainer.update(1)


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


def test_zero_grad() -> None:
    params = weights(0.0, 0.0)
    trainer = Trainer(on_devices(params), "sgd")
    for param in params:
        param.grad = torch.ones(2)
    trainer.zero_grad()
    assert [param.grad for param in params] == [None, None]


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
def test_the_learning_rate_changes_on_the_servers(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    """MXNet's set_learning_rate does nothing on a dist store."""

    def work(store: DistStore) -> list[float]:
        (param,) = weights(0.0)
        trainer = Trainer([param], "sgd", {"learning_rate": 1.0}, store, update_on_kvstore)
        for lr in (1.0, 0.25):
            trainer.set_learning_rate(lr)
            param.grad = torch.ones(2)
            trainer.step()
        return param.tolist()

    assert cluster.run(work) == [[-1.25, -1.25]] * 2


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


def stepped_and_saved(how: dict[str, Any], path: Path) -> tuple[Trainer, str, OptimizerStates]:
    """A Trainer after a step of Adam, and the optimizer's name and the states that it has written to ``path``."""
    (param,) = weights(1.0)
    trainer = Trainer({"w": param}, "adam", {"learning_rate": 0.1}, **how)
    param.grad = torch.ones(2)
    trainer.step()
    trainer.save_states(path)
    return trainer, *states_file.read(path)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_states_that_torch_would_read_past_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    trainer, name, found = stepped_and_saved(how, tmp_path / "s")
    one = {where: torch.tensor(1.0) for where in found}
    states_file.write(tmp_path / "odd", name, one, note=states_file.read_note(tmp_path / "s"))
    with pytest.raises(kv.Mismatch, match=r"these are not adam's states of key 'w': .*exp_avg float32\[\]"):
        trainer.load_states(tmp_path / "odd")
    trainer.save_states(tmp_path / "after")
    assert all(torch.equal(value, found[where]) for where, value in states_file.read(tmp_path / "after")[1].items())


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


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_states_of_a_dist_store(cluster: ThreadedJob, update_on_kvstore: bool, tmp_path: Path) -> None:
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

    cluster.run_sessions(work)


# ---- errors


def test_a_parameter_without_a_gradient() -> None:
    params = {"used": nn.Parameter(torch.zeros(1)), "unused": nn.Parameter(torch.zeros(1))}
    for how in HOWS:
        trainer = Trainer(params, "sgd", **how)
        params["used"].grad = torch.ones(1)
        with pytest.raises(kv.UsageError, match=r"'unused' has no gradient: call backward\(\) before step\(\)"):
            trainer.step()
        assert params["used"].item() == 0


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_is_positive(batch_size: int) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd")
    param.grad = torch.ones(2)
    with pytest.raises(kv.UsageError, match="must be positive"):
        trainer.step(batch_size)
    assert param.tolist() == [0, 0]


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


def test_workers_with_different_batch_sizes_are_told(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        (param,) = weights(0.0)
        trainer = Trainer({"w": param}, "sgd", None, store)
        param.grad = torch.ones(2)
        with pytest.raises(kv.Mismatch, match=r"disagree on the rescale_grad .*'w': 1 on worker 0, 0\.5 on worker 1"):
            trainer.step(1 + store.rank)

    cluster.run(work)


def test_the_weights_of_rank_zero_count(cluster: ThreadedJob) -> None:
    for mode in ("sync", "async"):

        def work(store: DistStore) -> list[list[float]]:
            params = weights(5.0 + store.rank, 7.0)
            Trainer(on_devices(params), "sgd", None, store)
            return [param.tolist() for param in params]

        assert cluster.run(work, mode=mode) == [[[5, 5], [5, 5]]] * 2


@pytest.mark.parametrize(
    "share", [{"share_gradients": True}, {"share_weights": True}, {"share_gradients": True, "share_weights": True}]
)
def test_memory_that_is_shared_gives_the_same_weights(share: dict[str, bool]) -> None:
    def train(store: Any, **options: bool) -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
        for number, param in enumerate(model.parameters()):  # threads share torch's own generator
            torch.nn.init.normal_(param, std=0.3, generator=torch.Generator().manual_seed(number))
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, store, **options)
        for step in range(5):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + store.rank))
            trainer.zero_grad()
            model(batch).square().mean().backward()
            trainer.step()
        return [param.detach().clone() for param in model.parameters()]

    results = []
    for options in ({}, share):
        with ThreadedJob(2, 2, bigarray_bound=2**40) as cluster:
            results.append(cluster.run(lambda store, options=options: train(store, **options)))
    for plain, shared in zip(*results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, shared, strict=True))


@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_a_store_updates_for_one_trainer(cluster: ThreadedJob, store: str) -> None:
    def work(store: kv.KVStore) -> None:
        body, head = nn.Linear(6, 4), nn.Linear(4, 3)
        how: dict[str, Any] = {"kvstore": store, "update_on_kvstore": True}
        with pytest.raises(kv.UnknownName):
            Trainer(body.named_parameters("body"), "sgd", {"nonsense": 1}, **how)
        Trainer(body.named_parameters("body"), "sgd", {"learning_rate": 0.5}, **how)
        with pytest.raises(kv.UsageError, match=r"updates for another Trainer already; make one more with kvstore\.c"):
            Trainer(head.named_parameters("head"), "sgd", **how)
        assert store.learning_rate == 0.5

    if store == "local":
        work(kv.create(store))
    else:
        cluster.run(work)


def test_trainers_that_sum_on_one_store_have_names_of_their_own() -> None:
    store = kv.create("local")
    model, how = network(), {"kvstore": store, "update_on_kvstore": False}
    Trainer({f"one.{name}": its for name, its in model.named_parameters()}, **how)
    Trainer({f"two.{name}": its for name, its in model.named_parameters()}, **how)
    with pytest.raises(
        kv.UsageError, match=r"another model's values: key 'one.0.weight' is already initialized; make o"
    ):
        Trainer({f"one.{name}": its for name, its in model.named_parameters()}, **how)


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
