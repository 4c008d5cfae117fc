"""A trainer that overlaps, and what its store was given."""

from __future__ import annotations

from typing import Any

from layers import SGD, backward, network

from kvstore.store.local import LocalStore
from kvstore.ticket import Ticket
from workers import Trainer

LAYERS = 3  # of a bucket each


class Recorder(LocalStore):
    """A local store that keeps a diary."""

    def __init__(self) -> None:
        super().__init__("dist_recorder")
        self.diary: list[Any] = []
        self.copies: list[bool] = []

    def _pushpull(self, values: dict[Any, list[Any]], outs: dict[Any, list[Any]], priority: int, copy: bool) -> Ticket:
        self.diary.append((list(values), priority))
        self.copies.append(copy)
        return super()._pushpull(values, outs, priority, copy)

    def keys(self) -> list[list[str]]:
        """The lists of keys since the last call."""
        listed, self.diary = [entry[0] for entry in self.diary], []
        return listed


class Rig:
    """A trainer that overlaps, its model and its store; the watched first step has been made."""

    def __init__(self, wanted: bool | str = True, steps: int = 1, **how: Any) -> None:
        self.model, self.store = network(), Recorder()
        self.trainer = Trainer(self.model.named_parameters(), "sgd", SGD, self.store, overlap=wanted, **how)
        self.params = list(self.model.parameters())
        for step in range(steps):
            self.step(step)
        self.store.keys()

    def step(self, step: int) -> None:
        backward(self.model, step)
        self.trainer.step()

    def whole(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]


FIRST, SECOND, THIRD = ["4.weight", "4.bias"], ["2.weight", "2.bias"], ["0.weight", "0.bias"]
