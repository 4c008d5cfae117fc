"""Residual networks, and tables and pictures of results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cifar import resnet, results
from cifar.lines import Monitor
from cifar.lines import test_io as read_alone
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


def test_more_classes_and_other_shapes():
    assert resnet.build("resnet", 8, 100)(torch.zeros(2, 3, 28, 20)).shape == (2, 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_computes_in_another_dtype_and_keeps_its_own(dtype):
    torch.manual_seed(0)
    model = resnet.build("resnet", 8, dtype=dtype).eval()
    inside = []
    model[0].register_forward_hook(lambda module, x, y: inside.append(y.dtype))
    scores = model(batch(2)[0])
    scores.sum().backward()
    assert (inside, scores.dtype) == ([dtype], torch.float32)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    model.dtype = torch.float32
    assert torch.allclose(model(batch(2)[0]), scores, rtol=0.1, atol=0.1)


def test_stages_halve_the_picture():
    shapes = []
    model = resnet.build("resnet", 8)
    for module in model:
        if isinstance(module, resnet.Residual):
            module.register_forward_hook(lambda module, x, y: shapes.append(tuple(y.shape[1:])))
    model(batch(2)[0])
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_he_initialization():
    torch.manual_seed(0)
    for module in resnet.build("resnet", 20).modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.std().item() == pytest.approx((2 / (9 * module.out_channels)) ** 0.5, rel=0.15)


def test_the_same_seed_gives_the_same_network():
    def weights():
        torch.manual_seed(3)
        return nn.utils.parameters_to_vector(resnet.build("resnet", 8).parameters())

    assert weights().equal(weights())


@pytest.mark.parametrize("layers", [2, 9, 18])
def test_other_depths_are_refused(layers):
    with pytest.raises(ValueError, match=rf"6n \+ 2 layers.* not {layers}"):
        resnet.build("resnet", layers)


def test_other_networks_are_refused():
    with pytest.raises(ValueError, match="no network 'vgg'; choose from resnet, resnet18"):
        resnet.build("vgg", 8)


# ---- tables and pictures of results


def test_a_table_lines_up():
    rows = [{"codec": "a", "n": "10"}, {"codec": "long", "n": "5"}]
    assert results.table(rows) == "codec   n\na      10\nlong    5"


def test_rows_become_lines_for_a_spreadsheet(tmp_path):
    results.write_csv(tmp_path / "t.csv", [{"codec": "a", "n": 10}, {"codec": "b, c", "n": 5}])
    assert (tmp_path / "t.csv").read_text().splitlines() == ["codec,n", "a,10", '"b, c",5']


def test_a_missing_matplotlib_is_said(monkeypatch):
    results.require_plots()
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.raises(results.PlotError, match="pip install matplotlib"):
        results.require_plots()


def test_a_figure_has_its_panels_and_needs_no_display(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    figure, axes = results.figure(2)
    assert len(axes) == 2
    figure.savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


# ---- Lines of other programs


def test_reading_alone_prints_how_fast_it_is(dataset, capsys):
    read_alone([None] * 5, 10, 2)
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Batch [1]",
        "Batch [3]",
        "read 5 batches of 10 pictures in 0.0 s",
    ]


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
