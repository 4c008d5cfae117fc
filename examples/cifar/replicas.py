"""A model on one or several devices of this process, each with its own copy and its own part of every batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Averages(Protocol):
    """What is needed of workers.Reducer: averages over all workers, which all of them call."""

    def average(self, tensors: dict[str, Tensor]) -> None:
        """Each tensor, averaged in place."""


class Replicas:
    """The copies; a workers.Trainer keeps their parameters equal, and `average_statistics` the rest of them."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.models = [deepcopy(model).to(device) for device in devices]

    def named_parameters(self) -> list[list[tuple[str, nn.Parameter]]]:
        """Names and parameters, a list for each device."""
        return [list(model.named_parameters()) for model in self.models]

    def backward(self, pictures: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        """Compute the gradients of the mean loss of each device's part, times `scale`; returns how many are right."""
        parts = zip(
            self.models, self.devices, pictures.chunk(len(self.devices)), labels.chunk(len(self.devices)), strict=True
        )
        right = []
        for model, device, x, y in parts:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            model.train()
            model.zero_grad()
            guess = model(x)
            (functional.cross_entropy(guess, y) * scale).backward()
            right.append(count_right(guess, y))
        return torch.stack([count.to(self.devices[0]) for count in right]).sum()

    @torch.no_grad()
    def validate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """How many pictures there are in `batches`, and how many of them the model gets right."""
        model, device = self.models[0].eval(), self.devices[0]
        right, count = torch.zeros((), device=device), 0
        for pictures, labels in batches:
            right += count_right(model(pictures.to(device)), labels.to(device))
            count += len(labels)
        return {"right": right.item(), "count": float(count)}

    @torch.no_grad()
    def average_statistics(self, workers: Averages) -> None:
        """Average what batch normalisation has seen, over the devices and then over the workers."""
        copies = [statistics(model) for model in self.models]
        mean = {name: torch.stack([copy[name].cpu() for copy in copies]).mean(0) for name in copies[0]}
        workers.average(mean)
        for copy in copies:
            for name, tensor in copy.items():
                tensor.copy_(mean[name])


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running means and variances: the buffers that are no counters."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def count_right(guess: Tensor, labels: Tensor) -> Tensor:
    """For how many pictures the class with the highest score is the right one."""
    return (guess.argmax(1) == labels).sum()
