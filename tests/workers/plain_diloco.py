"""DiLoCo written plainly, in one process: what workers and servers together must make of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import backward
from torch import nn

Optimizer = Callable[[Any], torch.optim.Optimizer]


def nesterov(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def inner_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


def diloco(
    model: nn.Module,
    workers: int,
    steps: int,
    inner_steps: int,
    *,
    inner: Optimizer = inner_adam,
    outer: Optimizer = nesterov,
    fragments: Sequence[tuple[Sequence[str], int]] = (),
    overlap: int = 0,
    mixing: float = 0.0,
) -> list[nn.Module]:
    """Return the workers' models after ``steps``, with nothing synchronized at the end.

    Args:
        model: the first weights.
        fragments: for each, the names of its parameters and the step after which it is first sent; all after
            ``inner_steps`` if there are none.
    """
    fragments = fragments or [([name for name, _ in model.named_parameters()], inner_steps)]
    replicas = [copy.deepcopy(model) for _ in range(workers)]
    inners = [inner(replica.parameters()) for replica in replicas]
    params = [dict(replica.named_parameters()) for replica in replicas]
    whole = {name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()}
    outers = [outer([whole[name] for name in names]) for names, _ in fragments]
    arrivals: dict[int, list[int]] = {}
    for step in range(1, steps + 1):
        for rank, replica in enumerate(replicas):
            backward(replica, step, rank, workers)
            inners[rank].step()
        for number, (names, first) in enumerate(fragments):
            if step >= first and (step - first) % inner_steps == 0:
                for name in names:
                    differences = [whole[name].detach() - own[name].detach() for own in params]
                    whole[name].grad = torch.stack(differences).mean(0)
                outers[number].step()
                arrivals.setdefault(step + overlap, []).append(number)
        for number in arrivals.pop(step, []):
            for name in fragments[number][0]:
                for own in params:
                    own[name].data = mixing * own[name].data + (1 - mixing) * whole[name].data
    return replicas
