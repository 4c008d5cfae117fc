"""What is used of torch's internals: it does what is needed, and says so where a version of torch lacks it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import kvstore as kv
from workers.common.torch_internals import (
    after_backward,
    current_backward,
    held_batches,
    is_compiled,
    multiply,
    note_step,
    write_count,
)


def test_writes_are_counted_but_for_those_around_torch() -> None:
    tensor = torch.zeros(2)
    before = write_count(tensor)
    tensor.add_(1)
    assert write_count(tensor) == before + 1
    tensor.numpy()[0] = 5
    assert write_count(tensor) == before + 1


def test_a_torch_that_does_not_count_writes_is_named() -> None:
    with pytest.raises(kv.Unsupported, match=r"has no Tensor\._version.*overlap=False"):
        write_count(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("lacking", [False, True])
def test_tensors_are_multiplied_in_place(lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking:
        monkeypatch.delattr(torch, "_foreach_mul_")
    tensors = [torch.ones(2), torch.tensor(3.0)]
    multiply(tensors, torch.tensor(0.5))
    assert tensors[0].tolist() == [0.5, 0.5]
    assert tensors[1].item() == 1.5


def test_what_is_to_come_after_backward_comes_when_all_gradients_are_there() -> None:
    first, last = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen: list[tuple[bool, bool]] = []

    def note() -> None:
        seen.append((first.grad is not None, last.grad is not None))

    last.register_post_accumulate_grad_hook(lambda _: after_backward(note))
    (first * 2 * last).sum().backward()
    assert seen == [(True, True)]


def test_a_torch_without_that_callback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    with pytest.raises(kv.Unsupported, match="no callback for the end of backward"):
        after_backward(lambda: None)


def test_each_backward_pass_has_a_number() -> None:
    leaf, seen = torch.ones(1, requires_grad=True), []
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append(current_backward()))
    assert current_backward() == -1
    for _ in range(2):
        (leaf * 2).sum().backward()
    assert current_backward() == -1
    assert seen[0] != seen[1]
    assert min(seen) >= 0


def test_a_torch_without_these_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(kv.Unsupported, match="does not tell which backward pass runs"):
        current_backward()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_modules_are_told_from_others() -> None:
    module = nn.Linear(1, 1)
    assert not is_compiled(module)
    assert is_compiled(torch.compile(module))
    assert is_compiled(torch.jit.trace(module, torch.zeros(1, 1)))
    module.compile()
    assert is_compiled(module)


def test_a_scheduler_does_not_warn_after_a_step_that_was_noted() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = StepLR(optimizer, 1)
    note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_torch_that_does_not_show_what_its_loaders_hold_is_no_loader_that_holds_nothing() -> None:
    class Iterator:
        _num_workers = 2

    assert held_batches(Iterator()) is None
    assert held_batches(None) == ()
