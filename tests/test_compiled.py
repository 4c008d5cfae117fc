"""Public calls inside ``torch.compile`` and under compiled autograd: the same values as without, to the bit."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.dynamo import mark_early, outside_graphs
from workers import DistributedOptimizer, Trainer
from workers.common.torch_internals import after_backward, raise_late
from workers.embedding.prefetching import Lookahead
from workers.trainer.rates import TrainerOptimizer

# Dynamo warns of what it traces, at its first use of much that torch has deprecated, and of breaks.
pytestmark = pytest.mark.filterwarnings("ignore")

Step = Callable[[torch.Tensor], Any]
# A function that makes a step of the objects that it makes with the store; and the steps' inputs.
Scenario = Callable[[kv.KVStore], Step]

BATCHES = [torch.sin(torch.arange(24.0).reshape(6, 4) * (1 + number)) for number in range(3)]
IDS = [(torch.arange(12).reshape(4, 3) * (7 + number)) % 30 for number in range(3)]


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---- which calls are marked


def public_classes() -> set[type]:
    from kvstore.client import DistStore
    from kvstore.store.local import DeviceStore

    named = [
        getattr(module, name)
        for module in (kv, workers, workers.callbacks, workers.metrics, workers.schedules)
        for name in module.__all__
    ]
    given = [DistStore, DeviceStore, TrainerOptimizer, Lookahead]  # what public calls return
    # Errors are raised, and tuples read.
    return {each for each in [*named, *given] if inspect.isclass(each) and not issubclass(each, tuple | Exception)}


def functions_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, inherited ones of this project too."""
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] not in ("kvstore", "workers"):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") and name not in ("__init__", "__call__", "__iter__", "__enter__", "__exit__"):
                continue
            if isinstance(member, property):
                yield f"{owner.__name__}.{name}", member.fget
                if member.fset is not None:
                    yield f"{owner.__name__}.{name}", member.fset
            elif isinstance(member, FunctionType | staticmethod | classmethod):
                yield f"{owner.__name__}.{name}", getattr(member, "__func__", member)


def test_every_public_call_breaks_the_graph() -> None:
    found = {name: function for cls in public_classes() for name, function in functions_of(cls)}
    for module in (kv, workers, workers.callbacks, workers.metrics):
        found |= {name: call for name in module.__all__ if inspect.isfunction(call := getattr(module, name))}
    unmarked = [name for name, function in found.items() if not getattr(function, "_torchdynamo_disable", False)]
    assert len(found) > 250
    assert not unmarked, f"decorate these, or their classes, with outside_graphs: {sorted(unmarked)}"


def test_a_store_of_a_users_own_breaks_the_graph_too() -> None:
    class Mine(kv.KVStore):
        def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, **options: Any) -> kv.Ticket:
            out[:] = value.numpy() * 2
            return kv.Ticket("pushpull", [key])

    store, out = Mine(), torch.zeros(3)

    def step(value: torch.Tensor) -> torch.Tensor:
        store.pushpull("w", value + 1, out.numpy())
        return out + 1

    assert torch.compile(step, backend="eager")(torch.ones(3)).tolist() == [5.0, 5.0, 5.0]


def test_a_call_that_was_defined_before_torch_was_imported_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(value: torch.Tensor) -> torch.Tensor:
        compiling.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        return torch.from_numpy(value.numpy() * 2)

    compiling: list[Any] = []
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "torch")
        outside_graphs(call)
    mark_early()
    compiled = torch.compile(lambda value: call(value + 1) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
    assert compiling == [None]


# ---- what they give


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.cos(torch.arange(float(parameter.numel()))).reshape(parameter.shape))
    return model


class Recommender(nn.Module):
    def __init__(self, store: kv.KVStore) -> None:
        super().__init__()
        store.set_optimizer("adam", learning_rate=0.05)
        self.item = workers.Embedding(30, 4, store=store, key="item", scale=0.5, padding_idx=0)
        self.bag = workers.EmbeddingBag(None, 4, store=store, key="bag", scale=0.5, mode="sum")
        self.mean = workers.EmbeddingBag(30, 4, store=store, key="mean", scale=0.5, mode="mean")
        self.head = network()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.item(ids[:, 0]) * self.bag(ids[:, 1:] * 10**10) + self.mean(ids))
        return scores


def arrays_and_rows(store: kv.KVStore) -> Step:
    store.init("table", kv.Table((6, 2), scale=0.5))
    places = iter(range(100))

    def step(batch: torch.Tensor) -> Any:
        place, out = next(places), torch.empty(4)
        store.broadcast(f"a{place}", batch[0], out)
        store.push(f"a{place}", batch[1] * 2).wait()
        pulled = store.empty((4,))
        ticket = store.pull(f"a{place}", pulled, wait=False)
        ticket.wait(60)
        foreign = batch[2].numpy().copy()
        store.pushpull(f"a{place}", foreign)
        store.push("table", kv.RowSparse([1, 3, 3], torch.ones(3, 2) * place))
        rows = kv.RowSparse.zeros((6, 2))
        store.row_sparse_pull("table", out=rows, row_ids=torch.tensor([3, 1, 3]))
        store.barrier()
        numbers = store.rank + store.num_workers + len(store.type) + ticket.done()
        return out + numbers, pulled * 1, torch.from_numpy(foreign), rows.ids, rows.rows

    return step


def trained(**options: Any) -> Scenario:
    def scenario(store: kv.KVStore) -> Step:
        model = network()
        given = {name: model if name == "wait_in_forward" else value for name, value in options.items()}
        trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.1}, kvstore=store, **given)

        def step(batch: torch.Tensor) -> Any:
            trainer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            trainer.step()
            return loss

        return step

    return scenario


def trained_by_parts(store: kv.KVStore) -> Step:
    model = network()
    trainer = Trainer(
        model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store, overlap=False
    )

    def step(batch: torch.Tensor) -> Any:
        with trainer.no_sync():
            model(batch[:3]).square().mean().backward()
        loss = model(batch[3:]).square().mean()
        loss.backward()
        norm = trainer.clip_grad_norm_(0.5)
        trainer.step(4)
        trainer.set_learning_rate(trainer.learning_rate * 0.9)
        trainer.optimizer.zero_grad()
        model(batch).mean().backward()
        trainer.optimizer.step()
        trainer.zero_grad()
        return loss, norm

    return step


def averaged_gradients(store: kv.KVStore) -> Step:
    model = network()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model, kvstore=store)

    def step(batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(batch[:3]).square().mean().backward()
        loss = model(batch[3:]).square().mean()
        loss.backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return loss

    return step


def averaged_weights(store: kv.KVStore) -> Step:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    averaging = workers.PeriodicAveraging(model, optimizer, store, sync_every=2)
    accuracy = workers.metrics.create("acc")
    update = torch.compiler.disable(optimizer.step)  # to trace torch's takes 2 s

    def step(batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        update()
        averaging.after_step()
        accuracy.update(torch.zeros(6, dtype=torch.int64), batch)
        return loss * accuracy.get()[1]

    return step


def recommended(trains: bool) -> Scenario:
    def scenario(store: kv.KVStore) -> Step:
        model = Recommender(store)
        trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store) if trains else None

        def step(ids: torch.Tensor) -> Any:
            loss = model(ids).square().mean()
            loss.backward()
            if trainer is not None:
                trainer.step()
                trainer.zero_grad()
            return loss

        return step

    return scenario


def values(scenario: Scenario, store: kv.KVStore, inputs: list[torch.Tensor], backend: str | None) -> list[Any]:
    step: Any = scenario(store)
    if backend is not None:
        step = torch.compile(step, backend=backend)
    return [step(each) for each in inputs]


def require_same(plain: Any, compiled: Any) -> None:
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)


LOCAL: dict[str, tuple[Scenario, list[torch.Tensor]]] = {
    "arrays and rows": (arrays_and_rows, BATCHES),
    "a trainer": (trained(), BATCHES),
    "the parts of a step": (trained_by_parts, BATCHES),
    "averaged weights": (averaged_weights, BATCHES),
    "tables": (recommended(trains=False), IDS),
    "tables and a trainer": (recommended(trains=True), IDS),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_compiled_step_gives_the_bits_of_the_plain_one(name: str) -> None:
    scenario, inputs = LOCAL[name]
    plain = values(scenario, kv.create("local"), inputs, None)
    require_same(plain, values(scenario, kv.create("local"), inputs, "eager"))


def test_a_compiled_step_gives_the_bits_of_the_plain_one_in_a_job() -> None:
    cases = [trained(overlap=True), trained(wait_in_forward=None), averaged_gradients]
    with ThreadedJob(workers=2, servers=1, bigarray_bound=30) as job:
        for scenario in cases:
            plain = job.run(lambda store: values(scenario, store, BATCHES, None))  # noqa: B023
            compiled = job.run(lambda store: values(scenario, store, BATCHES, "eager"))  # noqa: B023
            require_same(plain, compiled)


def items(optimizer: str, **options: Any) -> tuple[kv.KVStore, nn.Sequential]:
    store = kv.create("local")
    store.set_optimizer(optimizer, **options)
    model = nn.Sequential(workers.Embedding(30, 4, store=store, key="item", scale=0.5), nn.Linear(4, 1))
    nn.init.ones_(model[1].weight)
    nn.init.ones_(model[1].bias)
    return store, model


@pytest.mark.long
def test_a_compiled_model_with_tables_is_right_with_inductor() -> None:
    def losses(backend: str | None) -> list[torch.Tensor]:
        _, model = items("sgd", learning_rate=0.5)
        called: Any = model if backend is None else torch.compile(model, backend=backend)
        found = []
        for ids in IDS[:2]:
            loss = called(ids).square().mean()
            loss.backward()
            found.append(loss.detach())
        return found

    torch.testing.assert_close(losses("inductor" if torch_compiles() else "aot_eager"), losses(None))


def torch_compiles() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


# ---- compiled autograd


def backward_compiled(loss: torch.Tensor) -> None:
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def test_the_end_of_a_compiled_backward_pass_is_not_missed() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[Any] = []

    def end() -> None:
        seen.append(weight.grad is not None)
        after_backward(lambda: seen.append("last"))

    weight.register_post_accumulate_grad_hook(lambda _: after_backward(end))  # type: ignore[no-untyped-call]
    backward_compiled((weight * 2).sum())
    assert seen == [True, "last"]
    raise_late()

    def fails() -> None:
        raise kv.Mismatch("workers differ")

    other = torch.ones(2, requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda _: after_backward(fails))  # type: ignore[no-untyped-call]
    backward_compiled((other * 2).sum())
    with pytest.raises(kv.Mismatch, match="workers differ"):
        raise_late()
    raise_late()


def test_a_backward_pass_that_fails_has_no_end() -> None:
    weight, seen = torch.ones(2, requires_grad=True), []

    def fail(_: torch.Tensor) -> None:
        after_backward(lambda: seen.append(1))
        raise RuntimeError("out of memory")

    weight.register_post_accumulate_grad_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="out of memory"):
        (weight * 2).sum().backward()
    assert not seen


def test_compiled_backward_passes_give_tables_the_same_gradients() -> None:
    def losses(backward: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        store, model = items("adam", learning_rate=0.05)
        trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store)
        found = []
        for ids in IDS[:2]:
            trainer.zero_grad()
            loss = model(ids).square().mean()
            backward(loss)
            trainer.step()
            found.append(loss.detach())
        return found

    require_same(losses(lambda loss: loss.backward()), losses(backward_compiled))
