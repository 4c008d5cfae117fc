"""Weights that become the servers' values by themselves: nobody can tell, whatever a program does with its weights."""

from __future__ import annotations

import copy
import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from threaded import ThreadedJob
from torch import nn

from kvstore import DeadlineExceeded, UsageError
from kvstore.client import DistStore
from kvstore.store.local import LocalStore
from kvstore.ticket import Ticket
from kvstore.transport.shm import own_pages
from workers import Trainer
from workers.common import buckets

needs_pages = pytest.mark.skipif(not own_pages.available(), reason="this system does not tell of pages")
SIDE = 256  # a weight has 256 KiB


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedJob]:
    where = tmp_path_factory.mktemp("job")
    with ThreadedJob(2, 2, kind="shm", directory=where, bigarray_bound=1 << 30, piece_bytes=64 << 20) as job:
        yield job


def layers(number: int = 3) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(number)))
    for each, param in enumerate(model.parameters()):
        nn.init.normal_(param, std=0.05, generator=torch.Generator().manual_seed(each))
    return model


class Training:
    """A model and its trainer; ``taken`` says which weights are the servers' memory."""

    def __init__(self, store: DistStore, model: nn.Sequential | None = None, **how: Any) -> None:
        self.model = layers() if model is None else model
        self.store = store
        named, options = list(self.model.named_parameters()), {"learning_rate": 0.01}
        options |= {"momentum": 0.9} if store.type == "dist_sync" else {}
        self.trainer = Trainer(named, "sgd", options, store, **{"overlap": False, **how})
        self.weights = [each.weight for each in self.model]

    def backward(self, step: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(10 * step + self.store.rank)
        loss = self.model(torch.randn(4, SIDE, generator=draws)).square().mean()
        loss.backward()
        return loss

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.trainer.zero_grad()
            self.backward(number)
            self.trainer.step()

    @property
    def taken(self) -> list[bool]:
        return [not weight.untyped_storage().resizable() for weight in self.weights]  # what torch has not allocated


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))


@needs_pages
@pytest.mark.parametrize(
    "how",
    [{}, {"overlap": True}, {"wait_in_forward": True}, {"overlap": True, "share_gradients": True}],
    ids=["step", "overlap", "forward", "gradients"],
)
def test_weights_have_the_bits_of_copies(
    job: ThreadedJob, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", SIDE * SIDE * 4)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SIDE * SIDE * 4)

    def train(store: DistStore, share: bool | None) -> tuple[list[torch.Tensor], list[bool]]:
        model = layers()
        given = {"overlap": "auto", "wait_in_forward": model} if "wait_in_forward" in how else how
        training = Training(store, model, share_weights=share, **given)
        training.step(*range(5))
        training.trainer.synchronize()
        return values(model), training.taken

    copied = job.run(lambda store: train(store, False))
    shared = job.run(lambda store: train(store, None))
    for (plain, none), (mine, taken) in zip(copied, shared, strict=True):
        assert same(plain, mine)
        assert [*none, *taken] == [False] * 3 + [True] * 3


def flat(model: nn.Sequential) -> torch.Tensor:
    """Put all weights into one buffer, as some optimizers do."""
    buffer = torch.cat([each.weight.detach().view(-1) for each in model])
    for place, each in enumerate(model):
        each.weight.data = buffer[place * SIDE * SIDE : (place + 1) * SIDE * SIDE].view(SIDE, SIDE)
    return buffer


def foreign(model: nn.Sequential) -> Any:
    array = model[0].weight.detach().numpy().copy()
    model[0].weight.data = torch.from_numpy(array)
    return array.reshape(-1)


ALIASES: dict[str, Callable[[nn.Sequential], Any]] = {
    "data": lambda model: model[0].weight.data.view(-1),
    "numpy": lambda model: model[0].weight.detach().numpy().reshape(-1),
    "state_dict": lambda model: model.state_dict()["0.weight"].view(-1),
    "storage": lambda model: model[0].weight.untyped_storage(),
    "parameter": lambda model: nn.Parameter(model[0].weight.data).view(-1),
    "shallow copy": lambda model: copy.copy(model[0].weight).view(-1),
    "dlpack": lambda model: torch.from_dlpack(model[0].weight.detach()).view(-1),
    "buffer": flat,
    "numpy's memory": foreign,
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "between"])
@pytest.mark.parametrize("alias", list(ALIASES))
def test_whatever_refers_to_a_weight_has_its_new_value(job: ThreadedJob, alias: str, late: bool) -> None:
    def work(store: DistStore) -> None:
        model = layers()
        held = None if late else ALIASES[alias](model)
        training = Training(store, model)
        training.step(0, 1)
        held = ALIASES[alias](model) if late else held
        training.step(2, 3)
        if isinstance(held, torch.UntypedStorage):
            held = torch.empty(0).set_(held)
        first = torch.as_tensor(held).detach()[: SIDE * SIDE]
        assert torch.equal(first.view(SIDE, SIDE), model[0].weight)
        assert not late or alias in ("buffer", "numpy's memory") or own_pages.available() is training.taken[1]

    job.run(work)


def test_a_model_that_other_processes_share_stays_where_it_is(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = layers().share_memory()
        training = Training(store, model)
        where = [weight.data_ptr() for weight in training.weights]
        training.step(0, 1)
        assert [weight.data_ptr() for weight in training.weights] == where
        late = Training(store.companion(), layers())
        late.step(0)
        late.model.share_memory()
        where = [weight.data_ptr() for weight in late.weights]
        late.step(1)
        assert [weight.data_ptr() for weight in late.weights] == where
        late.store.close()

    job.run(work)


@needs_pages
def test_a_write_is_found_and_changes_nothing_for_others(job: ThreadedJob) -> None:
    def work(store: DistStore) -> list[torch.Tensor]:
        training = Training(store)
        training.step(0, 1)
        before = values(training.model)
        store.barrier()
        if store.rank == 0:
            training.model[1].weight.data.view(-1)[SIDE * SIDE - 1] += 1  # the last element, where no sample looks
        store.barrier()
        if store.rank == 1:
            assert same(values(training.model), before)
            return before
        with pytest.raises(UsageError, match=r"'1\.weight' has been written to"):
            training.step(2)
        training.model[1].weight.data.copy_(before[2])  # a value that is put back is no write
        out = torch.empty(SIDE, SIDE)
        store.pull("1.weight", out)
        assert torch.equal(out, before[2])
        return before

    job.run(work)


@needs_pages
def test_values_that_were_put_back_and_pages_that_were_written_do_not_hide_new_values(job: ThreadedJob) -> None:
    def train(store: DistStore, swap: bool) -> list[torch.Tensor]:
        training = Training(store)
        for step in range(6):
            training.step(step)
            kept = values(training.model)
            for param in training.model.parameters() if swap else ():
                param.data.zero_()  # as a moving average is put in for an evaluation
            for param, value in zip(training.model.parameters(), kept, strict=True):
                param.data.copy_(value)
        return values(training.model)

    assert same(job.run(lambda store: train(store, True))[0], job.run(lambda store: train(store, False))[0])


@needs_pages
def test_a_model_is_saved_copied_and_loaded_as_any_other(job: ThreadedJob, tmp_path: Path) -> None:
    def work(store: DistStore) -> None:
        training = Training(store)
        training.step(0, 1)
        assert training.taken == [True] * 3
        model, plain = training.model, layers()
        plain.load_state_dict(model.state_dict())

        def sizes(each: nn.Module) -> list[int]:
            file = io.BytesIO()
            torch.save(each.state_dict(), file)
            single = io.BytesIO()
            torch.save(each[0].weight, single)  # type: ignore[index]
            return [file.tell(), single.tell(), len(pickle.dumps(each))]

        assert sizes(model) == sizes(plain)
        path = str(tmp_path / f"model-{store.rank}")
        save_model(model, path)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), layers()):
            load_model(other, path)
            assert same(values(other), values(model))
            nn.init.zeros_(other[0].weight)
        assert same(values(plain), values(model))

    job.run(work)


def test_after_the_store_weights_are_a_workers_own(job: ThreadedJob) -> None:
    def work(store: DistStore) -> list[torch.Tensor]:
        training = Training(store)
        training.step(0, 1)
        view = training.model[2].weight.data
        before = values(training.model)
        store.close()
        assert same(values(training.model), before)
        assert training.taken[:2] == [False] * 2
        assert view.data_ptr() == training.model[2].weight.data_ptr()
        optimizer = torch.optim.SGD(training.model.parameters(), 0.1 * (1 + store.rank))
        plain = layers()
        plain.load_state_dict(training.model.state_dict())
        other = torch.optim.SGD(plain.parameters(), 0.1 * (1 + store.rank))
        for model, each in ((training.model, optimizer), (plain, other)):
            model.zero_grad()
            model(torch.ones(1, SIDE)).square().mean().backward()
            each.step()
        assert same(values(training.model), values(plain))
        return values(training.model)

    one, two = job.run(work)
    assert not torch.equal(one[0], two[0])


def test_backward_through_old_weights_is_torchs_error_as_with_copies(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        training = Training(store)
        training.step(0)
        loss = training.model(torch.ones(1, SIDE, requires_grad=True)).square().mean()
        loss.backward(retain_graph=True)
        training.trainer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    job.run(work)


def test_what_lies_otherwise_is_copied(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = layers()
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        model[1].weight = nn.Parameter(model[1].weight.data.to(torch.float64))
        training = Training(store, nn.Sequential(model[0]))
        with torch.inference_mode():
            training.weights[0].grad, training.model[0].bias.grad = torch.ones(SIDE, SIDE), torch.ones(SIDE)
            training.trainer.step()
        assert training.taken == [False]
        assert not training.weights[0].is_inference()
        training.step(0)

    job.run(work)


@pytest.mark.parametrize("how", [{"share_weights": False}, {"update_on_kvstore": False}])
def test_what_was_asked_for_is_done(job: ThreadedJob, how: dict[str, Any]) -> None:
    def work(store: DistStore) -> list[bool]:
        training = Training(store, **how)
        training.step(0, 1)
        return training.taken

    assert job.run(work) == [[False] * 3] * 2


def test_where_each_push_is_an_update_weights_are_copied(job: ThreadedJob) -> None:
    def work(store: DistStore) -> list[bool]:
        training = Training(store)
        training.step(0, 1)
        return training.taken

    assert job.run(work, mode="async") == [[False] * 3] * 2


# ---- gradients


class Lender(LocalStore):
    """A store that pushes in place: memory from ``empty`` is shared with other processes, and stays with children."""

    pushes_in_place = True
    refuses = False

    def empty(self, shape: Any, dtype: Any = None) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        made = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
        self.places = {*getattr(self, "places", ()), made.data_ptr()}
        return made

    def _pushpull(self, *args: Any) -> Ticket:
        if self.refuses:
            raise DeadlineExceeded("no answer")
        return super()._pushpull(*args)


class Lent(Training):
    """A training with a store that pushes in place; ``moved`` says which gradients are in its memory."""

    def __init__(self, kind: str = "dist_sync", **how: Any) -> None:
        super().__init__(Lender(kind), None, **how)  # type: ignore[arg-type]

    @property
    def moved(self) -> list[bool]:
        places = getattr(self.trainer.store, "places", ())
        return [weight.grad is not None and weight.grad.data_ptr() in places for weight in self.weights]


@pytest.fixture
def lent() -> Lent:
    return Lent()


def test_gradients_move_and_are_the_same(lent: Lent) -> None:
    plain = Lent(share_gradients=False)
    for step in range(3):
        for each in (lent, plain):
            each.trainer.zero_grad()
            each.backward(step)
        assert [*lent.moved, *plain.moved] == [True] * 3 + [False] * 3
        for one, two in zip(lent.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
        lent.trainer.step()
        plain.trainer.step()
    assert same(values(lent.model), values(plain.model))
    lent.trainer.zero_grad()
    assert [weight.grad for weight in lent.weights] == [None] * 3


def test_gradients_add_up_where_they_are(lent: Lent) -> None:
    plain = layers()
    for step in range(2):
        lent.backward(step)
        plain(torch.randn(4, SIDE, generator=torch.Generator().manual_seed(10 * step))).square().mean().backward()
    for one, two in zip(lent.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    lent.model.zero_grad(set_to_none=False)
    assert lent.moved == [True] * 3
    assert not any(param.grad.any() for param in lent.model.parameters())  # type: ignore[union-attr]


def test_a_gradient_that_was_kept_stays_as_it_was(lent: Lent) -> None:
    lent.backward(0)
    kept = lent.weights[0].grad
    assert kept is not None
    before, view = kept.clone(), kept.numpy()
    lent.trainer.step()
    for step in (1, 2, 3):
        lent.step(step)
    assert torch.equal(kept, before)
    assert (view == before.numpy()).all()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("of", ["buffer", "view", "numpy", "graph", "other order"])
def test_what_else_refers_to_a_gradient_stays_with_it(lent: Lent, of: str) -> None:
    weight, held = lent.weights[0], []
    if of == "buffer":  # as some optimizers have all gradients in one
        buffer = torch.zeros(SIDE * SIDE + 8)
        weight.grad = buffer[8:].view(SIDE, SIDE)
        held.append(buffer[8:])
    hook: dict[str, Callable[[torch.Tensor], Any]] = {
        "view": lambda param: param.grad.view(-1),  # type: ignore[union-attr]
        "numpy": lambda param: param.grad.numpy().reshape(-1),  # type: ignore[union-attr]
    }
    if of in hook:
        lent = Lent(share_gradients=False)
        weight = lent.weights[0]
        weight.register_post_accumulate_grad_hook(lambda param: held.append(hook[of](param)))
        lent.trainer = Trainer(dict(lent.model.named_parameters()), "sgd", {}, Lender("dist_sync"), overlap=False)
    if of == "other order":
        weight.data = weight.data.t().contiguous().t()
    loss = lent.model(torch.ones(4, SIDE)).square().mean()
    loss.backward(create_graph=of == "graph")
    assert not weight.untyped_storage().is_shared()
    assert lent.moved[0] is False
    assert weight.grad is not None
    for alias in held:
        weight.grad += 1
        assert torch.equal(torch.as_tensor(alias).detach(), weight.grad.detach().view(-1))
    weight.grad = None  # a graph and its gradients keep each other


def test_after_a_push_that_may_not_be_over_nobody_else_reads_the_gradients(lent: Lent) -> None:
    lent.step(0)
    lent.trainer.zero_grad()
    lent.backward(1)
    sent = [weight.grad for weight in lent.weights]
    places = [grad.data_ptr() for grad in sent]  # type: ignore[union-attr]
    lent.store.refuses = True  # type: ignore[attr-defined]
    with pytest.raises(DeadlineExceeded):
        lent.trainer.step()
    assert lent.moved == [False] * 3
    assert [weight.grad for weight in lent.weights] == sent  # the tensors are the same
    assert not {grad.data_ptr() for grad in sent} & set(places)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "dist_async"},
        {"kind": "dist_ssp"},
        {"share_gradients": False},
        {"wait_in_forward": True},
        {"overlap": True},
    ],
)
def test_where_a_push_goes_on_after_the_step_gradients_stay(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", SIDE * SIDE * 4)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SIDE * SIDE * 4)
    if "wait_in_forward" in how:
        model = layers()
        trainer = Trainer(model.named_parameters(), "sgd", {}, Lender("dist_sync"), wait_in_forward=model)
        model(torch.ones(1, SIDE)).sum().backward()
        assert trainer.update_on_kvstore
        assert all(param.grad.untyped_storage().resizable() for param in model.parameters())  # type: ignore[union-attr]
        return
    lent = Lent(**how)
    for step in range(3):
        lent.backward(step)  # which adds to what is there
        lent.trainer.step()
        lent.model.zero_grad(set_to_none=False)
    assert lent.moved == [False] * 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_has_gradients_of_its_own(lent: Lent) -> None:
    lent.backward(0)
    assert lent.moved == [True] * 3
    pid = os.fork()
    if not pid:
        for weight in lent.weights:
            weight.grad.zero_()  # type: ignore[union-attr]
        os._exit(0)
    os.waitpid(pid, 0)
    assert all(weight.grad.any() for weight in lent.weights)  # type: ignore[union-attr]


def test_with_the_trainer_the_hooks_go(lent: Lent) -> None:
    lent.trainer.close()
    lent.backward(0)
    assert lent.moved == [False] * 3


@needs_pages
@pytest.mark.parametrize("write", ["data", "numpy"])
def test_gradients_that_are_pushed_during_backward_are_the_programs_own(
    job: ThreadedJob, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", SIDE * SIDE * 4)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", SIDE * SIDE * 4)

    def work(store: DistStore) -> list[torch.Tensor]:
        training, plain = Training(store, overlap=True), layers()
        training.step(0, 1)
        plain.load_state_dict(training.model.state_dict())
        training.trainer.zero_grad()
        training.backward(2)
        draws = torch.Generator().manual_seed(20 + store.rank)
        plain(torch.randn(4, SIDE, generator=draws)).square().mean().backward()
        grads = [param.grad for param in training.model.parameters()]
        for one, two in zip(grads, plain.parameters(), strict=True):
            assert torch.equal(one, two.grad)  # type: ignore[arg-type]
        assert not grads[0].untyped_storage().resizable()  # type: ignore[union-attr]
        assert grads[0].untyped_storage().nbytes() == grads[0].nbytes  # type: ignore[union-attr]
        store.barrier()
        if store.rank:  # while the others' pushes go on
            training.trainer.step()
            return values(training.model)
        last = grads[0].view(-1)[-1:]  # type: ignore[union-attr]
        if write == "numpy":
            last.numpy()[:] += 1
        else:
            last.data += 1
        with pytest.raises(UsageError, match="changed between its push and step"):
            training.trainer.step()
        named = {name: torch.empty_like(param) for name, param in training.model.named_parameters()}
        store.pull(list(named), list(named.values()))
        return list(named.values())

    one, two = job.run(work)
    assert same(one, two)


@needs_pages
def test_gradients_of_a_job_are_read_where_they_are(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        training = Training(store)
        training.step(0, 1)
        grad = training.weights[0].grad
        assert grad is not None
        assert not grad.untyped_storage().resizable()
        before = grad.clone()
        training.step(2, 3)
        assert torch.equal(grad, before)
        store.set_gradient_compression({"type": "fp16"})
        training.step(4)
        assert training.weights[0].grad.untyped_storage().resizable()  # type: ignore[union-attr]
        store.set_gradient_compression(None)
        training.step(5)
        store.close()
        assert training.weights[0].grad.untyped_storage().resizable()  # type: ignore[union-attr]

    job.run(work)
