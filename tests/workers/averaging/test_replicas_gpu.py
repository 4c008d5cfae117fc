"""Averages of values on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import PartialSync, PeriodicAveraging

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=100) as cluster:
        yield cluster


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "how"),
    [(PartialSync, {"chunk_bytes": 400}), (PeriodicAveraging, {"sync_every": 2, "momentum": "average"})],
)
def test_values_on_a_device(
    cuda: torch.device, cluster: ThreadedJob, kind: Any, how: dict[str, Any], dtype: torch.dtype
) -> None:
    def work(store: DistStore) -> None:
        values = torch.full((4, 3, 5, 5), 1.0 + store.rank, device=cuda, dtype=dtype)
        params = {
            "w": nn.Parameter(values.to(memory_format=torch.channels_last)),
            "on the CPU": nn.Parameter(values.cpu()),
        }
        sync = kind(params, torch.optim.SGD(params.values(), lr=1.0), store, **how)
        for param in params.values():
            param.grad = torch.full_like(param, 2.0 * store.rank)
        for _ in range(4):
            sync.step()
        sync.finish()
        assert [param.unique().tolist() for param in params.values()] == [[-3], [-3]]
        assert [param.device.type for param in params.values()] == ["cuda", "cpu"]

    cluster.run(work)
