"""Overlap: what cannot be right raises, and the next step works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import SGD, backward, equal, loss_of, network, weights
from overlapping import FIRST, LAYERS, SECOND, THIRD, Recorder, Rig
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from kvstore.ticket import Ticket, claim
from workers import Trainer

pytestmark = pytest.mark.usefixtures("small_buckets")


def raises(text: str) -> Any:
    return pytest.raises(kv.UsageError, match=rf"{text}.*no_sync\(\).*overlap=False")


def recovers(rig: Rig) -> None:
    """The trainer goes on as before."""
    rig.store.keys()
    rig.step(7)
    assert rig.store.keys() == [FIRST, SECOND, THIRD]


def test_a_second_backward(rig: Rig) -> None:
    backward(rig.model, 1)
    with raises("second backward.*'4.(weight|bias)'"):
        loss_of(rig.model, 2).backward()
    with raises("'4.(weight|bias)' changed"):
        rig.trainer.step()
    assert rig.store.keys() == [FIRST, SECOND, THIRD]
    recovers(rig)


def test_a_second_backward_under_no_sync_is_as_wrong(rig: Rig) -> None:
    backward(rig.model, 1)
    with raises("second backward"), rig.trainer.no_sync():
        loss_of(rig.model, 2).backward()


@pytest.mark.parametrize("last_too", [True, False])
def test_no_sync_adds_gradients_up(rig: Rig, last_too: bool) -> None:
    plain = Rig(False, update_on_kvstore=rig.trainer.update_on_kvstore)
    for step in (1, 2):
        for one in (rig, plain):
            one.trainer.zero_grad()
            with one.trainer.no_sync():
                loss_of(one.model, step).backward()
                with one.trainer.no_sync():
                    loss_of(one.model, step, slice(6, 9)).backward()
                if last_too:
                    loss_of(one.model, step, slice(9, 12)).backward()
            if not last_too:
                loss_of(one.model, step, slice(9, 12)).backward()
            one.trainer.step()
        assert rig.store.keys() == [rig.whole()] if last_too else [FIRST, SECOND, THIRD]
    assert equal(weights(rig.model), weights(plain.model))


@pytest.mark.parametrize(
    "change",
    [
        lambda param: nn.utils.clip_grad_norm_([param], 1e9),
        lambda param: param.grad.add_(1),
        lambda param: setattr(param, "grad", param.grad.clone()),
        lambda param: param.grad.zero_(),
    ],
)
def test_a_gradient_that_was_changed_after_its_push(rig: Rig, change: Callable[[nn.Parameter], Any]) -> None:
    backward(rig.model, 1)
    change(rig.params[2])
    with raises(r"the gradient of '2\.weight' changed between backward\(\) and step\(\)"):
        rig.trainer.step()
    recovers(rig)


def write_numpy(grad: torch.Tensor) -> None:
    grad.numpy()[-1] = 7


@pytest.mark.parametrize(
    ("write", "share"),
    [(lambda grad: grad.data.view(-1)[-1:].mul_(1.0000002), True), (write_numpy, False)],
    ids=["a bit", "numpy"],
)
def test_writes_to_a_gradient_after_its_push_that_torch_does_not_count(
    write: Callable[[torch.Tensor], Any], share: bool
) -> None:
    """Every kind of write is found by what ``workers.common.pushed`` notes: see its tests."""
    for on_store in (True, False):
        rig, plain = (Rig(w, share_gradients=share, update_on_kvstore=on_store) for w in (True, False))
        for one in (rig, plain):
            with one.trainer.no_sync():
                backward(one.model, 1)
            write(one.params[2].grad)
            one.trainer.step()
        assert equal(weights(rig.model), weights(plain.model)), "what the error says to do"
        backward(rig.model, 2)
        write(rig.params[2].grad)
        with raises(r"the gradient of '2\.weight' changed between its push and step\(\), through \.data or numpy"):
            rig.trainer.step()
        recovers(rig)


def halve(param: torch.Tensor) -> None:
    param.grad.mul_(0.5)  # type: ignore[union-attr]


def halve_data(param: torch.Tensor) -> None:
    param.grad.data.mul_(0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("hook", [halve, halve_data])
def test_a_hook_that_was_registered_later_acts_or_is_an_error(hook: Callable[[torch.Tensor], None]) -> None:
    errors: list[str] = []
    for place in range(2 * LAYERS):
        rig, plain = Rig(True), Rig(False)
        for one in (rig, plain):
            one.params[place].register_post_accumulate_grad_hook(hook)
        plain.step(1)
        try:
            rig.step(1)
        except kv.UsageError as exc:
            errors.append(str(exc))
        else:
            assert equal(weights(rig.model), weights(plain.model))
    assert 0 < len(errors) < 2 * LAYERS, "the last hook of a bucket comes too late"
    assert all("no_sync" in text for text in errors)


def test_clipping_under_no_sync(rig: Rig) -> None:
    plain = Rig(False, update_on_kvstore=rig.trainer.update_on_kvstore)
    for one in (rig, plain):
        with one.trainer.no_sync():
            backward(one.model, 1)
        nn.utils.clip_grad_norm_(one.params, 0.1)
        one.trainer.step()
    assert equal(weights(rig.model), weights(plain.model))
    recovers(rig)


def test_gradients_that_were_dropped_after_their_push(rig: Rig) -> None:
    backward(rig.model, 1)
    rig.trainer.zero_grad()
    with pytest.raises(kv.UsageError, match=r"'0\.weight' has no gradient"):
        rig.trainer.step()
    recovers(rig)


def test_gradients_that_were_dropped_before_their_push(rig: Rig) -> None:
    rig.trainer.zero_grad()
    rig.params[4].sum().backward()
    rig.trainer.zero_grad()
    with raises(r"'4\.weight' was dropped"):
        rig.params[5].sum().backward()
    with pytest.raises(kv.UsageError, match=r"'0\.weight' has no gradient"):
        rig.trainer.step()
    assert rig.store.keys() == []
    recovers(rig)


def test_an_unused_parameter(rig: Rig) -> None:
    rig.trainer.zero_grad()
    unused = rig.params[0]
    unused.requires_grad_(False)
    before = weights(rig.model)
    loss_of(rig.model, 1).backward()
    with pytest.raises(kv.UsageError, match=r"'0\.weight' has no gradient"):
        rig.trainer.step()
    assert rig.store.keys() == [FIRST, SECOND], "stay pushed"
    assert equal(weights(rig.model), before)
    unused.requires_grad_(True)
    recovers(rig)


def test_an_unused_parameter_of_the_last_layers_holds_all_back(rig: Rig) -> None:
    rig.trainer.zero_grad()
    rig.model[:4](torch.ones(2, 4)).sum().backward()
    with pytest.raises(kv.UsageError, match=r"'4\.weight' has no gradient"):
        rig.trainer.step()
    assert rig.store.keys() == []


def test_another_batch_size_than_before() -> None:
    rig, plain = Rig(steps=0), Rig(False, steps=0)
    for step in range(3):
        for one in (rig, plain):
            backward(one.model, step)
            one.trainer.step(6)
    assert rig.store.keys() == [rig.whole(), *[FIRST, SECOND, THIRD] * 2]
    for one in (rig, plain):
        with one.trainer.no_sync():
            backward(one.model, 3)
        one.trainer.step(2)
        backward(one.model, 4)
        one.trainer.step(6)
    assert equal(weights(rig.model), weights(plain.model))
    backward(rig.model, 5)
    with raises("another batch size"):
        rig.trainer.step(2)


@pytest.mark.parametrize("filled", [False, True], ids=["set", "a tensor, filled in place"])
def test_a_learning_rate_that_changes_after_a_push(filled: bool) -> None:
    rig = Rig()
    (group,) = rig.trainer.optimizer.param_groups
    if filled:
        group["lr"] = torch.tensor(group["lr"])
    backward(rig.model, 1)
    rig.trainer.set_learning_rate(0.01)
    assert torch.is_tensor(group["lr"]) == filled
    with raises(r"learning rate changed between backward\(\) and step\(\), from 0.1"):
        rig.trainer.step()
    recovers(rig)


def test_states_that_are_half_updated(tmp_path: Path) -> None:
    rig = Rig()
    rig.trainer.save_states(tmp_path / "s")
    backward(rig.model, 1)
    for what, call in (("save", rig.trainer.save_states), ("load", rig.trainer.load_states)):
        with raises(rf"{what}_states\(\) between backward\(\) and step\(\)"):
            call(tmp_path / "s")
    rig.trainer.step()
    rig.trainer.load_states(tmp_path / "s")


def test_what_it_needs() -> None:
    with pytest.raises(kv.UsageError, match="overlap='always' must be True, False or 'auto'"):
        Trainer(network().parameters(), "sgd", overlap="always")
    with pytest.raises(kv.UsageError, match="overlap=True needs a store, and one device"):
        Trainer(network().parameters(), "sgd", kvstore=None, overlap=True)
    with pytest.raises(kv.UsageError, match="overlap=True needs a store, and one device"):
        Trainer([network().parameters(), network().parameters()], "sgd", kvstore="device", overlap=True)


class Failing(Recorder):
    """Refuses a list of keys, at once or at its ticket."""

    at_once = False
    which: list[str] | None = None

    def _pushpull(self, values: dict[Any, list[Any]], outs: dict[Any, list[Any]], priority: int, copy: bool) -> Ticket:
        if list(values) != self.which:
            return super()._pushpull(values, outs, priority, copy)
        self.diary.append((list(values), priority))
        error = kv.ServerError("out of order")
        if self.at_once:
            raise error
        ticket = Ticket("pushpull", list(values))
        claim(ticket).fail(error)
        return ticket


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("which", [FIRST, THIRD])
def test_a_push_that_fails_is_the_steps_error(at_once: bool, which: list[str]) -> None:
    rig, store = Rig(steps=0), Failing()
    rig.store, rig.trainer = store, Trainer(rig.model.named_parameters(), "sgd", SGD, store, overlap=True)
    rig.step(0)
    store.keys()
    before = weights(rig.model)
    store.at_once, store.which = at_once, which
    backward(rig.model, 1)
    # A refusal ends it; after a failure the others are pushed all the same, as the other workers will push theirs.
    assert store.keys() == ([FIRST] if at_once and which == FIRST else [FIRST, SECOND, THIRD])
    with pytest.raises(kv.ServerError, match="out of order"):
        rig.trainer.step()
    assert equal(weights(rig.model), before)
    store.which = None
    recovers(rig)


def test_workers_that_disagree_are_told_in_step() -> None:
    """And once: the next call of the store raises nothing."""

    def work(store: DistStore) -> list[torch.Tensor]:
        model = network()
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, overlap=True)
        for step in range(2):
            backward(model, step)
            trainer.step()
        trainer.set_learning_rate(0.1 + store.rank)
        backward(model, 2)
        before = weights(model)
        with pytest.raises(kv.Mismatch, match="disagree on the learning rate"):
            trainer.step()
        assert equal(weights(model), before)
        trainer.set_learning_rate(0.1)
        backward(model, 3)
        trainer.step()
        return weights(model)

    with ThreadedJob(2, 2, bigarray_bound=20) as pair:
        one, two = pair.run(work)
    assert equal(one, two)
