"""Optimizers that differ from SGD in their momentum, or in what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from kvstore.optim.algorithms.tensorwise import Tensorwise, decayed, evaluated, kept, required
from kvstore.optim.eager import eager

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
        defaults = {
            "lr": required("learning rate", lr),
            "momentum": required("momentum", momentum, high=1.0),
            "weight_decay": required("weight_decay", weight_decay),
            "wd_lh": required("wd_lh", wd_lh),
        }
        super().__init__(params, defaults)

    def update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any]
    ) -> None:
        """See ``Tensorwise``."""
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
        defaults = {
            "lr": required("learning rate", lr),
            "momentum": required("momentum", momentum, high=1.0),
            "lamda": required("lamda", lamda),
            "weight_decay": required("weight_decay", weight_decay),
        }
        super().__init__(params, defaults)

    def update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any]
    ) -> None:
        """See ``Tensorwise``."""
        if "previous" not in state:
            state["previous"] = weight.clone()
        drift = (weight - state["previous"]).mul_(grad).mul_(grad)
        step = decayed(grad, weight, group["weight_decay"]).add_(drift, alpha=group["lamda"]).mul_(-group["lr"])
        if group["momentum"]:
            step = kept(state, "momentum_buffer", weight).mul_(group["momentum"]).add_(step)
        state["previous"].copy_(weight)
        weight.add_(step)
