from __future__ import annotations

import pytest
import torch

import kvstore as kv
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowHyperparameters
from workers.trainer.local_updates import LocalRows

OWN = RowHyperparameters()


def gradient(*ids: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([list(ids)], torch.ones(len(ids), 2), (4, 2), check_invariants=True)


def test_rows_with_a_gradient_are_updated() -> None:
    rows, weight = LocalRows(describe("sgd", {"learning_rate": 0.5, "momentum": 0.5})), torch.zeros(4, 2)
    rows.begin("w", weight, {})
    assert "w" in rows
    rows.update("w", weight, gradient(1, 3, 1), OWN)
    rows.update("w", weight, gradient(3), RowHyperparameters(rescale=2.0))
    assert weight[:, 0].tolist() == [0, -1, 0, -0.5 - 0.5 * 2.5]
    assert rows.of()["w", "momentum_buffer"][:, 0].tolist() == [0, 2, 0, 2.5]


def test_an_optimizer_that_is_not_lazy_updates_all_rows() -> None:
    options = {"learning_rate": 0.5, "momentum": 0.5, "lazy_update": False}
    rows, weight = LocalRows(describe("sgd", options)), torch.zeros(4, 2)
    rows.begin("w", weight, {})
    rows.update("w", weight, gradient(1), OWN)
    rows.update("w", weight, gradient(3), OWN)
    assert weight[:, 0].tolist() == [0, -0.75, 0, -0.5]


def test_states_that_are_there_already_go_on() -> None:
    optimizer = describe("adam", {"learning_rate": 0.1})
    first, second = LocalRows(optimizer), LocalRows(optimizer)
    weights = [torch.ones(4, 2), torch.ones(4, 2)]
    first.begin("w", weights[0], {})
    first.update("w", weights[0], gradient(0, 2), OWN)
    weights[1].copy_(weights[0])
    second.begin("w", weights[1], first.of())
    for rows, weight in zip((first, second), weights, strict=True):
        rows.update("w", weight, gradient(2), OWN)
    assert torch.equal(*weights)
    assert int(second.of()["w", "step"]) == 2


def test_optimizers_that_have_no_rule_for_rows() -> None:
    with pytest.raises(kv.KVStoreError, match="rmsprop"):
        LocalRows(describe("rmsprop", {})).begin("w", torch.zeros(4, 2), {})
