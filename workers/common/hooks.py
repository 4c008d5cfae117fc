"""Hooks that tell somebody, during backward, of each gradient that has been accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class Watcher(Protocol):
    """Who is told."""

    def arrive(self, position: int) -> None:
        """Take note of the gradient of the parameter at ``position``."""


class Hooks:
    """The hooks of parameters. They do not keep the watcher alive: with it they go.

    Args:
        watcher: who is told, in the thread that runs the parameter's part of backward: one for each device.
        params: leaves, in the order of positions.

    Attributes:
        resting: whether the watcher is to send nothing for now.
    """

    def __init__(self, watcher: Watcher, params: Sequence[torch.Tensor]) -> None:
        self.resting = False
        me = weakref.ref(watcher)
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(_hook(me, position))  # type: ignore[no-untyped-call]
            for position, param in enumerate(params)
        ]
        weakref.finalize(watcher, _remove, self._handles)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let ``resting`` be true in this block, for the watcher to act on."""
        before, self.resting = self.resting, True
        try:
            yield
        finally:
            self.resting = before

    @property
    def there(self) -> bool:
        """Whether they have not been removed."""
        return bool(self._handles)

    def remove(self) -> None:
        """Tell nothing more."""
        _remove(self._handles)


def _hook(me: weakref.ref[Watcher], position: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        watcher = me()
        if watcher is not None:
            watcher.arrive(position)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
