"""Optimizers that count updates in the param group, as those of pytorch-optimizer do: here each key has its own count.

A server updates keys in groups of its own making, and saves states key by key. A count that all keys share would be too
high, and would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

COUNT = "group_step"  # the name of the count in the state of a parameter
GROUPS_COUNT = "step"  # its name in the param group


def with_own_counts(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of ``cls`` that keeps the param group's count of updates in the state of each parameter."""

    class OwnCounts(cls):  # type: ignore[misc, valid-type]
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            (group,) = self.param_groups
            params = group["params"]
            by_count: dict[int, list[torch.Tensor]] = {}
            for param in params:
                count = self.state[param].get(COUNT, 0) if param in self.state else 0
                by_count.setdefault(int(count), []).append(param)
            try:
                for count, members in by_count.items():
                    self._step_from(count, members)
            finally:
                group["params"] = params

        def _step_from(self, count: int, members: list[torch.Tensor]) -> None:
            """Update ``members``, which have made ``count`` updates."""
            (group,) = self.param_groups
            group["params"] = members
            if count:
                group[GROUPS_COUNT] = count
                for param in members:
                    del self.state[param][COUNT]  # what it does not know, it may take for state of its own
            try:
                super().step()
                count = group[GROUPS_COUNT]
            finally:
                group.pop(GROUPS_COUNT, None)
                for param in members if count else ():
                    self.state[param][COUNT] = torch.tensor(float(count), dtype=torch.float32, device="cpu")

    return OwnCounts
