"""Which optimizers there are, and what is particular to each."""

from __future__ import annotations

import pytest
import torch

from kvstore.errors import UnknownName
from kvstore.optim.optimizer import builtin, find, names
from kvstore.optim.tensorwise import MxnetSGD, eager


def test_mxnets_optimizers_are_there() -> None:
    mxnets = {"sgd", "nag", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "signum", "lamb"}
    mxnets |= {"lars", "lans", "ftrl", "ftml", "adabelief", "groupadagrad", "dcasgd", "sgld"}
    assert mxnets <= set(names())
    assert {"lbfgs", "sparseadam", "optimizer"}.isdisjoint(names())
    assert find("sparseadam") is find("adam")


def test_what_is_not_there_has_a_reason_or_a_list() -> None:
    with pytest.raises(UnknownName, match="no optimizer 'lbfgs': it evaluates the loss several times"):
        find("lbfgs")
    with pytest.raises(UnknownName, match=r"no optimizer 'sdg'; choose from .*lamb.*sgd"):
        find("sdg")


def test_those_that_need_whole_arrays_or_matrices() -> None:
    whole = {name for name, known in builtin().items() if not known.elementwise}
    assert whole == {
        "adafactor",
        "groupadagrad",
        "lamb",
        "lans",
        "lars",
        "muon",
        "rowwiseadagrad",
        "rowwiseadam",
    } & set(names())
    assert {name for name, known in builtin().items() if known.dims == 2} <= {
        "groupadagrad",
        "muon",
        "rowwiseadagrad",
        "rowwiseadam",
    }


def test_aliases_are_of_hyper_parameters_that_there_are() -> None:
    for name, known in builtin().items():
        assert set(known.aliases.values()) <= set(known.hyperparameters), name
    assert find("lars").aliases["lars_eta"] == "eta"
    assert "epsilon" not in find("signum").aliases


@pytest.mark.parametrize("name", names())
def test_every_one_can_be_built(name: str) -> None:
    built = find(name).build([torch.zeros(2, 2)], {})
    assert set(find(name).hyperparameters) - {"momentum_style"} <= set(built.param_groups[0])


def test_torchs_own_class_is_used_for_torchs_momentum() -> None:
    assert type(find("sgd").build([torch.zeros(1)], {"momentum": 0.9, "momentum_style": "torch"})) is eager(
        torch.optim.SGD
    )
    built = find("nag").build([torch.zeros(1)], {"momentum": 0.9, "nesterov": True, "momentum_style": "mxnet"})
    assert type(built) is MxnetSGD
    assert built.defaults["fused"]
