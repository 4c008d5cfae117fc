"""Hooks that tell a watcher, during backward, of each accumulated gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from kvstore.dynamo import outside_graphs


class Watcher(Protocol):
    """What is told of gradients."""

    def arrive(self, position: int) -> None:
        """Handle the gradient of the parameter at ``position``."""


class Hooks:
    """The hooks of parameters. They do not keep the watcher alive, and go with it.

    Args:
        watcher: the watcher. It is called in the thread that runs the parameter's part of backward, one per device.
        params: leaves, in the order of positions. Those that require no gradient now get no hook.

    Attributes:
        resting: whether the watcher should send nothing for now.
    """

    def __init__(self, watcher: Watcher, params: Sequence[torch.Tensor]) -> None:
        self.resting = False
        me = weakref.ref(watcher)
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(_hook(me, position))  # type: ignore[no-untyped-call]
            for position, param in enumerate(params)
            if param.requires_grad
        ]
        weakref.finalize(watcher, _remove, self._handles)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Set ``resting`` in this block."""
        before, self.resting = self.resting, True
        try:
            yield
        finally:
            self.resting = before

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._handles)

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)


def _hook(me: weakref.ref[Watcher], position: int) -> Callable[[torch.Tensor], None]:
    @outside_graphs
    def hook(_: torch.Tensor) -> None:
        watcher = me()
        if watcher is not None:
            watcher.arrive(position)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
