"""Several copies of a model, each with a part of every batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import pytest
import torch
from fitted import SGD, loader, network, samples, state
from torch import nn
from torch.utils.data import TensorDataset

from kvstore.store.local import LocalStore
from workers import fit


def test_several_inputs_by_place_and_by_name_and_another_loss() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a + b)[:, 0]

    pictures = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    wanted = pictures.sum(1)
    results = []
    for inputs in ((pictures, pictures), [pictures, pictures.numpy()], {"b": pictures, "a": pictures}):
        torch.manual_seed(0)
        history = fit(
            Sum(),
            [(inputs, wanted)],
            eval_metric="loss",
            loss=nn.functional.mse_loss,
            num_epoch=60,
            optimizer_params=SGD,
        )
        results.append([epoch["train-loss"] for epoch in history])
    assert results[0] == results[1] == results[2]
    assert results[0][-1] < 0.1 * results[0][0]


def test_the_mean_loss_counts_every_sample_the_same() -> None:
    model = nn.Linear(1, 1, bias=False)
    data = [(torch.tensor([[3.0], [3.0], [3.0]]), torch.zeros(3)), (torch.tensor([[1.0]]), torch.zeros(1))]
    history = fit(
        model,
        data,
        eval_metric="loss",
        loss=lambda output, label: (output * 0 + 1).mean() * (3.0 if len(label) == 3 else 7.0),
        num_epoch=1,
    )
    assert history == [{"train-loss": 4.0}]


@pytest.mark.parametrize("count", [16, 14])
def test_two_devices_do_as_one_with_the_same_batches(count: int) -> None:
    one, two = network(batch_norm=False), network(batch_norm=False)
    fit(one, loader(count, 6), num_epoch=2, optimizer_params=SGD)
    history = fit(
        two, loader(count, 6), loader(5, 5), devices=["cpu", "cpu"], kvstore="device", num_epoch=2, optimizer_params=SGD
    )
    for name, tensor in state(one).items():
        torch.testing.assert_close(state(two)[name], tensor, rtol=1e-5, atol=1e-6)
    assert set(history[0]) == {"train-accuracy", "validation-accuracy"}


@pytest.mark.parametrize("order", ["=", ">"])
def test_data_that_needs_no_loader(order: str) -> None:
    inputs, labels = (
        array.astype(array.dtype.newbyteorder(order))
        for array in (tensor.numpy() for tensor in TensorDataset(*samples(8).tensors).tensors)
    )
    history = fit(network(), [(inputs, labels)], num_epoch=1)
    assert set(history[0]) == {"train-accuracy"}


def test_fit_shows_its_passes_in_the_trace() -> None:
    class Noting(LocalStore):
        """A store that notes what is to be shown."""

        shown: ClassVar[list[str]] = []

        def traced(self, name: str) -> AbstractContextManager[None]:
            self.shown.append(name)
            return nullcontext()

    batch = (torch.randn(4, 2), torch.randn(4, 1))
    fit(nn.Linear(2, 1), [batch] * 2, num_epoch=1, eval_metric="loss", loss=nn.MSELoss(), kvstore=Noting("local"))
    assert Noting.shown == ["forward", "backward"] * 2
