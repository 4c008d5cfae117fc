"""DLRM's network."""

from __future__ import annotations

import torch
from clicks.dlrm import DLRM


def test_pairs_are_all_different_ones() -> None:
    network = DLRM(dense=3, fields=2, dim=4, hidden=8)
    assert sorted(network.pairs.tolist()) == [3, 6, 7]  # (1, 0), (2, 0), (2, 1) of 3 x 3


def test_logits_depend_on_all_that_comes_in() -> None:
    torch.manual_seed(0)
    network = DLRM(dense=3, fields=2, dim=4, hidden=8)
    inputs = [torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)]
    for each in inputs:
        each.requires_grad_()
    logits = network(inputs[0], inputs[1:])
    assert logits.shape == (5,)
    logits.sum().backward()
    assert all(each.grad.any() for each in inputs)
