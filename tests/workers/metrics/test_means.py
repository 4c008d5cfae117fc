"""Means of losses, and of what a function returns."""

from __future__ import annotations

import torch

from workers import metrics

PROBABILITIES = torch.tensor([[0.3, 0.7], [0.0, 1.0], [0.4, 0.6]])
LABELS = torch.tensor([0, 1, 1])


def test_loss_is_the_mean_over_samples() -> None:
    metric = metrics.create("loss")
    metric.update_dict({"label": LABELS}, {"output": PROBABILITIES, "loss": torch.tensor(2.0).expand(3)})
    metric.update_dict({"label": LABELS[:1]}, {"output": PROBABILITIES[:1], "loss": torch.tensor(6.0).expand(1)})
    assert metric.get() == ("loss", 3.0)


def test_a_function_is_a_metric() -> None:
    def error(label: torch.Tensor, pred: torch.Tensor) -> torch.Tensor:
        return (label - pred).abs().mean()

    metric = metrics.create(error)
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    metric.update(torch.tensor([1.0]), torch.tensor([1.0]))
    assert metric.get() == ("custom(error)", 0.5)
    counted = metrics.create(lambda label, pred: (float((label - pred).abs().sum()), len(label)), name="mae")
    counted.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    counted.update(torch.tensor([1.0]), torch.tensor([2.0]))
    assert counted.get() == ("mae", 1.0)
