"""A rule: how the gradients of some rows of a table change these rows, and what is kept of each row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvstore.cached import cached
from kvstore.optim.algorithms.tensorwise import Tensorwise

States: TypeAlias = Mapping[str, Tensor]  # of the rows, by name, each of shape (n, columns)
Settings: TypeAlias = Mapping[str, Any]  # a param group of torch's optimizer: hyper-parameters by torch's names


class RowState(NamedTuple):
    """What an optimizer keeps of each row, under one name."""

    columns: int | None  # how many numbers; None: as many as the row has elements
    dtype: str  # of the numbers
    initial: float | None = 0.0  # what they are before the row's first update; None: the row itself


class RowRule(ABC):
    """A formula for rows of any number. What it gives for one row does not depend on the others.

    A rule has no memory of its own: what a row's next update needs is in the row's states, and the count of updates is
    the table's.
    """

    scratches: ClassVar[bool] = True  # whether ``step`` uses its scratch memory

    @abstractmethod
    def states(self, settings: Settings, dtype: str) -> dict[str, RowState]:
        """Return what is kept of each row, by name; ``dtype`` is that of the rows."""

    def reads_only(self, settings: Settings) -> bool:
        """Whether ``step`` leaves gradients as they are."""
        return False

    @abstractmethod
    def step(
        self, rows: Tensor, grads: Tensor, states: States, settings: Settings, count: int, scratch: Tensor
    ) -> None:
        """Update rows and states in place; overwrite ``grads``, and ``scratch`` if ``scratches``.

        All of these are of shape (n, width). ``count`` is the number of this update of the table, from 1.
        """


def prepare(rows: Tensor, grads: Tensor, settings: Settings) -> None:
    """Turn gradients round if the loss is to grow, and add the decay of the rows; in place."""
    if settings["maximize"]:
        grads.neg_()
    if settings["weight_decay"]:
        grads.add_(rows, alpha=settings["weight_decay"])


class SGDRows(RowRule):
    """SGD; with momentum, a row that has no gradient neither moves nor loses momentum, as in MXNet.

    In torch's style ``m = momentum·m + (1 - dampening)·g``, then ``w -= lr·m``, or ``w -= lr·(g + momentum·m)`` with
    Nesterov's momentum. In MXNet's, ``m = momentum·m + lr·g``, then ``w -= m``, or ``w -= lr·g + momentum·m``. Without
    momentum it is torch's SGD of coalesced sparse gradients, to the bit. Of others torch subtracts what an id has
    several times one by one; here it is summed first, since workers, or positions of a batch, may have rows of one id.
    """

    scratches = False

    def states(self, settings: Settings, dtype: str) -> dict[str, RowState]:
        return {"momentum_buffer": RowState(None, dtype)} if settings["momentum"] else {}

    def reads_only(self, settings: Settings) -> bool:
        if settings["maximize"] or settings["weight_decay"]:
            return False
        return not settings["momentum"] or not (settings["nesterov"] or settings.get("momentum_style") == "mxnet")

    def step(
        self, rows: Tensor, grads: Tensor, states: States, settings: Settings, count: int, scratch: Tensor
    ) -> None:
        prepare(rows, grads, settings)
        lr, momentum = settings["lr"], settings["momentum"]
        if not momentum:
            rows.add_(grads, alpha=-lr)
            return
        if settings.get("momentum_style") == "mxnet":
            grads.mul_(lr)
            lr = 1.0
        buffer = states["momentum_buffer"]
        # As in torch, the first update is not dampened.
        buffer.mul_(momentum).add_(grads, alpha=1 - settings["dampening"] if count > 1 else 1)
        step = grads.add_(buffer, alpha=momentum) if settings["nesterov"] else buffer
        rows.add_(step, alpha=-lr)


class AdagradRows(RowRule):
    """Adagrad, without decay to the bit as torch computes it of sparse gradients.

    ``s += g²``, then ``w -= lr/(1 + (t - 1)·lr_decay)·g/(√s + eps)``, where ``t`` counts the table's updates.
    """

    def states(self, settings: Settings, dtype: str) -> dict[str, RowState]:
        return {"sum": RowState(None, dtype, settings["initial_accumulator_value"])}

    def step(
        self, rows: Tensor, grads: Tensor, states: States, settings: Settings, count: int, scratch: Tensor
    ) -> None:
        prepare(rows, grads, settings)
        states["sum"].add_(torch.mul(grads, grads, out=scratch))
        grads.div_(torch.sqrt(states["sum"], out=scratch).add_(settings["eps"]))
        rows.add_(grads, alpha=-settings["lr"] / (1 + (count - 1) * settings["lr_decay"]))


@dataclass(frozen=True)
class AdamRows(RowRule):
    """Adam. Without decay it is torch's ``SparseAdam``, to the bit: the same operations, on gathered rows.

    The averages ``m`` and ``v`` of a row stay as they are while it has no gradient; their bias is corrected by the
    count of the table's updates. ``w -= lr·√(1 - beta2ᵗ)/(1 - beta1ᵗ)·m/(√v + eps)``. With decoupled decay it is AdamW,
    whose ``eps`` is added to the corrected root: ``w -= lr/(1 - beta1ᵗ)·m/(√(v/(1 - beta2ᵗ)) + eps)``.

    An update without rows counts. So it does in torch if there is a gradient that has no rows; torch leaves out what
    has no gradient. A server cannot tell the two apart, for the rows of a round may all be on other servers.
    """

    decoupled: bool = False  # whether decay is decoupled, where the hyper-parameters do not say

    def states(self, settings: Settings, dtype: str) -> dict[str, RowState]:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else [])]
        return {name: RowState(None, dtype) for name in names}

    def reads_only(self, settings: Settings) -> bool:
        decays = settings["weight_decay"] and not settings.get("decoupled_weight_decay", self.decoupled)
        return not (settings["maximize"] or decays)

    def step(
        self, rows: Tensor, grads: Tensor, states: States, settings: Settings, count: int, scratch: Tensor
    ) -> None:
        mean, square, (beta1, beta2), lr = states["exp_avg"], states["exp_avg_sq"], settings["betas"], settings["lr"]
        decoupled = settings.get("decoupled_weight_decay", self.decoupled)
        if decoupled:
            rows.mul_(1 - lr * settings["weight_decay"])
            settings = {**settings, "weight_decay": 0}
        prepare(rows, grads, settings)
        torch.mul(grads, grads, out=scratch)
        square.add_(scratch.sub_(square).mul_(1 - beta2))
        mean.add_(torch.sub(grads, mean, out=scratch).mul_(1 - beta1))
        if settings["amsgrad"]:
            square = torch.maximum(states["max_exp_avg_sq"], square, out=states["max_exp_avg_sq"])
        first, root = 1 - beta1**count, math.sqrt(1 - beta2**count)
        torch.sqrt(square, out=scratch)
        if decoupled:
            scratch.div_(root)
            root = 1.0
        torch.div(mean, scratch.add_(settings["eps"]), out=scratch)
        rows.add_(scratch.mul_(-(lr * root / first)))


@dataclass(frozen=True)
class TensorwiseRows(RowRule):
    """The formula of an optimizer that updates each element, or each row of a matrix, by itself."""

    cls: type[Tensorwise]
    wide: Sequence[str] = ()  # the names of states that are as wide as a row
    narrow: Sequence[str] = ()  # the names of states that are one number for each row
    initial: str | None = None  # the hyper-parameter that says what the narrow states are at first; None: 0

    def states(self, settings: Settings, dtype: str) -> dict[str, RowState]:
        first = settings[self.initial] if self.initial else 0.0
        wide = {name: RowState(None, dtype) for name in self.wide}
        return wide | {name: RowState(1, dtype, first) for name in self.narrow}

    def step(
        self, rows: Tensor, grads: Tensor, states: States, settings: Settings, count: int, scratch: Tensor
    ) -> None:
        self._optimizer.update(
            rows, grads, {**states, "step": torch.tensor(count - 1.0, dtype=torch.float32, device="cpu")}, settings
        )

    @cached
    def _optimizer(self) -> Tensorwise:
        return self.cls([torch.zeros(1, 1, dtype=torch.float32, device="cpu")])
