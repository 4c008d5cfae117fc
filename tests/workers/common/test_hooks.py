"""Hooks that tell somebody of each gradient, during backward."""

from __future__ import annotations

import gc
import weakref

import torch

from workers.common.pushed import Hooks


class Listener:
    def __init__(self) -> None:
        self.heard: list[int] = []

    def arrive(self, position: int) -> None:
        self.heard.append(position)


def params() -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(3)]


def backward(tensors: list[torch.Tensor]) -> None:
    first, second, third = tensors
    ((first * second) * third).sum().backward()


def test_each_gradient_is_told_by_position_when_it_is_there() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    assert hooks.active
    backward(tensors)
    assert sorted(listener.heard) == [0, 1, 2]
    assert listener.heard[0] == 2, "the last factor's comes first"


def test_in_a_pause_the_watcher_is_told_and_knows() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    with hooks.paused():
        with hooks.paused():
            pass
        assert hooks.resting, "an inner block does not end the outer one"
        backward(tensors)
    assert not hooks.resting
    assert len(listener.heard) == 3


def test_removed_hooks_tell_nothing() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    hooks.remove()
    assert not hooks.active
    backward(tensors)
    assert listener.heard == []


def test_parameters_do_not_keep_the_watcher() -> None:
    tensors, listener = params(), Listener()
    hooks = Hooks(listener, tensors)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    assert not hooks.active
    backward(tensors)
