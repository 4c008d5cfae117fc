"""torch's optimizers without their compiler: the same steps, and nothing of the compiler is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvstore.optim.optimizer import builtin
from kvstore.optim.tensorwise import eager

TORCHS = sorted(name for name, each in builtin().items() if each.cls.__module__.startswith("torch.optim"))
ALL = """
import sys, torch
from kvstore.optim.optimizer import builtin

weight = torch.zeros(4, 4)
for each in builtin().values():
    for options in ({}, {"momentum": 0.9, **{name: words[-1] for name, words in each.words.items()}}):
        if options.keys() <= each.hyperparameters.keys():
            weight.grad = torch.ones(4, 4)
            each.build([weight], options).step()
sys.exit("torch._dynamo" in sys.modules)
"""


def test_no_optimizer_imports_the_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", ALL]).returncode == 0


@pytest.mark.parametrize("name", TORCHS)
def test_steps_are_torchs_own_to_the_bit(name: str) -> None:
    cls = builtin()[name].cls
    torch.manual_seed(0)
    first = torch.randn(5, 3)
    weights = [first.clone().requires_grad_() for _ in range(2)]
    one, two = cls([weights[0]], lr=0.1), eager(cls)([weights[1]], lr=0.1)
    assert isinstance(two, cls)
    assert repr(one) == repr(two)
    for _ in range(3):
        gradient = torch.randn(5, 3)
        for weight, optimizer in zip(weights, (one, two), strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    assert weights[0].equal(weights[1])
    assert not weights[1].equal(first)
    states = [optimizer.state[weight] for weight, optimizer in zip(weights, (one, two), strict=True)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.as_tensor(states[0][key]).equal(torch.as_tensor(states[1][key])) for key in states[0])


def test_a_class_is_made_once() -> None:
    assert eager(torch.optim.SGD) is eager(torch.optim.SGD)
