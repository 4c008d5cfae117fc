"""Waiting in forward: the same weights to the bit, each module for its own, and never an old weight in silence."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import BUCKET_BYTES, SGD, backward, equal, loss_of, network, weights
from threaded import ThreadedJob
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import prune

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import NodeLost
from kvstore.store.local import LocalStore
from kvstore.ticket import Operation, Ticket
from workers import Trainer
from workers.common import buckets


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each layer, see ``layers``: here all are as small as the first."""
    monkeypatch.setattr(buckets, "FIRST_BYTES", BUCKET_BYTES)


class Slow(LocalStore):
    """A local store whose values of pushes that nobody waits for come when somebody does; it keeps a diary of that."""

    def __init__(self) -> None:
        super().__init__("dist_slow")
        self.waited: list[list[str]] = []
        self.priorities: dict[str, int] = {}
        self.error: Exception | None = None
        self._left: dict[Operation, Callable[[], None]] = {}

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, **how: Any) -> Ticket:
        if how.pop("wait", True):
            return super().pushpull(key, value, out, priority, **how)
        values = [torch.empty_like(each) for each in out]
        super().pushpull(key, value, values)
        self.priorities.update(dict.fromkeys(key, priority))
        operation = Operation("pushpull", key, self)
        operation.open.add(1)
        self._left[operation] = lambda: [to.detach().copy_(value) for to, value in zip(out, values, strict=True)]
        return Ticket(operation)

    def wait(self, operation: Operation, timeout: float | None) -> None:
        if self.error is not None:
            raise self.error
        self.waited.append(list(operation.keys))
        self._left.pop(operation)()
        operation.open.clear()

    def poll(self) -> None:
        """Nothing comes by itself."""

    def keys(self) -> list[list[str]]:
        """What has been waited for since the last call."""
        listed, self.waited = self.waited, []
        return listed


class Odd(nn.Module):
    """Uses a weight of a module that it does not call, one of a module that it calls later, and one tied to both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.borrowed = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner[0].weight
        self.last = nn.Linear(8, 3)
        self.skipped: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + linear(x, self.borrowed.weight, self.borrowed.bias)
        x = self.inner[1](self._used(self.inner[0], x))
        return self._used(self.last, self.tied(x))

    def _used(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x, layer.weight, layer.bias) if layer is self.skipped else layer(x)


def odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def attention(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 3))


def normed(seed: int = 0) -> nn.Module:
    """Torch's own hooks compute the weights of its layers before each forward pass."""
    model = network(seed)
    prune.random_unstructured(model[0], "weight", 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[2])
    nn.utils.spectral_norm(model[4])
    return model


MODELS = {"layers": network, "odd": odd, "attention": attention, "normed": normed}
FIRST, SECOND, THIRD = ["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]


class Rig:
    """A trainer whose steps do not wait, and a twin whose steps do; the watched first step has been made."""

    def __init__(self, make: Callable[[], nn.Module] = network, **how: Any) -> None:
        self.store, self.model, self.twin = Slow(), make(), make()
        params, theirs = self.model.named_parameters(), self.twin.named_parameters()
        self.trainer = Trainer(params, "sgd", SGD, self.store, overlap=True, wait_in_forward=self.model, **how)
        self.other = Trainer(theirs, "sgd", SGD, "local", update_on_kvstore=True)
        self.steps = 0
        self.step()
        assert equal(weights(self.model), weights(self.twin)), "a watched step waits"
        self.store.keys()

    def step(self) -> None:
        for model, trainer in ((self.model, self.trainer), (self.twin, self.other)):
            backward(model, self.steps)
            trainer.step()
        self.steps += 1

    @property
    def whole(self) -> bool:
        return equal(weights(self.model), weights(self.twin))


def trained(
    pair: ThreadedJob, make: Callable[[], nn.Module], optimizer: str, waiting: bool = False, **how: Any
) -> list[torch.Tensor]:
    """The weights after six steps, which are the same on all workers."""

    def work(store: DistStore) -> list[torch.Tensor]:
        model = models[store.rank]
        forward = model if waiting else None
        params = model.named_parameters()
        trainer = Trainer(params, optimizer, {}, store, overlap=waiting, wait_in_forward=forward, **how)
        for step in range(6):
            trainer.set_learning_rate(0.1 / (step + 1))
            backward(model, step, slice(3 * store.rank, 3 * store.rank + 3))
            trainer.step()
        trainer.synchronize()
        return weights(model)

    models = [make() for _ in range(pair.workers)]
    found = pair.run(work)
    assert all(equal(found[0], theirs) for theirs in found)
    return found[0]


@pytest.mark.parametrize(
    ("model", "workers", "servers", "optimizer"),
    [
        *((model, 2, 2, optimizer) for model, optimizer in zip(MODELS, ["sgd", "adamw"] * 2, strict=True)),
        ("layers", 1, 1, "adamw"),
        *(pytest.param(model, 3, 1, "adamw", marks=pytest.mark.release) for model in MODELS),
    ],
)
def test_the_weights_are_the_same_to_the_bit(model: str, workers: int, servers: int, optimizer: str) -> None:
    make = MODELS[model]
    with ThreadedJob(workers, servers, bigarray_bound=20) as pair:
        plain = trained(pair, make, optimizer)
        assert not equal(plain, weights(make()))
        assert equal(plain, trained(pair, make, optimizer, waiting=True))
        assert equal(plain, trained(pair, make, optimizer, waiting=True, share_weights=True))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_many_steps_over_a_store_that_is_slow(make: Callable[[], nn.Module]) -> None:
    rig = Rig(make)
    for _ in range(4):
        rig.step()
        assert not rig.whole
    rig.trainer.synchronize()
    assert rig.whole


def test_a_module_waits_for_its_own_and_the_first_are_the_most_urgent() -> None:
    rig = Rig()
    rig.step()
    assert rig.store.keys() == []
    before = weights(rig.model)
    rig.model[0](torch.zeros(1, 4))
    assert rig.store.keys() == [FIRST]
    now, new = weights(rig.model), weights(rig.twin)
    assert equal(now, [*new[:2], *before[2:]])
    rig.model[2:4](torch.zeros(1, 8))
    assert rig.store.keys() == [SECOND]
    loss_of(rig.model, 0)
    assert rig.store.keys() == [THIRD]
    assert rig.whole
    ranks = [rig.store.priorities[its[0]] for its in (FIRST, SECOND, THIRD)]
    assert ranks == sorted(ranks, reverse=True)


def test_whoever_uses_what_another_module_has_waits_for_it() -> None:
    rig = Rig(odd)
    rig.step()
    rig.model.borrowed.register_forward_pre_hook(lambda *_: pytest.fail("it is not called"))
    loss_of(rig.model, 0)
    assert rig.whole


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_without_gradients_a_module_waits_for_all_below_it(make: Callable[[], nn.Module], how: str) -> None:
    rig = Rig(make)
    rig.step()
    with torch.set_grad_enabled(how != "no_grad"):
        for model in (rig.model, rig.twin):
            model.train(how != "eval")
        ours, theirs = (loss_of(model, 3) for model in (rig.model, rig.twin))
    assert torch.equal(ours, theirs)
    assert rig.whole


def test_a_state_that_is_read_is_that_of_the_last_step() -> None:
    rig = Rig()
    rig.step()
    assert equal(list(rig.model.state_dict().values()), list(rig.twin.state_dict().values()))
    rig.step()
    assert equal(list(rig.model[2].state_dict().values()), list(rig.twin[2].state_dict().values()))


@pytest.mark.parametrize(
    "call",
    [
        lambda rig, path: rig.trainer.synchronize(),
        lambda rig, path: rig.trainer.save_states(path),
        lambda rig, path: rig.trainer.join(),
        lambda rig, path: rig.trainer.clip_grad_norm_(1.0),
        lambda rig, path: rig.trainer.close(),
    ],
    ids=["synchronize", "save_states", "join", "clip_grad_norm_", "close"],
)
def test_what_else_is_called_between_steps_waits(call: Callable[[Rig, Any], Any], tmp_path: Any) -> None:
    rig = Rig()
    rig.step()
    call(rig, tmp_path / "states")
    assert rig.whole
    rig.store.keys()
    rig.step()
    rig.trainer.synchronize()
    assert rig.whole


def test_what_no_pass_has_used_is_there_before_the_next_step() -> None:
    rig = Rig()
    for _ in range(2):
        for model, trainer in ((rig.model, rig.trainer), (rig.twin, rig.other)):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            trainer.step()
    assert len(rig.store.keys()) == 1, "what was pushed by the first step, in one piece"
    rig.trainer.synchronize()
    assert rig.whole


def test_a_weight_that_is_used_behind_its_modules_back_is_an_error() -> None:
    rig = Rig(odd)
    rig.step()
    rig.model.skipped = rig.model.last  # nobody calls it any more, as they did when it was watched
    with pytest.raises(kv.UsageError, match=r"'last.\w+' was used outside of its module's forward pass.*synchronize"):
        backward(rig.model, 9)
    rig.trainer.synchronize()
    assert rig.whole


def test_a_weight_that_changes_after_it_was_used_is_an_error_of_torchs() -> None:
    rig = Rig(odd)
    rig.step()
    rig.model.skipped = rig.model.inner[0]  # whose weight is another module's too, which waits for it after that
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(rig.model, 9)


def test_with_no_sync_gradients_add_up_and_values_are_waited_for_once() -> None:
    rig = Rig()
    for model, trainer in ((rig.model, rig.trainer), (rig.twin, rig.other)):
        model.zero_grad()
        with trainer.no_sync():
            loss_of(model, 1, slice(0, 3)).backward()
        loss_of(model, 2, slice(3, 6)).backward()
        trainer.step()
    rig.store.keys()
    loss_of(rig.model, 3)
    loss_of(rig.model, 4)
    assert sorted(rig.store.keys()) == [FIRST, SECOND, THIRD]
    assert rig.whole


def test_an_error_reaches_whoever_waits_as_often_as_they_do() -> None:
    rig = Rig()
    rig.step()
    rig.store.error = NodeLost("worker 1 has died")
    for call in (lambda: loss_of(rig.model, 0), rig.trainer.synchronize, rig.model.state_dict, rig.trainer.step):
        with pytest.raises(NodeLost, match="worker 1 has died"):
            call()


def test_the_model_has_its_values_when_the_trainer_has_gone() -> None:
    rig = Rig()
    rig.step()
    gone = weakref.ref(rig.trainer)
    del rig.trainer
    gc.collect()
    assert gone() is None
    loss_of(rig.model, 0)
    assert rig.whole


def test_copies_of_the_model_wait_for_nothing() -> None:
    rig = Rig()
    rig.step()
    rig.trainer.synchronize()
    rig.store.keys()
    file = io.BytesIO()
    torch.save(rig.model, file)
    file.seek(0)
    copies = [copy.deepcopy(rig.model), torch.load(file, weights_only=False)]
    assert all(equal(weights(made), weights(rig.twin)) for made in copies)
    rig.step()
    for made in copies:
        loss_of(made, 0)
        made.state_dict()
    assert rig.store.keys() == []


def test_a_program_that_changes_gradients_after_backward_waits_in_its_steps() -> None:
    store, model, twin = Slow(), network(), network()
    trainer = Trainer(model.named_parameters(), "sgd", SGD, store, wait_in_forward=model)
    other = Trainer(twin.named_parameters(), "sgd", SGD, "local", update_on_kvstore=True)
    for step in range(13):
        for its, who in ((model, trainer), (twin, other)):
            backward(its, step)
            nn.utils.clip_grad_norm_(its.parameters(), 0.1)
            who.step()
        assert equal(weights(model), weights(twin)), step


def compiled_in_place() -> nn.Module:
    model = network()
    model.compile()
    return model


@pytest.mark.parametrize(
    "make",
    [compiled_in_place, lambda: torch.compile(network()), lambda: torch.jit.script(network())],
    ids=["Module.compile", "torch.compile", "torch.jit"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch is giving it up
def test_a_compiled_model_is_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.raises(kv.UsageError, match="a compiled model calls none"):
        Trainer(model.named_parameters(), "sgd", SGD, Slow(), wait_in_forward=model)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"wait_in_forward": network()}, "none of the trainer's parameters"),
        ({"wait_in_forward": "model"}, "a torch.nn.Module, not str"),
        ({"update_on_kvstore": False}, "needs a dist store that updates"),
        ({"kvstore": "local", "update_on_kvstore": True}, "needs a dist store that updates"),
        ({"kvstore": None}, "needs a dist store that updates"),
        ({"overlap": False}, "neither with overlap=False"),
        ({"share_gradients": True}, "nor with share_gradients=True"),
    ],
)
def test_what_cannot_wait_is_refused(how: dict[str, Any], words: str) -> None:
    model = network()
    how = {"kvstore": Slow(), "wait_in_forward": model} | how
    with pytest.raises(kv.UsageError, match=words):
        Trainer(model.named_parameters(), "sgd", SGD, **how)
