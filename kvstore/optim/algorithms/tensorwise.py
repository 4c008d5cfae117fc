"""What optimizers of our own share: they update one tensor after another, and say what a server must know of them."""

from __future__ import annotations

import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

# torch's optimizers without what they do for ``torch.compile`` alone.
#
# To make an optimizer of torch, or a step of it, imports torch's compiler: a second of processor time and 75 MB, in
# each server. The methods underneath compute the same, and servers compile nothing.
T = TypeVar("T", bound="type[torch.optim.Optimizer]")


def eager(cls: T) -> T:
    """Return a subclass of ``cls`` that makes the same steps, and neither imports nor tells torch's compiler.

    Args:
        cls: of ``torch.optim``. What decorates its ``step`` is left out: there torch turns gradients off, and marks
            the step for compilers and profilers.
    """
    optimizer: Any = cls
    subclass: T = _eager(optimizer)
    return subclass


@functools.cache
def _eager(optimizer: Any) -> Any:
    members = {
        "__doc__": optimizer.__doc__,
        "__module__": optimizer.__module__,
        "add_param_group": inspect.unwrap(optimizer.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(optimizer.step)),
    }
    return type(optimizer.__name__, (optimizer,), members)


State: TypeAlias = dict[str, Tensor]  # what is kept of one tensor, by name
Group: TypeAlias = Mapping[str, Any]  # the hyper-parameters of a param group


class Tensorwise(eager(torch.optim.Optimizer)):  # type: ignore[misc]
    """An optimizer that updates each tensor by itself, with state that belongs to this tensor alone."""

    # whether each element is updated by itself. If not, an array must neither be cut over servers nor be updated
    # together with others.
    elementwise: ClassVar[bool] = True
    dims: ClassVar[int | None] = None  # how many dimensions arrays must have; None for any number
    # MXNet's names for hyper-parameters, where they are particular to this optimizer
    aliases: ClassVar[Mapping[str, str]] = {}
    # hyper-parameters that decide what the state means, so that it is of no use with another value
    state_options: ClassVar[tuple[str, ...]] = ()
    random: ClassVar[bool] = False  # whether the same gradients give other weights in another process

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
    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        """Update ``weight`` and its ``state``, which is empty before the first update, in place.

        ``grad`` may be overwritten.
        """


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the result of an optimizer's ``closure``, which computes gradients; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def valid(*fractions: str, **values: Any) -> dict[str, Any]:
    """Return hyper-parameters by name; raise ``ValueError``, as torch does, if one is out of its range.

    Numbers are finite and not negative; those of ``fractions``, and betas, are below 1. None stands for no number.
    """
    numbers = {"learning rate" if name == "lr" else name: value for name, value in values.items() if value is not None}
    if "betas" in numbers:
        numbers["beta1"], numbers["beta2"] = values["betas"] = tuple(numbers.pop("betas"))
    for what, value in numbers.items():
        if not 0.0 <= value < (1.0 if what in (*fractions, "beta1", "beta2") else math.inf):
            raise ValueError(f"Invalid {what}: {value}")
    return values


def counted(state: State, *names: str, like: Tensor) -> float:
    """Count an update in ``state``, and begin the tensors ``names`` at zeros; return which update it is, from 1."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    for name in names:
        kept(state, name, like)
    state["step"] += 1
    return float(state["step"])


def kept(state: State, name: str, like: Tensor) -> Tensor:
    """Return the tensor ``name`` of ``state``, which begins at zeros."""
    if name not in state:
        state[name] = torch.zeros_like(like)
    return state[name]


def row_means(matrix: Tensor) -> Tensor:
    """Return the mean of each row, of shape (rows, 1). Its bits depend neither on other rows nor on torch's threads.

    torch sums one long row by itself with several threads, each its part: so a row's bits would be others alone than
    among rows. Here such a row is summed as one of two.
    """
    rows = matrix.expand(2, -1) if matrix.shape[0] == 1 else matrix
    return rows.mean(dim=1, keepdim=True)[: matrix.shape[0]]


def decayed(grad: Tensor, weight: Tensor, weight_decay: float) -> Tensor:
    """Return ``grad`` with the decay of ``weight`` added, in place."""
    return grad.add_(weight, alpha=weight_decay) if weight_decay else grad


MOMENTUM_STYLES = ("torch", "mxnet")


class MxnetSGD(eager(torch.optim.SGD)):  # type: ignore[misc]
    """SGD whose momentum holds steps, as MXNet's: each was made with the learning rate of its own update.

    It is torch's SGD of gradients that have been multiplied by their rate, with a rate of 1: ``m = momentum·m + lr·g``,
    then ``w -= m``, or ``w -= momentum·m + lr·g`` with Nesterov's momentum. Gradients are overwritten.

    Args:
        params: see torch.
        momentum_style: "mxnet"; every param group has it.
        options: torch's for SGD.
    """

    def __init__(self, params: Any, momentum_style: str = "mxnet", **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["momentum_style"] = momentum_style

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; see ``torch.optim.SGD.step``."""
        loss = evaluated(closure)
        own = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        try:
            for group, (lr, weight_decay) in zip(self.param_groups, own, strict=True):
                grads = [param.grad for param in group["params"] if param.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, lr)
                group.update(lr=1.0, weight_decay=lr * weight_decay)
            super().step()
        finally:
            for group, (lr, weight_decay) in zip(self.param_groups, own, strict=True):
                group.update(lr=lr, weight_decay=weight_decay)
        return loss


class Signum(Tensorwise):
    """Signum (Bernstein et al., arXiv:1802.04434), as MXNet has it: steps by the sign of the momentum.

    ``m = momentum·m + (1 - momentum)·(g + weight_decay·w)``, then ``w = (1 - lr·wd_lh)·w - lr·sign(m)``. Without
    momentum ``w = (1 - lr·weight_decay)·w - lr·sign(g)``.

    Args:
        params, lr: see torch.
        momentum: of the average of gradients.
        weight_decay: added to the gradient, or without momentum taken from the weight.
        wd_lh: decay that is taken from the weight (Loshchilov and Hutter, arXiv:1711.05101).
    """

    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0, wd_lh: float = 0.0
    ) -> None:
        super().__init__(params, valid("momentum", lr=lr, momentum=momentum, weight_decay=weight_decay, wd_lh=wd_lh))

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        lr, momentum = group["lr"], group["momentum"]
        if momentum:
            grad = decayed(grad, weight, group["weight_decay"])
            direction = kept(state, "momentum_buffer", weight).mul_(momentum).add_(grad, alpha=1 - momentum)
            shrinking = group["wd_lh"]
        else:
            direction, shrinking = grad, group["weight_decay"] + group["wd_lh"]
        weight.mul_(1 - lr * shrinking).add_(direction.sign(), alpha=-lr)


class DCASGD(Tensorwise):
    """SGD with delay compensation (Zheng et al., arXiv:1609.08326), as MXNet has it.

    ``m = momentum·m - lr·(g + weight_decay·w + lamda·g²·(w - v))``, where ``v`` is the weight before the last update,
    whoever made it. ``kvstore.create("dist_async", delay_compensation=0.04)`` takes the weight that the worker read.

    Args:
        params, lr, weight_decay: see torch.
        momentum: of the steps; the rate of its own update is in each.
        lamda: how much is compensated.
    """

    aliases: ClassVar[Mapping[str, str]] = {"lambda": "lamda"}

    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.0, lamda: float = 0.04, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, valid("momentum", lr=lr, momentum=momentum, lamda=lamda, weight_decay=weight_decay))

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        if "previous" not in state:
            state["previous"] = weight.clone()
        drift = (weight - state["previous"]).mul_(grad).mul_(grad)
        step = decayed(grad, weight, group["weight_decay"]).add_(drift, alpha=group["lamda"]).mul_(-group["lr"])
        if group["momentum"]:
            step = kept(state, "momentum_buffer", weight).mul_(group["momentum"]).add_(step)
        state["previous"].copy_(weight)
        weight.add_(step)
