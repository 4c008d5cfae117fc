"""A network for DistOpt, and its updates by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workers import DistOpt

WORKERS, STEPS = 2, 5


SIZES = [3, 24, 8, 48]  # of the network's parameters, the last layers' first


OPTIONS = {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3}


Send = Callable[[list[list[Tensor]]], list[Tensor]]  # from gradients by worker and parameter to their sums


def network(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)  # torch's own is shared by the threads
    for param in model.parameters():
        param.data.normal_(0, 0.5, generator=generator)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return cross_entropy(model(torch.randn(7, 6, generator=generator)), torch.randint(3, (7,), generator=generator))


def parameters(model: nn.Module) -> list[Tensor]:
    """In SINGA's order."""
    return [*model.parameters()][::-1]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in parameters(model)])


def plain(grads: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(its).sum(0) for its in zip(*grads, strict=True)]


def by_hand(sends: list[Send], optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> Tensor:
    """The weights after a step for each way to send, in one process."""
    model = network()
    opt = optimizer(model.parameters(), **(OPTIONS if optimizer is torch.optim.SGD else {}))
    for step, send in enumerate(sends):
        grads = []
        for rank in range(WORKERS):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            grads.append([param.grad.clone() for param in parameters(model)])
        for param, total in zip(parameters(model), send(grads), strict=True):
            param.grad = total / WORKERS
        opt.step()
    return weights(model)


def with_dist_opt(call: Callable[[DistOpt, Tensor, int], None], steps: int = STEPS) -> Callable[[int], Tensor]:
    """One worker's part; its network begins with weights of its own."""

    def work(rank: int) -> Tensor:
        model = network(seed=rank)
        sgd = DistOpt(torch.optim.SGD(model.parameters(), **OPTIONS), "dist_sync")
        for step in range(steps):
            call(sgd, loss_of(model, rank, step), step)
        sgd.close()
        return weights(model)

    return work


class Half:
    """Float16 both ways, with feedback at the workers and at the servers."""

    def __init__(self) -> None:
        self.kept = [[torch.zeros(1)] * len(SIZES) for _ in range(WORKERS + 1)]

    def squeeze(self, whose: int, values: list[Tensor]) -> list[Tensor]:
        full = [value + kept for value, kept in zip(values, self.kept[whose], strict=True)]
        sent = [value.half().float() for value in full]
        self.kept[whose] = [value - its for value, its in zip(full, sent, strict=True)]
        return sent

    def __call__(self, grads: list[list[Tensor]]) -> list[Tensor]:
        return self.squeeze(WORKERS, plain([self.squeeze(rank, its) for rank, its in enumerate(grads)]))


class Sparse:
    """The elements that ``choose`` finds in a group of parameters, with or without feedback."""

    def __init__(self, choose: Callable[[Tensor], Tensor], groups: list[list[int]], corr: bool) -> None:
        self.choose, self.groups, self.corr = choose, groups, corr
        self.kept = [[torch.zeros(1)] * len(groups) for _ in range(WORKERS)]

    def __call__(self, grads: list[list[Tensor]]) -> list[Tensor]:
        sums = [torch.zeros_like(grad) for grad in grads[0]]
        for rank, its in enumerate(grads):
            for number, together in enumerate(self.groups):
                flat = torch.cat([its[i].flatten() for i in together]) + self.kept[rank][number]
                sent = torch.where(self.choose(flat), flat, 0.0)
                if self.corr:
                    self.kept[rank][number] = flat - sent
                for i, part in zip(together, sent.split([its[i].numel() for i in together]), strict=True):
                    sums[i] += part.view(sums[i].shape)
        return sums


def top(part: float) -> Callable[[Tensor], Tensor]:
    """The ``part`` of the elements that is largest."""

    def choose(flat: Tensor) -> Tensor:
        last = flat.abs().sort(descending=True).values[int(np.ceil(part * len(flat))) - 1]
        return flat.abs() >= last

    return choose


def same(results: list[Tensor], expected: Tensor) -> None:
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-6)


def alone() -> tuple[nn.Module, DistOpt]:
    model = network()
    return model, DistOpt(torch.optim.SGD(model.parameters(), lr=0.1), "local")
