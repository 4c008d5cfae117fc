"""Learning rates and other hyper-parameters: how they change, and files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from trained import HOWS, stepped_and_saved, weights

import kvstore as kv
from kvstore.dist import DistStore
from kvstore.optim import states_file
from workers import Trainer


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_rescale_grad_and_batch_size_both_count(how: dict[str, Any]) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0, "rescale_grad": 0.5}, **how)
    for batch_size, expected in ((1, -0.5), (2, -0.75), (None, -1.25)):
        param.grad = torch.ones(2)
        trainer.step(batch_size)
        assert param.tolist() == [expected, expected]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_multipliers_by_name(how: dict[str, Any]) -> None:
    params = {"fast": nn.Parameter(torch.zeros(1)), "slow": nn.Parameter(torch.zeros(1))}
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "lr_mult": {"slow": 0.25}}, **how)
    for param in params.values():
        param.grad = torch.ones(1)
    trainer.step()
    assert [param.item() for param in params.values()] == [-1, -0.25]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_learning_rate_changes_and_momentum_stays(how: dict[str, Any]) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, **how)
    assert trainer.learning_rate == 1.0
    for lr, expected in ((1.0, -1.0), (0.1, -1.15)):
        trainer.set_learning_rate(lr)
        assert trainer.learning_rate == lr
        param.grad = torch.ones(2)
        trainer.step()
        assert param.tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_the_learning_rate_changes_on_the_servers(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    """MXNet's set_learning_rate does nothing on a dist store."""

    def work(store: DistStore) -> list[float]:
        (param,) = weights(0.0)
        trainer = Trainer([param], "sgd", {"learning_rate": 1.0}, store, update_on_kvstore)
        for lr in (1.0, 0.25):
            trainer.set_learning_rate(lr)
            param.grad = torch.ones(2)
            trainer.step()
        return param.tolist()

    assert cluster.run(work) == [[-1.25, -1.25]] * 2


DAMAGED = [
    "no JSON",
    "[" * 100_000,
    '{"groups": [{}]}',
    '{"num_update": 1e999, "groups": [{}]}',
    '{"num_update": -1, "groups": [{}]}',
    '{"num_update": 1, "groups": [5]}',
    '{"num_update": 1, "groups": [{"lr": 0.5, "betas": ["x", 1]}]}',
]


@pytest.mark.parametrize("note", DAMAGED)
@pytest.mark.parametrize("how", HOWS[:2], ids=str)
def test_damaged_hyperparameters_change_nothing(how: dict[str, Any], note: str, tmp_path: Path) -> None:
    trainer, name, found = stepped_and_saved(how, tmp_path / "s")
    states_file.write(tmp_path / "odd", name, {where: value + 1 for where, value in found.items()}, note=note)
    with pytest.raises(kv.UsageError, match=r"are damaged|betas='x'"):
        trainer.load_states(tmp_path / "odd")
    trainer.save_states(tmp_path / "after")
    assert all(torch.equal(value, found[where]) for where, value in states_file.read(tmp_path / "after")[1].items())
    assert trainer.learning_rate == 0.1
