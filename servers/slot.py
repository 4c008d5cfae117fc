"""One segment on a server: its value, its rounds, and the requests that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvstore.spec import Key, Spec
from kvstore.values import to_buffer
from kvstore.wire import Node, Pull, Push
from servers.rounds import Rounds

ADOPT = 1 << 16  # bytes; a smaller sum may be a view of a frame that many segments share


@dataclass
class Contribution:
    """A worker's part of a round: its values, and the hyper-parameters (lr, rescale) it wants them used with."""

    node: Node
    value: torch.Tensor
    hyper: tuple[float | None, float | None]


@dataclass
class Parked:
    """A push or pull that waits: for how many segments still, and the first error among those that have come."""

    peer: bytes
    request: Push | Pull
    left: int = 0
    error: Exception | None = None


@dataclass
class Slot:
    """A segment. Its memory is changed in place only while nobody else can hold a view of it."""

    id: int
    key: Key
    spec: Spec
    value: torch.Tensor
    rounds: Rounds[Contribution]
    parked: list[tuple[int, Parked]] = field(default_factory=list)
    _sent: bool = False
    _snapshot: torch.Tensor | None = None

    def assign(self, total: torch.Tensor) -> None:
        """Make ``total``, which nobody else will change, the value."""
        total = total.view(self.spec.shape)
        self.value = total if self.spec.nbytes >= ADOPT else total.clone()
        self._sent, self._snapshot = False, None

    def writable(self) -> torch.Tensor:
        """Return the value to be changed in place; what has been sent of it stays as it was."""
        if self._sent:
            self.value, self._sent = self.value.clone(), False
        self._snapshot = None
        return self.value

    def readable(self, *, lasting: bool) -> memoryview:
        """Return the value's bytes to be sent; they will not change.

        Args:
            lasting: the value will be replaced, not changed in place, so it can be sent itself.
        """
        if lasting:
            self._sent = True
            return to_buffer(self.value)
        if self._snapshot is None:
            self._snapshot = self.value.clone()
        return to_buffer(self._snapshot)

    def release(self, error: Exception | None) -> list[Parked]:
        """Let go those who waited for the round that is now complete; return the ones that wait for nothing more."""
        ready: list[Parked] = []
        waiting: list[tuple[int, Parked]] = []
        for clock, parked in self.parked:
            if clock > self.rounds.version:
                waiting.append((clock, parked))
                continue
            parked.left -= 1
            parked.error = parked.error or error
            if not parked.left:
                ready.append(parked)
        self.parked = waiting
        return ready
