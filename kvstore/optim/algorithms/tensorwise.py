"""What optimizers of our own share: they update one tensor after another, and say what a server must know of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from kvstore.optim.eager import eager


class Tensorwise(eager(torch.optim.Optimizer)):  # type: ignore[misc]
    """An optimizer that updates each tensor by itself, with state that belongs to this tensor alone.

    Attributes:
        elementwise: whether each element is updated by itself. If not, an array must neither be cut over servers nor
            be updated together with others.
        dims: how many dimensions arrays must have; None for any number.
        aliases: MXNet's names for hyper-parameters, where they are particular to this optimizer.
        state_options: hyper-parameters that decide what the state means, so that it is of no use with another value.
        random: whether the same gradients give other weights in another process.
    """

    elementwise: ClassVar[bool] = True
    dims: ClassVar[int | None] = None
    aliases: ClassVar[Mapping[str, str]] = {}
    state_options: ClassVar[tuple[str, ...]] = ()
    random: ClassVar[bool] = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, which may be overwritten.

        Args:
            closure: computes the loss and its gradients; called first.

        Returns:
            The result of ``closure``.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss

    @abstractmethod
    def update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any]
    ) -> None:
        """Update ``weight`` and ``state`` in place.

        Args:
            weight: to be updated.
            grad: its gradient, which may be overwritten.
            state: what the optimizer keeps of this weight; empty before the first update.
            group: the hyper-parameters.
        """


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the result of an optimizer's ``closure``, which computes gradients; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def required(what: str, value: float, low: float = 0.0, high: float = math.inf) -> float:
    """Return ``value``; raise ``ValueError``, as torch does, unless it is from ``low`` to below ``high``."""
    if not low <= value < high:
        raise ValueError(f"Invalid {what}: {value}")
    return value


def betas_of(betas: tuple[float, float]) -> tuple[float, float]:
    """Return two rates of decay; raise ``ValueError`` unless each is from 0 to below 1."""
    first, second = betas
    return required("beta1", first, high=1.0), required("beta2", second, high=1.0)


def adams(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """Return the hyper-parameters that an optimizer shares with Adam; raise ``ValueError`` if one is not valid."""
    return {
        "lr": required("learning rate", lr),
        "betas": betas_of(betas),
        "eps": required("eps", eps),
        "weight_decay": required("weight_decay", weight_decay),
    }


def bound_of(what: str, value: float | None) -> float | None:
    """Return a bound that may be None; raise ``ValueError`` if it is negative."""
    return None if value is None else required(what, value)


def counted(state: dict[str, torch.Tensor], *names: str, like: torch.Tensor) -> float:
    """Count an update in ``state``, and begin the tensors ``names`` at zeros; return which update it is, from 1."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    for name in names:
        kept(state, name, like)
    state["step"] += 1
    return float(state["step"])


def kept(state: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor ``name`` of ``state``, which begins at zeros."""
    if name not in state:
        state[name] = torch.zeros_like(like)
    return state[name]


def row_means(matrix: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row, of shape (rows, 1). Its bits depend neither on other rows nor on torch's threads.

    torch sums one long row by itself with several threads, each its part: so a row's bits would be others alone than
    among rows. Here such a row is summed as one of two.
    """
    rows = matrix.expand(2, -1) if matrix.shape[0] == 1 else matrix
    return rows.mean(dim=1, keepdim=True)[: matrix.shape[0]]


def decayed(grad: torch.Tensor, weight: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """Return ``grad`` with the decay of ``weight`` added, in place."""
    return grad.add_(weight, alpha=weight_decay) if weight_decay else grad
