"""Parameters whose data is the store's memory, as files of weights have them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from threaded import ThreadedJob
from torch import nn

from workers import Trainer


def test_a_model_with_shared_weights_is_saved_as_any_other(pair: ThreadedJob, tmp_path: Path) -> None:
    def work(store: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(2, 2, dtype=torch.bfloat16))
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store, share_weights=True)
        for _ in range(2):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            trainer.step()
            trainer.zero_grad()
        before = [parameter.data_ptr() for parameter in model.parameters()]
        whole = model[0].weight.untyped_storage().nbytes()
        assert whole > model[0].weight.nbytes  # else this test shows nothing
        path = tmp_path / f"model-{store.rank}"
        save_model(model, str(path))
        again = copy.deepcopy(model)
        nn.init.zeros_(again[0].weight)
        load_model(again, str(path))
        for own, loaded in zip(model.parameters(), again.parameters(), strict=True):
            assert own.untyped_storage().nbytes() == own.nbytes
            assert torch.equal(own, loaded)
        assert [parameter.data_ptr() for parameter in model.parameters()] == before  # nothing was copied

    pair.run(work)


@pytest.mark.parametrize("given", ["groups", "wait"])
def test_a_trainer_finds_the_model_of_its_parameters(pair: ThreadedJob, given: str) -> None:
    def work(store: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        params: Any = [{"params": model.parameters()}] if given == "groups" else dict(model.named_parameters())
        wait = model if given == "wait" else None
        trainer = Trainer(params, "sgd", {"lr": 0.1}, kvstore=store, share_weights=True, wait_in_forward=wait)
        model(torch.ones(1, 3)).sum().backward()
        trainer.step()
        state = model.state_dict()
        assert {value.untyped_storage().nbytes() == value.nbytes for value in state.values()} == {True}

    pair.run(work)
