"""Overlap on a CUDA device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from layers import SGD, equal, weights
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import Trainer

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.mark.gpu
@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_on_a_cuda_device(cuda: torch.device, update_on_kvstore: bool) -> None:
    def work(store: DistStore, wanted: bool) -> list[torch.Tensor]:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(cuda)
        torch.manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0, 0.05)
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore, overlap=wanted)
        for step in range(5):
            trainer.zero_grad()
            with torch.cuda.stream(torch.cuda.Stream() if step % 2 else torch.cuda.current_stream()):
                model(torch.full((64, 256), 1.0 + step + store.rank, device=cuda)).square().mean().backward()
            torch.cuda.synchronize()
            trainer.step()
        return [value.cpu() for value in weights(model)]

    results: list[list[torch.Tensor]] = []
    with ThreadedJob(2, 2) as cluster:
        for wanted in (False, True):
            results += cluster.run(partial(work, wanted=wanted))
    assert all(equal(results[0], other) for other in results)
