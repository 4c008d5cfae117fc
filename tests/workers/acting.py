"""An environment and a policy for TorchRL, which say by which weights was played. Processes that play import it."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

SIZE = 1 << 16


class NothingHappens(EnvBase):
    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(seen=Unbounded((1,)))
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        return TensorDict(seen=torch.zeros(1))

    def _step(self, tensordict: TensorDict) -> TensorDict:
        return TensorDict(seen=torch.zeros(1), reward=torch.zeros(1), done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed: int | None) -> None:
        pass


class Tells(nn.Module):
    """Its action is the least and the greatest of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("extra", torch.zeros(3), persistent=False)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.weight.detach(), self.extra])
        return torch.stack([both.min(), both.max()])

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.weight.fill_(value)
            self.extra.fill_(value)


def policy() -> TensorDictModule:
    return TensorDictModule(Tells(), ["seen"], ["action"])
