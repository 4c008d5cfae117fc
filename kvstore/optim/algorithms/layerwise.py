"""Optimizers with a learning rate for each tensor, by the norms of its weights and of its update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore.optim.algorithms.tensorwise import Group, State, Tensorwise, counted, decayed, kept, valid


class LARS(Tensorwise):
    """LARS (You et al., arXiv:1708.03888), as MXNet has it: SGD whose rate is adapted for each tensor.

    ``r = eta·‖w‖/(‖g‖ + weight_decay·‖w‖ + eps)``, or 1 if one of the norms is 0, and for arrays of one dimension:
    biases, and scales of normalizations, which MXNet knows by their names.

    Args:
        params, lr, momentum, weight_decay: see torch's SGD.
        eta: how large steps are beside the weights.
        eps: added to the denominator.
        momentum_correction: whether the current rate is that of past steps, too, as in torch. If not, each step in the
            momentum keeps the rate that it was made with.
    """

    elementwise: ClassVar[bool] = False
    aliases: ClassVar[Mapping[str, str]] = {"lars_eta": "eta", "lars_epsilon": "eps"}
    state_options: ClassVar[tuple[str, ...]] = ("momentum_correction",)

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        momentum: float = 0.0,
        eta: float = 0.001,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum_correction: bool = True,
    ) -> None:
        super().__init__(
            params,
            valid(
                lr=lr,
                momentum=momentum,
                eta=eta,
                eps=eps,
                weight_decay=weight_decay,
                momentum_correction=momentum_correction,
            ),
        )

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        factor = 1.0
        if weight.dim() > 1:
            length, slope = _norm(weight), _norm(grad)
            if length > 0 and slope > 0:
                factor = group["eta"] * length / (slope + group["weight_decay"] * length + group["eps"])
        early, late = (1.0, group["lr"]) if group["momentum_correction"] else (group["lr"], 1.0)
        step = decayed(grad, weight, group["weight_decay"]).mul_(factor * early)
        if group["momentum"]:
            step = kept(state, "momentum_buffer", weight).mul_(group["momentum"]).add_(step)
        weight.add_(step, alpha=-late)


class LAMB(Tensorwise):
    """LAMB (You et al., arXiv:1904.00962), as MXNet has it: Adam whose rate is adapted for each tensor.

    ``u = m̂/(√v̂ + eps) + weight_decay·w``, then ``w -= lr·‖w‖/‖u‖·u``; the ratio is 1 if one of the norms is 0.

    Args:
        params, lr, betas, eps: see torch's Adam.
        weight_decay: added to Adam's step.
        lower_bound, upper_bound: of ``‖w‖`` in the ratio; None for none.
        bias_correction: whether to correct the averages for their beginning at 0.
    """

    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
    ) -> None:
        bounds = valid(lower_bound=lower_bound, upper_bound=upper_bound, bias_correction=bias_correction)
        super().__init__(params, valid(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay) | bounds)

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        divisor, correction = _moments(grad, weight, state, group, corrected=group["bias_correction"])
        step = (state["exp_avg"] / correction).div_(divisor).add_(weight, alpha=group["weight_decay"])
        weight.add_(step, alpha=-group["lr"] * _trust(_length(weight, group), step))


class LANS(Tensorwise):
    """LANS (Zheng et al., arXiv:2006.13484), as MXNet 2 has it: LAMB of normalized gradients, with Nesterov's momentum.

    ``g = g/‖g‖``; of the steps ``m̂/(√v̂ + eps)`` and ``g/(√v̂ + eps)``, each with ``weight_decay·w`` added and with its
    own ratio of norms, as in LAMB, ``w`` makes ``beta1`` of the first and ``1 - beta1`` of the second.

    Args:
        params, lr, betas, eps, weight_decay, lower_bound, upper_bound: see ``LAMB``.
    """

    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
    ) -> None:
        bounds = valid(lower_bound=lower_bound, upper_bound=upper_bound)
        super().__init__(params, valid(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay) | bounds)

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        if slope := _norm(grad):
            grad.div_(slope)
        divisor, correction = _moments(grad, weight, state, group, corrected=True)
        length, (beta1, _) = _length(weight, group), group["betas"]
        past = (state["exp_avg"] / correction).div_(divisor).add_(weight, alpha=group["weight_decay"])
        present = grad.div_(divisor).add_(weight, alpha=group["weight_decay"])
        for share, step in ((beta1, past), (1 - beta1, present)):
            weight.add_(step, alpha=-group["lr"] * share * _trust(length, step))


def _moments(
    grad: Tensor,
    weight: Tensor,
    state: State,
    group: Mapping[str, Any],
    *,
    corrected: bool,
) -> tuple[Tensor, float]:
    """Update Adam's averages; return ``√v̂ + eps``, and what ``m`` is to be divided by to give ``m̂``."""
    step = counted(state, "exp_avg", "exp_avg_sq", like=weight)
    beta1, beta2 = group["betas"]
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    return (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"]), first


def _length(weight: Tensor, group: Mapping[str, Any]) -> float:
    """Return the norm of ``weight`` within the bounds of ``group``."""
    length = _norm(weight)
    if group["lower_bound"] is not None:
        length = max(length, group["lower_bound"])
    return length if group["upper_bound"] is None else min(length, group["upper_bound"])


def _trust(length: float, step: Tensor) -> float:
    """Return the ratio of norms of a weight and its step; 1 if one is 0, or what has no finite ratio."""
    size = _norm(step)
    ratio = length / size if size else 0.0
    return ratio if ratio and math.isfinite(ratio) else 1.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


class SGLD(Tensorwise):
    """SGLD (Welling and Teh, ICML 2011), as MXNet has it: ``w -= lr/2·(g + weight_decay·w)``, plus noise N(0, lr).

    The noise of each process is its own, and differs from run to run: pieces of one array on two servers must not have
    the same.

    Args:
        params, lr, weight_decay: see torch's SGD.
        generator: of the noise; None for one that the system has seeded.
    """

    random: ClassVar[bool] = True

    def __init__(
        self, params: Any, lr: float = 0.01, weight_decay: float = 0.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(params, valid(lr=lr, weight_decay=weight_decay))
        self._generators = {} if generator is None else {generator.device: generator}

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        generator = self._generators.get(weight.device)
        if generator is None:
            generator = self._generators[weight.device] = torch.Generator(weight.device)
            generator.seed()
        noise = torch.empty_like(weight).normal_(generator=generator)
        weight.add_(decayed(grad, weight, group["weight_decay"]), alpha=-group["lr"] / 2)
        weight.add_(noise, alpha=math.sqrt(group["lr"]))
