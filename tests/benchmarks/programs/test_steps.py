"""Training steps of one process."""

from __future__ import annotations

import torch

from benchmarks.models import build, pictures
from benchmarks.programs.steps import alone


def test_alone_a_step_trains_and_the_rank_is_0():
    torch.manual_seed(0)
    model = build("resnet8")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step, rank = alone(model)
    step(pictures(0))
    assert rank == 0
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
