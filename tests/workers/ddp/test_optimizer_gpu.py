"""DistributedOptimizer with parameters on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_and_states_on_a_device(cuda: torch.device, dtype: torch.dtype) -> None:
    models = [nn.Linear(300, 40).to(cuda, dtype) for _ in range(2)]
    inner = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]

    def work(store: DistStore) -> None:
        model = models[store.rank]
        optimizer = DistributedOptimizer(inner[store.rank], kvstore=store)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((4, 300), 0.01 * (step + store.rank), device=cuda, dtype=dtype)
            model(x).float().square().mean().backward()
            optimizer.step()

    def same_start(store: DistStore) -> None:
        broadcast_parameters(models[store.rank], kvstore=store)
        broadcast_optimizer_state(inner[store.rank], 1, kvstore=store)

    with ThreadedJob(workers=2, servers=2) as cluster:
        cluster.run(same_start)
        cluster.run(work)
        inner[0].state.clear()
        cluster.run(same_start)
        cluster.run(work)
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert one.is_cuda
        assert torch.equal(one, two)
