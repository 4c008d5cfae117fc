"""Stochastic gradient Langevin dynamics: weights that are samples of a distribution instead of its maximum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from kvstore.optim.algorithms.tensorwise import Tensorwise, decayed, required


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
        defaults = {"lr": required("learning rate", lr), "weight_decay": required("weight_decay", weight_decay)}
        super().__init__(params, defaults)
        self._generators = {} if generator is None else {generator.device: generator}

    def update(
        self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any]
    ) -> None:
        """See ``Tensorwise``."""
        generator = self._generators.get(weight.device)
        if generator is None:
            generator = self._generators[weight.device] = torch.Generator(weight.device)
            generator.seed()
        noise = torch.empty_like(weight).normal_(generator=generator)
        weight.add_(decayed(grad, weight, group["weight_decay"]), alpha=-group["lr"] / 2)
        weight.add_(noise, alpha=math.sqrt(group["lr"]))
