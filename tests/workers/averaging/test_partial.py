"""Partial synchronization: chunks in turn, bounded distance, and with one chunk synchronous training."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from models import backward, constant, network, same, together
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import PartialSync

SYNCHRONOUS = [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}]


MARKS = 64  # bytes of what a worker shows the others before an average


@pytest.mark.parametrize("options", SYNCHRONOUS, ids=["plain", "momentum"])
def test_with_one_chunk_it_is_synchronous_training(cluster: ThreadedJob, options: dict[str, Any]) -> None:
    models = [network(rank) for rank in range(cluster.workers)]

    def work(store: DistStore) -> None:
        model = models[store.rank]
        sync = PartialSync(model, torch.optim.SGD(model.parameters(), **options), store)
        assert sync.num_chunks == 1
        for step in range(5):
            backward(model, step, store.rank, store.num_workers)
            sync.step()
        assert (sync.steps, sync.rounds) == (5, 5)

    cluster.run(work)
    for model in models[1:]:
        same(models[0], model, atol=0)
    same(models[0], together(cluster.workers, 5, options))


def test_chunks_take_turns(pair: ThreadedJob) -> None:
    """By hand: elements 0-3, 4-7 and 8-9 are averaged after steps 1, 2 and 3."""

    def work(store: DistStore) -> list[list[float]]:
        param, optimizer = constant(2 * store.rank)
        sync = PartialSync({"w": param}, optimizer, store, chunk_bytes=16)
        assert sync.num_chunks == 3
        seen = []
        for _ in range(4):
            sync.step()
            seen.append(param.tolist())
        return seen

    zero, one = pair.run(work)
    assert zero == [
        [-1] * 4 + [0] * 4 + [0] * 2,
        [-1] * 4 + [-2] * 4 + [0] * 2,
        [-1] * 4 + [-2] * 4 + [-3] * 2,
        [-4] * 4 + [-2] * 4 + [-3] * 2,
    ]
    assert one == [
        [-1] * 4 + [-2] * 4 + [-2] * 2,
        [-3] * 4 + [-2] * 4 + [-4] * 2,
        [-5] * 4 + [-4] * 4 + [-3] * 2,
        [-4] * 4 + [-6] * 4 + [-5] * 2,
    ]


def test_replicas_never_drift_further_than_a_turn(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> list[torch.Tensor]:
        param, optimizer = constant(store.rank, 24)
        sync = PartialSync({"w": param}, optimizer, store, chunk_bytes=16)
        weights = []
        for _ in range(30):
            sync.step()
            weights.append(param.detach().clone())
        return weights

    apart = cluster.workers - 1  # how far one step takes the first and the last worker
    for step, weights in enumerate(zip(*cluster.run(work), strict=True)):
        spread = torch.stack(weights).amax(0) - torch.stack(weights).amin(0)
        assert spread.max() == apart * min(step + 1, 5), "six chunks: five local steps at most"


def test_a_step_sends_one_chunk(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[int]:
        model = network()
        sync = PartialSync(model, torch.optim.SGD(model.parameters()), store, chunk_bytes=100)
        sent = [store.statistics().bytes_pushed]
        for step in range(2 * sync.num_chunks):
            backward(model, step, store.rank, 2)
            sync.step()
            sent.append(store.statistics().bytes_pushed)
        assert store.statistics().bytes_pushed == store.statistics().bytes_pulled - 4 * 83
        return [later - before - 2 * MARKS for before, later in pairwise(sent)]

    assert pair.run(work) == [[100, 100, 100, 32] * 2] * 2


def test_finish_averages_all_and_training_goes_on(cluster: ThreadedJob) -> None:
    mean = (cluster.workers - 1) / 2

    def work(store: DistStore) -> None:
        param, optimizer = constant(store.rank)
        sync = PartialSync({"w": param}, optimizer, store, chunk_bytes=8)
        sync.finish()
        assert sync.rounds == 0, "nothing has changed"
        for total in (7, 14):
            for _ in range(7):
                sync.step()
            sync.finish()
            torch.testing.assert_close(param.detach(), torch.full((10,), -total * mean), rtol=1e-6, atol=0)
        assert (sync.steps, sync.rounds) == (14, 16)

    cluster.run(work)


def test_a_worker_that_has_finished_takes_part_until_all_have(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> tuple[list[float], int, int]:
        param, optimizer = constant(store.rank, 4)
        sync = PartialSync({"w": param}, optimizer, store, chunk_bytes=8)
        for _ in range(3 + 2 * store.rank):
            sync.step()
        sync.finish()
        sync.step()
        sync.finish()
        return param.tolist(), sync.steps, sync.rounds

    results = cluster.run(work)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 4 + 2 * (cluster.workers - 1)


def test_parameters_of_all_dtypes(cluster: ThreadedJob) -> None:
    dtypes = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
    mean = (cluster.workers - 1) / 2

    def work(store: DistStore) -> None:
        params = {
            name: nn.Parameter(torch.full((2, 3, 4, 5), 4.0 + store.rank, dtype=dtype).transpose(1, 3))
            for name, dtype in dtypes.items()
        }
        params["cl"] = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
        params["scalar"] = nn.Parameter(torch.tensor(1.0))
        params["empty"] = nn.Parameter(torch.zeros(0, 3))
        sync = PartialSync(params, torch.optim.SGD(params.values(), lr=1.0), store, chunk_bytes=1000)
        assert [params[name].unique().tolist() for name in dtypes] == [[4]] * 4, "rank 0's"
        for name, param in params.items():
            param.grad = torch.full_like(param, 0.0 if name == "unused" else float(store.rank))
        for _ in range(sync.num_chunks):
            sync.step()
        sync.finish()
        for name, param in params.items():
            expected = torch.full_like(param, (1 if name in ("cl", "scalar") else 4) - sync.num_chunks * mean)
            torch.testing.assert_close(param, expected, rtol=0.01, atol=0.01, msg=name)
            assert param.stride() == expected.stride()

    cluster.run(work)


def test_sums_of_float16_do_not_overflow(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        param = nn.Parameter(torch.full((2,), 60000.0, dtype=torch.float16))
        PartialSync({"w": param}, torch.optim.SGD([param]), store).step()
        return param.tolist()

    assert pair.run(work) == [[60000, 60000]] * 2


def test_a_parameter_without_a_gradient_keeps_its_turn(pair: ThreadedJob) -> None:
    """On one worker the loss depends on it, on the other it does not."""

    def work(store: DistStore) -> list[list[float]]:
        used, optional = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        sync = PartialSync({"a": used, "b": optional}, torch.optim.SGD([used, optional], lr=1.0), store, 8)
        for _ in range(2):
            used.grad, optional.grad = torch.ones(2), torch.ones(2) if store.rank else None
            sync.step()
        sync.finish()
        return [used.tolist(), optional.tolist()]

    assert pair.run(work) == [[[-2, -2], [-1, -1]]] * 2


def test_buffers_have_their_turn(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[Any]:
        norm = nn.BatchNorm1d(2)
        for buffer in (norm.running_mean, norm.running_var):
            assert buffer is not None
            buffer.fill_(1.0 + store.rank)
        sync = PartialSync(norm, torch.optim.SGD(norm.parameters()), store, 8)
        assert [buffer.tolist() for buffer in norm.buffers()] == [[1, 1], [1, 1], 0], "rank 0's"
        norm.running_mean = torch.full((2,), 4.0 * store.rank)
        for buffer in norm.buffers():
            buffer.add_(store.rank)
        for _ in range(2):
            sync.step()
        return [buffer.tolist() for buffer in norm.buffers()]

    assert pair.run(work) == [[[2.5, 2.5], [1.5, 1.5], rank] for rank in range(2)]


def test_rank_zeros_weights_count(cluster: ThreadedJob) -> None:
    models = [network(rank) for rank in range(cluster.workers)]
    first = network(0)

    def work(store: DistStore) -> None:
        PartialSync(models[store.rank], torch.optim.Adam(models[store.rank].parameters()), store, 50)

    cluster.run(work)
    for model in models:
        same(model, first, atol=0)


@pytest.mark.parametrize("chunk_bytes", [0, 7, -1, 8.0, True, "1 MB", None, 2**63])
def test_a_chunk_has_room_for_an_element(chunk_bytes: Any) -> None:
    param, optimizer = constant(1)
    with pytest.raises(kv.UsageError, match=r"chunk_bytes=.* must be an integer, at (least 8|most)"):
        PartialSync({"w": param}, optimizer, "local", chunk_bytes=chunk_bytes)
