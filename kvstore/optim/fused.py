"""Fused parameters: arrays that lie back to back and are updated alike are one parameter to torch.optim.

A step of torch.optim visits each parameter in Python. With thousands of small ones, that takes longer than the update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvstore.cached import cached
from kvstore.spec import Key
from kvstore.values import many_small, split_like

# Elements. Arrays whose sizes are multiples of it give the same bits alone and fused: no processor's vectors are
# longer, so no vector holds elements of two arrays.
LANE = 64

Kind: TypeAlias = tuple[int, float, float, torch.dtype, torch.device, bool]  # see ``FusedGroup``


@dataclass(eq=False)
class FusedParameter:
    """Arrays that are updated as one."""

    keys: tuple[Key, ...]  # of the arrays, in the order in memory
    shapes: tuple[Sequence[int], ...]  # of the arrays
    tensor: torch.Tensor  # what torch.optim knows: of the only array's shape, or flat
    master: bool  # whether ``tensor`` is a float32 copy of weights of half precision

    @cached
    def _ranges(self) -> dict[Key, tuple[int, int, Sequence[int]]]:
        """By key, where in ``tensor`` its array begins, its size, and its shape."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = list(itertools.accumulate(sizes, initial=0))[:-1]
        return dict(zip(self.keys, zip(starts, sizes, self.shapes, strict=True), strict=True))

    def state(self, key: Key, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the state of one of the keys, by name, given that of ``tensor``: views of it; the master is first."""
        return {name: self._part(key, value) for name, value in self.whole(state).items()}

    def whole(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the state of all keys, by name, given that of ``tensor``; the master is first."""
        every = {"master": self.tensor} if self.master else {}
        return every | {name: _tensor(value) for name, value in state.items() if value is not None}

    def _part(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        if len(self.keys) == 1 or not value.dim():  # a count of updates, which all have made
            return value
        start, size, shape = self._ranges[key]
        return value[start : start + size].view(shape)


class FusedGroup:
    """Parameters that are updated together.

    Args:
        kinds: for each parameter the number of its group of hyper-parameters, its multipliers of learning rate and
            weight decay, its dtype and device, and whether it has state already: torch's fused SGD takes the first
            momentum it finds for all.
        weights: for each parameter its weights, where they are now.
        flat: the weights of all, if they lie back to back. Thousands of small params then have memory of their own, for
            weights and for gradients, which are copied as a whole: to tell each of them where its own are by now takes
            longer than to update it.
        whole: whether the optimizer looks at whole arrays. Others treat arrays without elements as all others: these
            may be parts of a parameter, which has state.
    """

    def __init__(
        self,
        parameters: Sequence[FusedParameter],
        kinds: Sequence[Kind],
        weights: Sequence[torch.Tensor],
        flat: torch.Tensor | None = None,
        whole: bool = False,
    ) -> None:
        # what torch.optim knows, a tensor for each parameter
        self.params = [parameter.tensor for parameter in parameters]
        self.keys = [parameter.keys for parameter in parameters]
        self.members: dict[Kind, list[torch.Tensor]] = {}  # the same, by kind
        for param, kind in zip(self.params, kinds, strict=True):
            if whole and not param.numel():  # nothing to update, and Adafactor divides by the number of elements
                continue
            self.members.setdefault(kind, []).append(param)
        self.stepped = False  # whether they have been updated; then all have state
        self._weights = {place: weights[place] for place, parameter in enumerate(parameters) if parameter.master}
        self._sizes = [param.numel() for param in self.params]
        self._shaped = self.params if any(param.dim() != 1 for param in self.params) else None
        self._flat: torch.Tensor | None = None
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None  # weights and gradients
        if flat is not None and flat.device.type == "cpu" and many_small(len(self.params), flat.nbytes):
            self._own = self._apart()

    def _apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the params memory of their own; return it."""
        weights = torch.cat([param.reshape(-1) for param in self.params])
        grads = torch.empty_like(weights)
        for param, weight, grad in zip(self.params, self.split(weights), self.split(grads), strict=True):
            param.data, param.grad = weight, grad
        return weights, grads

    def point(self, flat: torch.Tensor) -> None:
        """Update the weights in ``flat``, back to back, from now on."""
        if flat is self._flat or self._own is not None:
            self._flat = flat
            return
        for place, (param, part) in enumerate(zip(self.params, self.split(flat), strict=True)):
            if place in self._weights:
                self._weights[place] = part
            else:
                param.data = part
        self._flat = flat

    def split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return split_like(flat, self._sizes, self._shaped)

    def take(self, grads: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Set the gradients: a tensor for each param, or one of all, back to back."""
        if self._own is not None and isinstance(grads, torch.Tensor):
            self._own[1].copy_(grads)
            return
        parts = self.split(grads) if isinstance(grads, torch.Tensor) else grads
        for param, part in zip(self.params, parts, strict=True):
            param.grad = part

    def mirror(self, place: int) -> torch.Tensor | None:
        """Return the weights of a param, flat, where they lie elsewhere than the param; ``finish`` copies it there."""
        if self._own is not None and self._flat is not None:
            start = sum(self._sizes[:place])
            return self._flat[start : start + self._sizes[place]]
        weight = self._weights.get(place)
        return None if weight is None else weight.view(-1)

    def drop(self) -> None:
        if self._own is None:
            for param in self.params:
                param.grad = None

    def finish(self) -> None:
        """Note that the params have been updated, and copy them to weights that lie elsewhere."""
        self.stepped = True
        if self._own is not None and self._flat is not None:
            self._flat.copy_(self._own[0])
            return
        for place, weight in self._weights.items():
            weight.copy_(self.params[place])


def alike(kinds: Sequence[Hashable], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return which arrays can be fused, as ranges of their places that together are all places."""
    ranges: list[tuple[int, int]] = []
    for place, kind in enumerate(kinds):
        if place and kind == kinds[place - 1] and sizes[place - 1] % LANE == 0:
            ranges[-1] = (ranges[-1][0], place + 1)
        else:
            ranges.append((place, place + 1))
    return ranges


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the state of a fused parameter, from the ``values`` that its arrays have of it."""
    first = values[0]
    if not first.dim():  # a count, or a number; an array that others follow in a parameter has dimensions
        return first.clone()
    return first if len(values) == 1 else torch.cat([value.reshape(-1) for value in values])


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    """Return a state as a tensor: some optimizers count in plain numbers."""
    # as_tensor would move a tensor to the program's default device, and give a number the default dtype.
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None, device="cpu")
