"""Where updates happen, updates in the worker, and the values that training begins with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import nn
from trained import HOWS, network, on_devices, stepped_and_saved, weights

import kvstore as kv
from kvstore.client import DistStore
from kvstore.optim import states_file
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowHyperparameters
from kvstore.store import registry
from workers import Trainer
from workers.common.tensors import fingerprint
from workers.trainer.local_updates import LocalRows
from workers.trainer.parameters import buffers_beside

# ---- where updates happen: Gluon's table, and which stores a Trainer can have


def decided(devices: int, environ: str = "1", **how: Any) -> tuple[str | None, bool]:
    """The type of the store that is used, and whether it updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)
        trainer = Trainer(on_devices(weights(*[0.0] * devices)), "sgd", **how)
    return (None if trainer.store is None else trainer.store.type), trainer.update_on_kvstore


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
    pair: ThreadedJob, monkeypatch: pytest.MonkeyPatch, mode: str, environ: str, wanted: bool | None, updates: bool
) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)

    def work(store: DistStore) -> bool:
        return Trainer(on_devices(weights(0.0)), "sgd", kvstore=store, update_on_kvstore=wanted).update_on_kvstore

    assert pair.run(work, mode=mode) == [updates] * 2


def test_an_async_store_must_update(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        with pytest.raises(kv.UsageError, match="update_on_kvstore=False does not work with a 'dist_async' store"):
            Trainer(on_devices(weights(0.0)), "sgd", kvstore=store, update_on_kvstore=False)

    pair.run(work, mode="async")


def test_a_store_that_cannot_update_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    store = kv.create("device")
    monkeypatch.setattr(store, "is_capable", lambda capability: False)
    trainer = Trainer(on_devices(weights(0.0, 0.0)), "sgd", kvstore=store)
    assert (trainer.store, trainer.update_on_kvstore) == (store, False)


def test_a_store_of_ones_own_sums_for_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", {})

    @kv.KVStore.register
    class Summing(kv.KVStore):
        def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
            for given, targets in zip(value, out, strict=True):
                for target in targets:
                    target.copy_(given[0])

        def pushpull(
            self, key: Any, value: Any, out: Any = None, priority: int = 0, *, wait: bool = True, copy: bool = True
        ) -> kv.Ticket:
            for given, targets in zip(value, out, strict=True):
                total = torch.stack(given).sum(0)
                for target in targets:
                    target.copy_(total)
            return kv.Ticket("pushpull", key)

    params = weights(0.0, 1.0)
    trainer = Trainer(on_devices(params), "sgd", {"learning_rate": 1.0}, kvstore="summing")
    for param, grad in zip(params, (1.0, 2.0), strict=True):
        param.grad = torch.full_like(param, grad)
    trainer.step(1)
    assert not trainer.update_on_kvstore
    assert all(torch.equal(param, torch.full_like(param, -3.0)) for param in params)
    with pytest.raises(kv.Unsupported):
        Trainer(on_devices(weights(0.0)), "sgd", kvstore="summing", update_on_kvstore=True)


@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_a_store_updates_for_one_trainer(pair: ThreadedJob, store: str) -> None:
    def work(store: kv.KVStore) -> None:
        body, head = nn.Linear(6, 4), nn.Linear(4, 3)
        how: dict[str, Any] = {"kvstore": store, "update_on_kvstore": True}
        with pytest.raises(kv.UnknownName):
            Trainer(body.named_parameters("body"), "sgd", {"nonsense": 1}, **how)
        Trainer(body.named_parameters("body"), "sgd", {"learning_rate": 0.5}, **how)
        for updates in (True, False):
            how["update_on_kvstore"] = updates
            with pytest.raises(
                kv.UsageError, match=r"already updates for another Trainer; make a second store with kvstore\.c"
            ):
                Trainer(head.named_parameters("head"), "sgd", **how)
        assert store.learning_rate == 0.5

    if store == "local":
        work(kv.create(store))
    else:
        pair.run(work)


@pytest.mark.parametrize("store", ["device", "dist_sync"])
def test_a_store_sums_for_several_trainers_and_has_no_optimizer(pair: ThreadedJob, store: str) -> None:
    def work(store: kv.KVStore) -> None:
        params, how = weights(0.0, 0.0), {"kvstore": store, "update_on_kvstore": False}
        trainers = [
            Trainer({str(number): param}, "sgd", {"learning_rate": 1.0 + number}, **how)
            for number, param in enumerate(params)
        ]
        for _ in range(2):
            for param, trainer in zip(params, trainers, strict=True):
                param.grad = torch.ones_like(param)
                trainer.step()
        assert [param.flatten()[0].item() for param in params] == [-2.0, -4.0]
        with pytest.raises(kv.UsageError, match="already sums for another Trainer; make a second store"):
            Trainer({"2": weights(0.0)[0]}, "sgd", kvstore=store, update_on_kvstore=True)
        store.set_optimizer("sgd", learning_rate=0.5)
        for param, trainer in zip(params, trainers, strict=True):
            param.grad = torch.ones_like(param)
            with pytest.raises(kv.UsageError, match="updates with the optimizer of set_optimizer, and a Trainer"):
                trainer.step()
        assert [param.flatten()[0].item() for param in params] == [-2.0, -4.0]
        with pytest.raises(kv.UsageError, match="give each a store of its own"):
            Trainer({"2": weights(0.0)[0]}, "sgd", **how)

    if store == "device":
        work(kv.create(store))
    else:
        pair.run(work)


def test_trainers_that_sum_on_one_store_have_names_of_their_own() -> None:
    store = kv.create("local")
    model, how = network(), {"kvstore": store, "update_on_kvstore": False}
    Trainer({f"one.{name}": its for name, its in model.named_parameters()}, **how)
    Trainer({f"two.{name}": its for name, its in model.named_parameters()}, **how)
    with pytest.raises(
        kv.UsageError, match=r"another model's values: key 'one.0.weight' is already initialized; make a s"
    ):
        Trainer({f"one.{name}": its for name, its in model.named_parameters()}, **how)


# ---- updates in the worker: in place, with states in files, and none where a gradient is not finite


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


# ---- what every worker has from rank 0 when a Trainer is made, and what becomes of frozen parameters


FREEZE = 3  # steps for which the first layer is frozen


def varied(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0 + rank)
    model[0].requires_grad_(False)
    model[1].running_mean.fill_(float(rank))  # type: ignore[operator, union-attr]
    model.register_buffer("mask", torch.arange(3) + rank, persistent=False)
    model.register_buffer("sparse", odd_tensors(rank)["csr"])
    model.register_buffer("few", odd_tensors(rank)["expanded"])
    return model


def prints(model: nn.Module) -> dict[str, int]:
    everything = [*model.named_parameters(), *model.named_buffers()]
    return {name: fingerprint(tensor) for name, tensor in everything}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("give", [lambda model: model.named_parameters(), lambda model: model.parameters()])
def test_every_worker_has_all_of_rank_zeros_model(
    pair: ThreadedJob, give: Callable[[nn.Module], Any], mode: str
) -> None:
    def work(store: DistStore) -> None:
        model = varied(store.rank)
        Trainer(give(model), "sgd", {"lr": 0.1}, kvstore=store)
        assert prints(model) == prints(varied(0))

    pair.run(work, mode=mode)


def test_a_dict_does_not_know_its_buffers_but_has_frozen_parameters(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[Any]:
        model = varied(store.rank)
        Trainer(dict(model.named_parameters()), "sgd", {"lr": 0.1}, kvstore=store)
        return [model[0].weight.tolist(), model.mask.tolist()]  # type: ignore[operator, union-attr, index]

    one, two = pair.run(work)
    assert one[0] == two[0]
    assert (one[1], two[1]) == ([0, 1, 2], [1, 2, 3])


def test_which_modules_are_known() -> None:
    model = varied(0)
    assert set(buffers_beside(model.named_parameters())[0]) == set(dict(model.named_buffers()))
    assert set(buffers_beside(model.parameters(recurse=False))[0]) == {"mask", "sparse", "few"}
    groups = [{"params": model[1].parameters()}, {"params": [model[2].weight]}]
    assert set(buffers_beside(groups)[0]) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert [len(one) for one in buffers_beside([varied(0).parameters(), varied(1).parameters()])] == [6, 6]
    assert buffers_beside(dict(model.named_parameters())) == buffers_beside(list(model.parameters())) == [{}]
    read = model.parameters()
    list(read)
    assert buffers_beside(read) == [{}]


def test_devices_of_one_process_get_the_buffers_and_frozen_parameters_of_the_first() -> None:
    models = [varied(0), varied(1)]
    Trainer([model.named_parameters() for model in models], "sgd", {"lr": 0.1}, kvstore="device")
    assert prints(models[0]) == prints(models[1]) == prints(varied(0))


def frozen_network() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 1))
    generator = torch.Generator().manual_seed(0)  # torch's own is everybody's, and workers are threads here
    for param in model.parameters():
        nn.init.uniform_(param, -0.5, 0.5, generator=generator)
    return model


def train(model: nn.Module, step: Callable[[], object], part: slice, steps: int = 6, begin: int = 0) -> None:
    for number in range(begin, steps):
        model[0].requires_grad_(number >= FREEZE)  # type: ignore[index, union-attr]
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)
        model.zero_grad()
        (model(x[part]) - y[part]).pow(2).mean().backward()
        step()


def expected(steps: int = 6) -> nn.Module:
    model = frozen_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer.step, slice(None), steps)
    return model


def same(model: nn.Module, other: nn.Module) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def frozen() -> nn.Module:
    model = frozen_network()
    model[0].requires_grad_(False)  # type: ignore[index, union-attr]
    return model


SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"overlap": True, "update_on_kvstore": False},
        {"share_gradients": True, "share_weights": True},
        {"update_on_kvstore": False},
        "wait",
    ],
    ids=str,
)
@pytest.mark.parametrize("ignore", [False, True])
def test_what_is_unfrozen_is_trained(pair: ThreadedJob, options: Any, ignore: bool) -> None:
    def work(store: DistStore) -> None:
        model = frozen()
        more = {"wait_in_forward": model, "overlap": True} if options == "wait" else options
        trainer = Trainer(model.named_parameters(), "sgd", SGD, kvstore=store, **more)
        train(model, lambda: trainer.step(ignore_stale_grad=ignore), slice(store.rank, None, 2), 9)
        trainer.synchronize()
        same(model, expected(9))
        assert trainer.overlaps == ("overlap" in more)

    pair.run(work)


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_what_is_unfrozen_is_trained_alone_too(how: dict[str, Any]) -> None:
    model = frozen()
    trainer = Trainer(model.named_parameters(), "sgd", SGD, **how)
    train(model, trainer.step, slice(None))
    same(model, expected())


def test_the_norm_of_all_gradients_has_those_of_what_is_unfrozen(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = frozen()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, kvstore=store)

        def step() -> None:
            trainer.clip_grad_norm_(1e9)
            trainer.step()

        train(model, step, slice(store.rank, None, 2))
        same(model, expected())

    pair.run(work)


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_states_of_what_was_unfrozen_are_loaded_by_a_trainer_that_begins_frozen(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    model = frozen()
    trainer = Trainer(model.named_parameters(), "sgd", SGD, **how)
    train(model, trainer.step, slice(None), 5)
    trainer.save_states(tmp_path / "states")
    again = frozen()
    again.load_state_dict(model.state_dict())
    other = Trainer(again.named_parameters(), "sgd", SGD, **how)
    other.load_states(tmp_path / "states")
    train(again, other.step, slice(None), 6, begin=5)
    same(again, expected())


def test_a_frozen_parameter_may_be_loaded_before_it_is_trained(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        w, v = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Parameter(torch.zeros(2))
        trainer = Trainer({"w": w, "v": v}, "sgd", {"lr": 1.0}, kvstore=store)
        for step in range(2):
            w.data.fill_(5.0 + step)
            w.requires_grad_(step == 1)
            w.grad = torch.ones(2) if step else None
            v.grad = torch.ones(2)
            trainer.step()
        return [*w.tolist(), *v.tolist()]

    assert pair.run(work) == [[5, 5, -2, -2]] * 2


def test_nothing_of_what_is_frozen_is_in_the_store() -> None:
    store = kv.create("device")
    model = frozen()
    Trainer(model.named_parameters(), "sgd", SGD, kvstore=store, update_on_kvstore=True)
    assert store.statistics().keys == 2
