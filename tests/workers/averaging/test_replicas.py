"""What all averages of weights share: steps, agreement, and the stores that will do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import backward, constant, network, same, together
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore import UsageError
from kvstore.client import DistStore
from kvstore.store.local import LocalStore
from workers import DiLoCo, PartialSync, PeriodicAveraging
from workers.averaging.stepper import Stepper, require_alike
from workers.common.gather import Gather
from workers.common.tensors import fingerprint

SYNCHRONOUS = [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}]


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_alone_it_is_torch_optim(kvstore: str) -> None:
    model = network()
    sync = PartialSync(model, torch.optim.SGD(model.parameters(), **SYNCHRONOUS[1]), kvstore, chunk_bytes=64)
    for step in range(5):
        backward(model, step, 0, 1)
        sync.step()
    sync.finish()
    same(model, together(1, 5, SYNCHRONOUS[1]), atol=0)


def test_a_closure_is_passed_on() -> None:
    param, optimizer = constant(1)
    sync = PartialSync({"w": param}, optimizer, "local")
    assert sync.step() is None
    assert sync.step(lambda: 2.5) == 2.5
    assert (param[0].item(), sync.steps) == (-2, 2)


def test_a_program_may_step_by_itself() -> None:
    param, optimizer = constant(1)
    sync = PartialSync({"w": param}, optimizer, "local")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    sync.after_step()
    assert (param[0].item(), sync.steps, sync.rounds) == (-1, 1, 1)


def test_wrong_arguments() -> None:
    param, optimizer = constant(1)
    with pytest.raises(kv.UsageError, match=r"an instance of torch\.optim\.Optimizer, not str"):
        PartialSync({"w": param}, "sgd", "local")  # type: ignore[arg-type]
    with pytest.raises(kv.UnknownName, match="no store 'disc'"):
        PartialSync({"w": param}, optimizer, "disc")
    with pytest.raises(kv.ConfigError, match=r"launch\.py"):
        PartialSync({"w": param}, optimizer, "dist_sync")
    value = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(kv.UsageError, match="complex64 cannot be stored"):
        PartialSync({"w": value}, torch.optim.SGD([value]), "local")


@pytest.mark.parametrize(
    "prepare",
    [
        lambda store: store.set_optimizer("sgd", learning_rate=0.1),
        lambda store: store.set_optimizer("adam"),
        lambda store: store.set_updater(lambda key, pushed, stored: stored.add_(pushed)),
    ],
)
def test_a_store_that_updates(prepare: Any) -> None:
    text = "does not sum what is pushed: it has an optimizer or updater"
    store, (param, optimizer) = kv.create("local"), constant(1)
    prepare(store)
    with pytest.raises(kv.UsageError, match=text):
        PartialSync({"w": param}, optimizer, store)
    store = kv.create("local")
    sync = PartialSync({"w": param}, optimizer, store)
    prepare(store)
    with pytest.raises(kv.UsageError, match=text):
        sync.step()
    assert param[0].item() == -1, "no average has been made"


@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_servers_that_update(pair: ThreadedJob, who: str) -> None:
    def work(store: DistStore) -> None:
        if who == "all" or store.rank == 0:
            store.set_optimizer("sgd", learning_rate=0.1)
        store.barrier()
        param, optimizer = constant(1)
        with pytest.raises(kv.UsageError, match="set_optimizer has not been called"):
            PartialSync({"w": param}, optimizer, store)

    pair.run(work)


def test_a_store_that_is_asynchronous(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        param, optimizer = constant(1)
        with pytest.raises(kv.UsageError, match="'dist_async' store updates for every push; averages need 'dist_sync'"):
            PartialSync({"w": param}, optimizer, store)

    pair.run(work, mode="async")


def test_a_store_serves_one_model() -> None:
    store, (param, optimizer) = kv.create("local"), constant(1)
    PartialSync({"w": param}, optimizer, store)
    with pytest.raises(kv.UsageError, match=r"keeps another model in step; make a second one with kvstore\.create"):
        PartialSync({"w": param}, optimizer, store)


def test_workers_that_disagree(pair: ThreadedJob) -> None:
    def fails(text: str, make: Any) -> None:
        def work(store: DistStore) -> None:
            with pytest.raises(kv.Mismatch, match=text.format(other=1 - store.rank)):
                make(store.rank, store, *constant(1))

        pair.run(work)

    fails(
        r"disagree on chunk_bytes: \d+ on this one, \d+ on worker {other}",
        lambda rank, store, param, optimizer: PartialSync({"w": param}, optimizer, store, 16 + rank),
    )
    fails(
        r"worker {other} has another model, optimizer or setting of buffers",
        lambda rank, store, param, optimizer: PartialSync({f"w{rank}": param}, optimizer, store),
    )
    fails(
        r"worker {other} has made something else than a P",
        lambda rank, store, param, optimizer: (PartialSync, PeriodicAveraging)[rank]({"w": param}, optimizer, store),
    )


def test_new_parameters_are_not_forgotten() -> None:
    param, optimizer = constant(1)
    sync = PartialSync({"w": param}, optimizer, "local")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(kv.UsageError, match="parameters have changed: make a new PartialSync"):
        sync.step()


def test_weights_change_only_when_all_of_an_average_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store, (param, optimizer) = LocalStore(), constant(1)
    sync = PartialSync({"w": param}, optimizer, store)
    pushpull = store.pushpull

    def fail(keys: Any, *rest: Any, **how: Any) -> Any:
        if "w" in keys:
            raise kv.DeadlineExceeded("late")
        return pushpull(keys, *rest, **how)

    monkeypatch.setattr(store, "pushpull", fail)
    with pytest.raises(kv.DeadlineExceeded):
        sync.step()
    assert param.tolist() == [-1] * 10


def test_workers_at_different_steps_are_told(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        param, optimizer = constant(1)
        sync = PartialSync({"w": param}, optimizer, store)
        if store.rank == 1:  # catches an error that the other has not had
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            with pytest.raises(kv.UsageError, match="parameters have changed"):
                sync.step()
            optimizer.param_groups.pop()
        with pytest.raises(kv.Mismatch, match=f"worker {1 - store.rank} is at step {2 - store.rank}, this one at"):
            sync.step()

    pair.run(work)


class Varied(nn.Module):
    """A frozen layer, and buffers of many kinds; different ones on each worker, but for the constants."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(1.0 + rank)
        self.frozen.requires_grad_(False)
        self.register_buffer("low", torch.tensor([0.0, torch.finfo(torch.float32).min, float("-inf"), float("nan")]))
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.register_buffer("mask", torch.arange(4) + rank, persistent=False)
        for name, tensor in odd_tensors(rank).items():
            self.register_buffer(name.replace(" ", "_"), tensor)


def prints(model: nn.Module) -> dict[str, int]:
    return {name: fingerprint(tensor) for name, tensor in model.state_dict().items()} | {
        name: fingerprint(tensor) for name, tensor in model.named_buffers()
    }


MAKERS = {
    "periodic": lambda model, store: PeriodicAveraging(model, torch.optim.SGD(model.parameters()), store, 2),
    "partial": lambda model, store: PartialSync(model, torch.optim.SGD(model.parameters()), store, chunk_bytes=64),
    "diloco": lambda model, store: DiLoCo(model, torch.optim.SGD(model.parameters()), store, inner_steps=2),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_all_that_a_model_has_is_rank_zeros_and_constants_stay(cluster: ThreadedJob, kind: str) -> None:
    first = prints(Varied(0))

    def work(store: DistStore) -> None:
        model = Varied(store.rank)
        sync: Any = MAKERS[kind](model, store)
        assert prints(model) == first
        for _ in range(8):
            sync.step()  # no gradients: nothing changes
        sync.finish()
        assert prints(model) == first

    cluster.run(work)


@pytest.mark.parametrize("kind", MAKERS)
def test_buffers_that_become_different_are_averaged_or_rank_zeros(cluster: ThreadedJob, kind: str) -> None:
    workers = cluster.workers

    def work(store: DistStore) -> None:
        model = Varied(0)
        sync: Any = MAKERS[kind](model, store)
        for _ in range(2):
            model.third.fill_(float(store.rank))  # type: ignore[operator, union-attr]
            model.mask.fill_(7 - store.rank)  # type: ignore[operator, union-attr]
            model.float8 = odd_tensors(store.rank)["float8"]
            sync.step()
        sync.finish()
        assert model.third.tolist() == [(workers - 1) / 2] * 5  # type: ignore[operator, union-attr]
        assert model.mask.tolist() == [7] * 4  # type: ignore[operator, union-attr]
        assert fingerprint(model.float8) == fingerprint(odd_tensors(0)["float8"])  # type: ignore[arg-type]

    cluster.run(work)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_parameter_that_is_unfrozen_is_trained(cluster: ThreadedJob, kind: str) -> None:
    def work(store: DistStore) -> list[float]:
        frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
        model = nn.ParameterDict({"a": frozen, "b": trained})
        sync: Any = MAKERS[kind](model, store)
        for step in range(6):
            frozen.requires_grad_(step >= 3)
            for param in (frozen, trained):
                param.grad = torch.full_like(param, 1.0 + store.rank) if param.requires_grad else None
            sync.step()
            if step == 2:
                assert frozen.tolist() == [1, 1]
        sync.finish()
        assert frozen[0] != 1
        return [*frozen.tolist(), *trained.tolist()]

    results = cluster.run(work)
    assert len({tuple(result) for result in results}) == 1


# ---- What workers must have alike; what each class asks for is in the tests of that class

ALIKE: dict[str, Any] = {"kind": "This", "settings": {"every": 3, "how": "keep"}, "values": {"w": torch.zeros(2)}}


def ask(pair: ThreadedJob, **of_worker_1: Any) -> None:
    def work(store: DistStore) -> None:
        require_alike(Gather(store, "/alike"), **{**ALIKE, **(of_worker_1 if store.rank else {})})

    pair.run(work)


def test_workers_that_are_alike(pair: ThreadedJob) -> None:
    ask(pair)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"kind": "That"}, "has made something else than a"),
        ({"settings": {"every": 4, "how": "keep"}}, "disagree on every: 3 on this one, 4 on worker 1|every: 4"),
        ({"settings": {"every": 3, "how": "drop"}}, "disagree on how: keep on this one, another on worker 1|how: drop"),
        ({"values": {"w": torch.zeros(3)}}, "has another model, optimizer or setting of buffers"),
        ({"values": {"v": torch.zeros(2)}}, "has another model, optimizer or setting of buffers"),
    ],
)
def test_workers_that_differ(pair: ThreadedJob, other: dict[str, Any], text: str) -> None:
    with pytest.raises(kv.Mismatch, match=text):
        ask(pair, **other)


# ---- Steps of an optimizer, each followed by what is due


class Counting(Stepper):
    """Notes the weight after each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.seen: list[float] = []

    def after_step(self) -> None:
        (weight,) = self._optimizer.param_groups[0]["params"]
        self.seen.append(weight.item())


def test_what_is_due_comes_after_the_step_and_the_loss_is_returned() -> None:
    weight = torch.zeros(1, requires_grad=True)
    stepper = Counting(torch.optim.SGD([weight], lr=1.0))

    def closure() -> float:
        weight.grad = torch.ones(1)
        return 5.0

    assert stepper.step(closure) == 5.0
    assert stepper.step() is None
    assert stepper.seen == [-1.0, -2.0]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must be an instance of torch.optim.Optimizer, not list"):
        Counting([])  # type: ignore[arg-type]


# ---- on a CUDA device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "how"),
    [(PartialSync, {"chunk_bytes": 400}), (PeriodicAveraging, {"sync_every": 2, "momentum": "average"})],
)
def test_values_on_a_device(
    cuda: torch.device, pair: ThreadedJob, kind: Any, how: dict[str, Any], dtype: torch.dtype
) -> None:
    def work(store: DistStore) -> None:
        values = torch.full((4, 3, 5, 5), 1.0 + store.rank, device=cuda, dtype=dtype)
        params = {
            "w": nn.Parameter(values.to(memory_format=torch.channels_last)),
            "on the CPU": nn.Parameter(values.cpu()),
        }
        sync = kind(params, torch.optim.SGD(params.values(), lr=1.0), store, **how)
        for param in params.values():
            param.grad = torch.full_like(param, 2.0 * store.rank)
        for _ in range(4):
            sync.step()
        sync.finish()
        assert [param.unique().tolist() for param in params.values()] == [[-3], [-3]]
        assert [param.device.type for param in params.values()] == ["cuda", "cpu"]

    pair.run(work)
