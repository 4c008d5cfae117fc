"""Lines of other programs."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from cifar.lines import Monitor
from cifar.lines import test_io as read_alone


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
