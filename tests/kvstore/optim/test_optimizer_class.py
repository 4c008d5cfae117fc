"""What is known of an optimizer's class, and how it is built."""

from __future__ import annotations

import pytest
import torch

from kvstore.errors import UsageError
from kvstore.optim.layerwise import LARS
from kvstore.optim.optimizer_class import OptimizerClass, SGDClass, TorchClass
from kvstore.optim.tensorwise import MxnetSGD, Signum, eager

WEIGHT = [torch.zeros(2, 2)]


def test_hyperparameters_are_those_of_the_constructor_that_say_what_to_compute() -> None:
    assert OptimizerClass(Signum).hyperparameters == {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "wd_lh": 0.0}
    assert {"fused", "foreach", "params", "capturable"}.isdisjoint(TorchClass(torch.optim.Adam).hyperparameters)


def test_aliases_are_of_hyperparameters_that_there_are() -> None:
    assert OptimizerClass(Signum).aliases == {"learning_rate": "lr", "wd": "weight_decay"}
    assert OptimizerClass(LARS, own_aliases={"lars_eta": "eta", "x": "y"}).aliases["lars_eta"] == "eta"
    assert "x" not in OptimizerClass(LARS, own_aliases={"x": "y"}).aliases


def test_torchs_are_fused_where_torch_can() -> None:
    assert TorchClass(torch.optim.Adam).build(WEIGHT, {"lr": 0.5}).defaults["fused"]
    assert "fused" not in TorchClass(torch.optim.RMSprop).build(WEIGHT, {}).defaults


def test_torchs_own_class_is_used_for_torchs_momentum() -> None:
    sgd = SGDClass(torch.optim.SGD)
    for style in ({}, {"momentum_style": "torch"}):
        assert type(sgd.build(WEIGHT, {"momentum": 0.9, **style})) is eager(torch.optim.SGD)
    built = sgd.build(WEIGHT, {"momentum": 0.9, "nesterov": True, "momentum_style": "mxnet"})
    assert type(built) is MxnetSGD
    assert built.defaults["fused"]


def test_words_are_checked() -> None:
    SGDClass(torch.optim.SGD).require({"momentum_style": "mxnet", "momentum": 0.9})
    with pytest.raises(UsageError, match="momentum_style=1 is not valid; choose from mxnet, torch"):
        SGDClass(torch.optim.SGD).require({"momentum_style": 1})
