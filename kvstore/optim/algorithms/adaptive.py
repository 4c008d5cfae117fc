"""Optimizers with a learning rate for each element, or for each row, by the gradients that it has had."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore.optim.algorithms.tensorwise import Group, State, Tensorwise, counted, decayed, kept, row_means, valid


class AdaBelief(Tensorwise):
    """AdaBelief (Zhuang et al., arXiv:2010.07468), as MXNet 2 has it.

    Adam, but ``s = beta2·s + (1 - beta2)·(g - m)² + eps`` for the squares: the variance of gradients about their mean.
    ``w -= lr·√(1 - beta2ᵗ)/(1 - beta1ᵗ)·m/(√s + eps)``.

    Args:
        params, lr, betas, eps: see torch's Adam.
        weight_decay: added to the gradient.
        correct_bias: whether to correct the averages for their beginning at 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ) -> None:
        super().__init__(
            params, valid(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias)
        )

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        step = counted(state, "exp_avg", "exp_avg_var", like=weight)
        mean, var, (beta1, beta2), lr = state["exp_avg"], state["exp_avg_var"], group["betas"], group["lr"]
        grad = decayed(grad, weight, group["weight_decay"])
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        surprise = grad.sub_(mean)
        var.mul_(beta2).addcmul_(surprise, surprise, value=1 - beta2).add_(group["eps"])
        if group["correct_bias"]:
            lr = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weight.addcdiv_(mean, var.sqrt().add_(group["eps"]), value=-lr)


class FTML(Tensorwise):
    """Follow the moving leader (Zheng and Kwok, ICML 2017).

    ``v = beta2·v + (1 - beta2)·g²``, ``d' = (1 - beta1ᵗ)/lr·(√(v/(1 - beta2ᵗ)) + eps)``,
    ``z = beta1·z + (1 - beta1)·g - (d' - beta1·d)·w``, ``w = -z/d'``. A learning rate of 0 changes nothing.

    Args:
        params, lr, betas, eps: see torch's Adam.
        weight_decay: added to the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.6, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, valid(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        step = counted(state, "d", "v", "z", like=weight)
        if not group["lr"]:  # every step is a division by it
            state["step"] -= 1
            return
        (beta1, beta2), v, z = group["betas"], state["v"], state["z"]
        grad = decayed(grad, weight, group["weight_decay"])
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        d = (v / (1 - beta2**step)).sqrt_().add_(group["eps"]).mul_((1 - beta1**step) / group["lr"])
        sigma = d - state["d"].mul_(beta1)
        z.mul_(beta1).add_(grad, alpha=1 - beta1).sub_(sigma.mul_(weight))
        state["d"].copy_(d)
        torch.div(z, d, out=weight).neg_()


class Ftrl(Tensorwise):
    """Follow the regularized leader (McMahan et al., KDD 2013).

    ``z += g - (√(n + g²) - √n)·w/lr``, ``n += g²``; ``w`` is 0 where ``|z| <= lamda1``, and elsewhere
    ``(sign(z)·lamda1 - z)/((beta + √n)/lr + weight_decay)``. A learning rate of 0 changes nothing.

    Args:
        params, lr: see torch.
        lamda1: the weight of the L1 norm, which makes small weights 0.
        beta: how slowly rates fall.
        weight_decay: the weight of the L2 norm.
    """

    aliases: ClassVar[Mapping[str, str]] = {"lambda1": "lamda1"}

    def __init__(
        self, params: Any, lr: float = 0.1, lamda1: float = 0.01, beta: float = 1.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, valid(lr=lr, lamda1=lamda1, beta=beta, weight_decay=weight_decay))

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        lr, lamda1, z, n = group["lr"], group["lamda1"], kept(state, "z", weight), kept(state, "n", weight)
        if not lr:  # every step is a division by it
            return
        before = n.sqrt()
        n.addcmul_(grad, grad)
        root = n.sqrt()
        z.add_(grad).sub_(before.neg_().add_(root).div_(lr).mul_(weight))
        divisor = root.add_(group["beta"]).div_(lr).add_(group["weight_decay"])
        torch.div(z.sign().mul_(lamda1).sub_(z), divisor, out=weight).masked_fill_(z.abs() <= lamda1, 0.0)


class GroupAdaGrad(Tensorwise):
    """Adagrad with one rate for each row of a matrix, as MXNet has it.

    ``h += mean(g²)`` of each row, then ``w -= lr·g/√(h + eps)``.

    Args:
        params: matrices.
        lr: see torch.
        eps: added to the history of each row.
    """

    elementwise: ClassVar[bool] = False
    dims: ClassVar[int | None] = 2
    aliases: ClassVar[Mapping[str, str]] = {"float_stable_eps": "eps"}

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-5) -> None:
        super().__init__(params, valid(lr=lr, eps=eps))

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        if "sum" not in state:
            state["sum"] = weight.new_zeros((weight.shape[0], 1))
        state["sum"].add_(row_means(grad.square()))
        weight.addcdiv_(grad, (state["sum"] + group["eps"]).sqrt_(), value=-group["lr"])


class RowWiseAdagrad(Tensorwise):
    """Adagrad with one number for each row of a matrix, as DLRM, FBGEMM and TorchRec have it for embeddings.

    ``s += mean(g²)`` of each row, then ``w -= lr·g/(√s + eps)``.

    Args:
        params: matrices.
        lr, weight_decay, initial_accumulator_value, eps: see torch's Adagrad.
    """

    elementwise: ClassVar[bool] = False
    dims: ClassVar[int | None] = 2

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(
            params,
            valid(lr=lr, weight_decay=weight_decay, initial_accumulator_value=initial_accumulator_value, eps=eps),
        )

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        if "sum" not in state:
            state["sum"] = weight.new_full((weight.shape[0], 1), group["initial_accumulator_value"])
        grad = decayed(grad, weight, group["weight_decay"])
        state["sum"].add_(row_means(grad.square()))
        weight.addcdiv_(grad, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


class RowWiseAdam(Tensorwise):
    """Adam with one second moment for each row of a matrix, as FBGEMM has it for embeddings (partial row-wise Adam).

    ``v = beta2·v + (1 - beta2)·mean(g²)`` of each row, then ``w -= lr·(m̂/(√v̂ + eps) + weight_decay·w)``.

    Args:
        params: matrices.
        lr, betas, eps: see torch's Adam.
        weight_decay: added to Adam's step.
    """

    elementwise: ClassVar[bool] = False
    dims: ClassVar[int | None] = 2

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, valid(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def update(self, weight: Tensor, grad: Tensor, state: State, group: Group) -> None:
        step = counted(state, "exp_avg", like=weight)
        mean, square, (beta1, beta2) = state["exp_avg"], kept(state, "exp_avg_sq", weight[:, :1]), group["betas"]
        square.mul_(beta2).add_(row_means(grad.square()), alpha=1 - beta2)
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        divisor = (square / (1 - beta2**step)).sqrt_().add_(group["eps"]).mul_(1 - beta1**step)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, divisor, value=-group["lr"])
