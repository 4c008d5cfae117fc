"""The checkpoints' part of the interface, for a store without a job."""

from __future__ import annotations

import pytest
import torch

import kvstore as kv


def test_a_store_without_a_job_saves_no_checkpoints() -> None:
    store = kv.create()
    assert store.save_checkpoint(if_due=True) is None
    assert not store.attach("name", torch.nn.Linear(1, 1))
    with pytest.raises(kv.UsageError, match=r"attach\('name', ...\) takes .* load_state_dict, not object"):
        store.attach("name", object())
    with pytest.raises(kv.Unsupported, match="a 'local' store has no save_checkpoint"):
        store.save_checkpoint()
