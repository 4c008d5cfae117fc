"""Pictures as a torch data set."""

from __future__ import annotations

import pytest
import torch
from ddp import options
from ddp.data import Pictures
from ddp.evaluation import evaluate
from ddp.models import ResNet9

from workers import Reducer


def test_pictures_are_from_0_to_1(dataset) -> None:
    pictures = Pictures(dataset.train)
    picture, label = pictures[51]
    assert len(pictures) == 103
    assert torch.equal(picture, torch.full((3, 32, 32), 0.2))
    assert label == 1


# ---- An evaluation by all workers together


def test_the_share_of_each_worker_counts_once(dataset) -> None:
    model = ResNet9()
    with Reducer("local") as reducer:
        everything = evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=0, size=1)
        parts = [evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=r, size=2) for r in (0, 1)]
    assert model.training
    assert everything[1] == pytest.approx((16 * parts[0][1] + 15 * parts[1][1]) / 31, rel=1e-5)


# ---- Needle's ResNet9


def test_the_network_is_needles() -> None:
    model = ResNet9()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [tuple(its.shape) for its in model.parameters() if its.dim() == 4]
    assert convolutions == [
        (16, 3, 7, 7),
        (32, 16, 3, 3),
        (32, 32, 3, 3),
        (32, 32, 3, 3),
        (64, 32, 3, 3),
        (128, 64, 3, 3),
        (128, 128, 3, 3),
        (128, 128, 3, 3),
    ]


# ---- The command line of train_ddp.py


def test_the_options_are_the_seeds_by_default() -> None:
    args = options.parse([])
    assert (args.n_epochs, args.batch_size, args.lr, args.weight_decay) == (1, 128, 0.001, 0.001)
    with pytest.raises(SystemExit):
        options.parse(["--n-epochs", "0"])
