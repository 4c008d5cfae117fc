"""Which values go together, and what compression takes away where nothing is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from singa import OPTIONS, loss_of, network, weights
from threaded import ThreadedJob
from torch import Tensor

from kvstore.client import DistStore
from kvstore.member.session import Session
from workers import DistOpt, group
from workers.dist_opt.channels import fuse


def test_small_ones_gather_until_they_are_more_than_the_threshold_and_large_ones_go_alone() -> None:
    assert fuse([5, 5, 100, 5, 5, 5], 9) == [[0, 1], [2], [3, 4], [5]]
    assert fuse([5, 5, 100, 5], 100) == [[0, 1, 2], [3]]
    assert fuse([5, 5], 5) == [[0, 1]], "as large as the threshold is not larger"
    assert fuse([5, 5], 0) == [[0], [1]]
    assert fuse([5, 5], 1000) == [[0, 1]]


def test_in_one_process_gradients_become_what_they_would_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a job of one worker, which does send them."""
    ways: list[Callable[[DistOpt, Tensor], None]] = [
        lambda sgd, loss: sgd.backward_and_update_half(loss),
        lambda sgd, loss: sgd.backward_and_sparse_update(loss, spars=0.1, topK=True),
        lambda sgd, loss: sgd.backward_and_sparse_update(loss, corr=False),
        lambda sgd, loss: sgd.backward_and_partial_update(loss, threshold=20),
    ]

    def train() -> Tensor:
        model = network()
        sgd = DistOpt(torch.optim.SGD(model.parameters(), **OPTIONS))
        for step in range(3 * len(ways)):
            ways[step % len(ways)](sgd, loss_of(model, 0, step))
        assert (sgd.world_size, sgd.rank_in_global, sgd.rank_in_local) == (1, 0, 0)
        return weights(model)

    try:
        alone = train()
        assert group.store().type == "device"
    finally:
        group.shutdown()
    with ThreadedJob(workers=1, servers=1) as cluster:
        monkeypatch.setattr(group, "is_initialized", lambda: True)

        def in_job(session: Session) -> Tensor:
            monkeypatch.setattr(group, "new_store", lambda *_: DistStore(session))
            return train()

        (sent,) = cluster.run_sessions(in_job)
    assert torch.equal(alone, sent)
    assert not torch.allclose(alone, weights(network()), atol=1e-2)
