"""Sums of anything over workers, and who they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from singa import network

import kvstore as kv
from workers import DistOpt


def test_sums_of_anything(run: Any) -> None:
    def work(rank: int) -> list[Any]:
        sgd = DistOpt(torch.optim.SGD(network().parameters(), lr=0.1), "dist_sync")
        tensor, array = torch.full((2, 2), rank + 1.0), np.array([rank + 1.0])
        ones = [torch.full((3,), float(i)) for i in range(2)]
        sgd.all_reduce(tensor.data)
        sgd.all_reduce(array)
        sgd.fused_all_reduce(ones, send=False)
        sgd.fused_all_reduce(ones)
        half, large = torch.tensor([2048.0, 1.0]), torch.tensor([60000.0])
        sgd.all_reduce_half(half)
        half += 1  # float16 has no 4097
        sgd.fused_all_reduce_half([half, large])
        sgd.wait()
        return [tensor.tolist(), array.tolist(), [one.tolist() for one in ones], half.tolist(), large.tolist()]

    expected = [[[3.0] * 2] * 2, [3.0], [[0.0] * 3, [2.0] * 3], [8192.0, 6.0], [float("inf")]]
    assert run(work) == [expected] * 2


def test_who_is_there(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> tuple[int, ...]:
        sgd = DistOpt(torch.optim.SGD(network().parameters(), lr=0.1), "dist_sync")
        return sgd.world_size, sgd.rank_in_global, sgd.global_rank, sgd.rank_in_local, sgd.local_rank

    with pytest.raises(kv.UsageError, match="KVSTORE_LOCAL_RANK is not set"):
        run(work)
    monkeypatch.setenv("KVSTORE_LOCAL_RANK", "4")
    assert run(work) == [(2, 0, 0, 4, 4), (2, 1, 1, 4, 4)]
