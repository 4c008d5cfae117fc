"""An optimizer as those of pytorch-optimizer are: it counts updates in the param group."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Counting(torch.optim.Optimizer):
    """Each step is as long as the number of updates so far."""

    def __init__(self, params: Any, lr: float = 1.0, betas: tuple[float, float] = (0.9, 0.9), mode: str = "a") -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not torch.isfinite(param.grad).all():
                    raise FloatingPointError("not finite")
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros_like(param)
                state["sum"] += param.grad
                param -= group["lr"] * group["step"]


class Elementwise(Counting):
    elementwise = True
    aliases: ClassVar[dict[str, str]] = {"rate": "lr"}


class KeepsInGroup(Counting):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["total"] = 1.0


class KeepsWords(Counting):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["kind"] = "x"


class KeepsElsewhere(Counting):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"] = torch.zeros(1)


class Demanding(Counting):
    def __init__(self, params: Any, total_steps: int, lr: float = 1.0) -> None:
        super().__init__(params, lr)


class Failing(Counting):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("needs a closure")


NOT_ONE = print
