"""Overlap: what is pushed during backward, the same weights to the bit, and an error where it cannot be right."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layers import SGD, backward, equal, loss_of, network, weights
from overlapping import FIRST, LAYERS, SECOND, THIRD, Recorder, Rig
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import Trainer
from workers.common import buckets
from workers.trainer import overlap

pytestmark = pytest.mark.usefixtures("small_buckets")


def trained(
    pair: ThreadedJob, wanted: bool, optimizer: str, options: dict[str, Any], mode: str = "sync", **how: Any
) -> list[list[torch.Tensor]]:
    """The weights of all workers after five steps."""

    def work(store: DistStore) -> list[torch.Tensor]:
        model = models[store.rank]
        trainer = Trainer(model.named_parameters(), optimizer, options, store, overlap=wanted, **how)
        for step in range(5):
            trainer.set_learning_rate(0.1 / (step + 1))
            backward(model, step, slice(3 * store.rank, 3 * store.rank + 3))
            trainer.step()
        assert store.statistics().pushes == 5 * 2 * LAYERS, "each gradient is pushed once"
        return weights(model)

    models = [network(rank) for rank in range(pair.workers)]
    return pair.run(work, mode=mode)


@pytest.mark.parametrize(
    ("workers", "servers", "optimizer", "options"),
    [(1, 3, "adam", {}), (2, 2, "sgd", {"momentum": 0.9, "wd": 1e-4}), (3, 1, "adamw", {})],
)
def test_the_weights_are_the_same_to_the_bit(
    workers: int, servers: int, optimizer: str, options: dict[str, Any]
) -> None:
    with ThreadedJob(workers, servers, bigarray_bound=20) as pair:
        for on_store in (True, False):
            plain = trained(pair, False, optimizer, options, update_on_kvstore=on_store)
            early = trained(pair, True, optimizer, options, update_on_kvstore=on_store)
            assert not equal(plain[0], weights(network()))
            for theirs in (*plain, *early):
                assert equal(plain[0], theirs), on_store


@pytest.mark.parametrize("wanted", [True, False])
def test_weights_that_are_shared_are_the_same(wanted: bool) -> None:
    with ThreadedJob(2, 2, bigarray_bound=20) as pair:
        plain = trained(pair, False, "adam", {})
        for on_store in (True, False):
            shared = trained(pair, wanted, "adam", {}, share_weights=True, update_on_kvstore=on_store)
            assert all(equal(plain[0], theirs) for theirs in shared)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_shared_weights_are_new_memory_after_each_step(wanted: bool, share: bool) -> None:
    def work(store: DistStore) -> tuple[int, int]:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, overlap=wanted, share_weights=share)
        moved = []
        for step in range(3):
            before = [param.data for param in model.parameters()]  # kept, so that their memory is not used again
            backward(model, step)
            trainer.step()
            moved.append(sum(a.data_ptr() != b.data_ptr() for a, b in zip(before, model.parameters(), strict=True)))
        return moved[1], moved[2]

    with ThreadedJob(1, 1) as pair:
        assert pair.run(work) == [(2 * LAYERS, 2 * LAYERS) if share else (0, 0)]


def test_an_async_store_gives_a_single_worker_the_same_too() -> None:
    with ThreadedJob(1, 2, bigarray_bound=20) as pair:
        plain, early = (trained(pair, wanted, "adam", {}, mode="async")[0] for wanted in (False, True))
    assert equal(plain, early)


def test_workers_need_not_agree_on_it() -> None:
    """Each decides by what it has seen."""

    def work(store: DistStore, same: bool) -> list[torch.Tensor]:
        model = models[store.rank]
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, overlap=store.rank == 1 or same)
        for step in range(4):
            backward(model, step, slice(3 * store.rank, 3 * store.rank + 3))
            trainer.step()
        return weights(model)

    results = []
    with ThreadedJob(2, 2, bigarray_bound=20) as pair:
        for same in (True, False):
            models = [network(), network()]
            results += pair.run(partial(work, same=same))
    assert all(equal(results[0], other) for other in results)


def test_the_last_layers_are_pushed_before_backward_is_over() -> None:
    rig = Rig()
    for layer in (1, 3):
        rig.model[layer].register_full_backward_hook(lambda *_, layer=layer: rig.store.diary.append(layer))
    backward(rig.model, 1)
    # Layers 1 and 3 have no parameters; backward comes through 3 when it has left the last layer.
    assert rig.store.diary == [(FIRST, -4), 3, (SECOND, -2), 1, (THIRD, 0)]


def test_a_step_pushes_nothing_twice(rig: Rig) -> None:
    for step in range(1, 4):
        rig.step(step)
        assert rig.store.keys() == [FIRST, SECOND, THIRD]


def test_weights_and_gradients_stay_until_the_step(rig: Rig) -> None:
    before = weights(rig.model)
    backward(rig.model, 1)
    alone = network()
    alone.load_state_dict(rig.model.state_dict())
    backward(alone, 1)
    assert equal(weights(rig.model), before)
    assert equal([p.grad for p in rig.params], [p.grad for p in alone.parameters()])  # type: ignore[misc]
    rig.trainer.step()
    assert not equal(weights(rig.model), before)


@pytest.mark.parametrize("share", [True, False])
def test_values_are_copied_once_at_most(share: bool) -> None:
    rig = Rig(share_weights=share)
    assert rig.store.copies == [not share], "into the parameters"
    rig.step(1)
    assert rig.store.copies[1:] == [False] * LAYERS, "the step copies what was held"


def test_gradients_that_no_backward_made_are_pushed_by_the_step(rig: Rig) -> None:
    for param in rig.params:
        param.grad = torch.ones_like(param)
    rig.trainer.step()
    assert rig.store.keys() == [rig.whole()]


def test_buckets_that_backward_has_not_filled_are_pushed_by_the_step(rig: Rig) -> None:
    rig.trainer.zero_grad()
    rig.model[4](torch.ones(1, 8)).sum().backward()
    for param in rig.params[:4]:
        param.grad = torch.ones_like(param)
    rig.trainer.step()
    assert rig.store.keys() == [FIRST, THIRD + SECOND]


def test_allreduce_grads_waits_for_what_was_pushed() -> None:
    rig = Rig(update_on_kvstore=False)
    backward(rig.model, 1)
    rig.trainer.allreduce_grads()
    assert rig.store.keys() == [FIRST, SECOND, THIRD]
    nn.utils.clip_grad_norm_(rig.params, 0.01)
    plain = Rig(False, update_on_kvstore=False)
    backward(plain.model, 1)
    plain.trainer.allreduce_grads()
    nn.utils.clip_grad_norm_(plain.params, 0.01)
    for one in (rig, plain):
        one.trainer.update()
    assert equal(weights(rig.model), weights(plain.model))


def test_a_small_model_goes_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", 1 << 20)
    rig = Rig()
    rig.step(1)
    assert rig.store.keys() == [rig.whole()]


def accumulate(rig: Rig, step: int) -> None:
    backward(rig.model, step)
    loss_of(rig.model, step, slice(6, 12)).backward()
    rig.trainer.step()


def clip(rig: Rig, step: int) -> None:
    backward(rig.model, step)
    nn.utils.clip_grad_norm_(rig.params, 1e9)
    rig.trainer.step()


def clip_data(rig: Rig, step: int) -> None:
    backward(rig.model, step)
    for param in rig.params:
        param.grad.data.mul_(0.5)  # type: ignore[union-attr]
    rig.trainer.step()


def replace(rig: Rig, step: int) -> None:
    backward(rig.model, step)
    rig.params[0].grad = torch.ones_like(rig.params[0])
    rig.trainer.step()


def schedule(rig: Rig, step: int) -> None:
    backward(rig.model, step)
    rig.trainer.set_learning_rate(1 / (2 + step))
    rig.trainer.step()


def gluon(rig: Rig, step: int) -> None:
    backward(rig.model, step)
    rig.trainer.step(6)


def two_parts(rig: Rig, step: int) -> None:
    """What the last layers get first is dropped."""
    backward(rig.model, step)
    rig.trainer.zero_grad()
    loss_of(rig.model, step).backward()
    rig.trainer.step()


PROGRAMS = [accumulate, clip, clip_data, replace, schedule, gluon, two_parts]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_changes_its_gradients_is_left_alone(
    program: Callable[[Rig, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=overlap.__name__)
    plain, watched = Rig(False, steps=0), Rig("auto", steps=0)
    for step in range(overlap.WATCHED_STEPS + 3):
        for rig in (plain, watched):
            program(rig, step)
            assert rig.store.keys() == [rig.whole()]
    assert equal(weights(plain.model), weights(watched.model))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "gradients will not be pushed during backward"
    ], "once"


def test_a_program_that_may_is_overlapped_after_the_watched_steps() -> None:
    rig = Rig("auto", steps=overlap.WATCHED_STEPS - 1)
    assert not rig.trainer.overlaps
    rig.step(90)
    assert rig.store.keys() == [rig.whole()]
    assert rig.trainer.overlaps
    rig.step(91)
    assert rig.store.keys() == [FIRST, SECOND, THIRD]


def test_the_beginning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=overlap.__name__)
    Rig("auto", steps=overlap.WATCHED_STEPS + 2)
    assert caplog.messages == ["gradients are pushed during backward from now on, in 3 messages"]


def test_the_old_word_for_auto_warns() -> None:
    with pytest.warns(DeprecationWarning, match='overlap=None is now overlap="auto"'):
        Trainer(network().named_parameters(), "sgd", SGD, overlap=None)


def test_a_gan_is_left_alone() -> None:
    """Its generator's backward runs through the discriminator, every fifth step."""
    rig = Rig("auto", steps=0)
    for step in range(20):
        rig.step(step)
        assert rig.store.keys() == [rig.whole()]
        if step % 5 == 4:
            backward(rig.model, step)


def test_steps_without_a_backward_say_nothing() -> None:
    rig = Rig("auto", steps=0)
    for _ in range(overlap.WATCHED_STEPS + 1):
        for param in rig.params:
            param.grad = torch.ones_like(param)
        rig.trainer.step()
    rig.step(1)
    assert rig.store.keys()[-1] == rig.whole()


def test_summed_gradients_do_not_care_for_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "WATCHED_STEPS", 1)
    rig = Rig("auto", update_on_kvstore=False)
    for step in (1, 2):
        backward(rig.model, step)
        rig.trainer.set_learning_rate(0.1 / step)
        rig.trainer.step(step)
    assert rig.store.keys() == [FIRST, SECOND, THIRD] * 2


@pytest.mark.parametrize("store", ["local", "device", None])
def test_stores_of_one_process_have_nothing_to_overlap(store: str | None) -> None:
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore=store is not None)
    assert hooks(model) == 0
    assert not trainer.overlaps


def hooks(model: nn.Module) -> int:
    """How many hooks of gradients there are; torch does not tell otherwise."""
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())  # type: ignore[attr-defined]


def test_the_hooks_go_with_the_trainer() -> None:
    rig = Rig()
    assert hooks(rig.model) == 2 * LAYERS
    gone = weakref.ref(rig.trainer)
    del rig.trainer
    gc.collect()
    assert gone() is None
    assert hooks(rig.model) == 0


def test_a_closed_trainer_pushes_in_its_steps(rig: Rig) -> None:
    rig.trainer.close()
    rig.trainer.close()
    assert hooks(rig.model) == 0
    rig.step(1)
    assert rig.store.keys() == [rig.whole()]


def test_closing_between_backward_and_step(rig: Rig) -> None:
    backward(rig.model, 1)
    rig.trainer.close()
    rig.trainer.step()
    assert rig.store.keys() == [FIRST, SECOND, THIRD]


def test_two_trainers_of_one_model() -> None:
    rig = Rig()
    other = Recorder()
    second = Trainer(rig.model.named_parameters(), "sgd", SGD, other, update_on_kvstore=False, overlap=True)
    for step in (1, 2):
        rig.step(step)
        second.allreduce_grads()
    assert rig.store.keys() == [FIRST, SECOND, THIRD] * 2
    assert other.keys() == [rig.whole(), FIRST, SECOND, THIRD]


# ---- Overlap on a CUDA device


@pytest.mark.gpu
@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_on_a_cuda_device(cuda: torch.device, update_on_kvstore: bool) -> None:
    def work(store: DistStore, wanted: bool) -> list[torch.Tensor]:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(cuda)
        torch.manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0, 0.05)
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore, overlap=wanted)
        for step in range(5):
            trainer.zero_grad()
            with torch.cuda.stream(torch.cuda.Stream() if step % 2 else torch.cuda.current_stream()):
                model(torch.full((64, 256), 1.0 + step + store.rank, device=cuda)).square().mean().backward()
            torch.cuda.synchronize()
            trainer.step()
        return [value.cpu() for value in weights(model)]

    results: list[list[torch.Tensor]] = []
    with ThreadedJob(2, 2) as pair:
        for wanted in (False, True):
            results += pair.run(partial(work, wanted=wanted))
    assert all(equal(results[0], other) for other in results)
