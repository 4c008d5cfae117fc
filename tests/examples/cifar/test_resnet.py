"""Residual networks, and tables and pictures of results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cifar import resnet, results
from cifar.lines import Monitor
from torch import nn

# ---- residual networks: sizes, shapes, first weights


def batch(count=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % 10


@pytest.mark.parametrize(
    ("network", "layers", "count"),
    [
        ("resnet", 8, 75_290),
        ("resnet", 20, 269_722),
        ("resnet", 32, 464_154),
        ("resnet", 44, 658_586),
        ("resnet", 56, 853_018),
        ("resnet", 110, 1_727_962),
        ("resnet18", 8, 11_173_962),
        ("resnet18-d2l", 8, 11_176_970),
    ],
)
def test_the_networks_have_as_many_parameters_as_published(network, layers, count):
    model = resnet.build(network, layers)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    assert len(convolutions) + 1 == (18 if network.startswith("resnet18") else layers)


@pytest.mark.parametrize("network", resnet.NETWORKS)
def test_ten_scores_for_a_picture_and_a_gradient_for_every_parameter(network):
    model = resnet.build(network, 8)
    scores = model(batch(2)[0])
    assert scores.shape == (2, 10)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("layers", [2, 9, 18])
def test_other_depths_are_refused(layers):
    with pytest.raises(ValueError, match=rf"6n \+ 2 layers.* not {layers}"):
        resnet.build("resnet", layers)


# ---- tables and pictures of results


def test_a_missing_matplotlib_is_said(monkeypatch):
    results.require_plots()
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.raises(results.PlotError, match="pip install matplotlib"):
        results.require_plots()


# ---- Lines of other programs


def test_the_monitor_prints_the_size_of_every_parameter_on_rank_0(capsys):
    monitor = Monitor(2)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    torch.nn.init.constant_(model.bias, -0.5)
    for _ in range(3):
        monitor(SimpleNamespace(locals={"model": model}, rank=0))
        Monitor(1)(SimpleNamespace(locals={"model": model}, rank=1))
    sizes = [("weight", "3"), ("bias", "0.5")]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["Batch:", n, *size] for n in ("0", "2") for size in sizes
    ]
