"""Averages of weights: all at once every so many steps, or in chunks in turn."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import backward, constant, network, same, together
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import PartialSync, PeriodicAveraging

# ---- periodic averaging: when, of what, momentum, ends that are not even, and that it learns


MARKS = 64  # bytes of what a worker shows the others before an average


# ---- the weights


@pytest.mark.parametrize("make", [partial(PeriodicAveraging, sync_every=1), PartialSync], ids=["all", "one chunk"])
@pytest.mark.parametrize(
    "options", [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}], ids=str
)
def test_all_weights_after_every_step_are_synchronous_training(
    cluster: ThreadedJob, options: dict[str, Any], make: Any
) -> None:
    models = [network(rank) for rank in range(cluster.workers)]

    def work(store: DistStore) -> None:
        model = models[store.rank]
        averaging = make(model, torch.optim.SGD(model.parameters(), **options), store)
        for step in range(5):
            backward(model, step, store.rank, store.num_workers)
            averaging.step()
        assert (averaging.steps, averaging.rounds) == (5, 5)

    cluster.run(work)
    for model in models:
        same(model, models[0], atol=0)
    same(models[0], together(cluster.workers, 5, options))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_it_is_the_mean_of_what_workers_alone_would_make(cluster: ThreadedJob, optimizer: Any) -> None:
    models = [network() for _ in range(cluster.workers)]

    def work(store: DistStore) -> None:
        model = models[store.rank]
        averaging = PeriodicAveraging(model, optimizer(model.parameters(), lr=0.01), store, sync_every=3)
        for step in range(6):
            backward(model, step, store.rank, store.num_workers)
            averaging.step()
        assert (averaging.steps, averaging.rounds) == (6, 2)

    cluster.run(work)
    alone = [network() for _ in models]
    optimizers = [optimizer(model.parameters(), lr=0.01) for model in alone]
    for step in range(6):
        for rank, model in enumerate(alone):
            backward(model, step, rank, len(alone))
            optimizers[rank].step()
        if step in (2, 5):
            with torch.no_grad():
                for params in zip(*(model.parameters() for model in alone), strict=True):
                    mean = torch.stack(params).mean(0)
                    for param in params:
                        param.copy_(mean)
    for mine, theirs in zip(models, alone, strict=True):
        same(mine, theirs)


def test_when_weights_are_averaged(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        param, optimizer = constant(2 * store.rank)
        averaging = PeriodicAveraging({"w": param}, optimizer, store, sync_every=3, warmup_steps=2)
        seen = []
        for _ in range(9):
            averaging.step()
            seen.append(param[0].item())
        averaging.finish()
        averaging.finish()
        assert averaging.rounds == 5, "in warm-up two, two periods, and the end, once"
        return [*seen, param[0].item()]

    zero, one = pair.run(work)
    assert zero == [-1, -2, -2, -2, -5, -5, -5, -8, -8, -9]
    assert one == [-1, -2, -4, -6, -5, -7, -9, -8, -10, -9]


def test_bytes(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[int]:
        model = network()
        averaging = PeriodicAveraging(model, torch.optim.SGD(model.parameters()), store, sync_every=3)
        sent = [store.statistics().bytes_pushed]
        for step in range(6):
            backward(model, step, store.rank, 2)
            averaging.step()
            sent.append(store.statistics().bytes_pushed)
        averaging.finish()
        sent.append(store.statistics().bytes_pushed)
        return [later - before for before, later in pairwise(sent)]

    size = 4 * (6 * 8 + 8 + 8 * 3 + 3) + 2 * MARKS
    assert pair.run(work) == [[0, 0, size, 0, 0, size, 2 * MARKS]] * 2


def test_buffers(pair: ThreadedJob) -> None:
    for buffers in (True, False):

        def work(store: DistStore, buffers: bool = buffers) -> list[float]:
            norm = nn.BatchNorm1d(2)
            averaging = PeriodicAveraging(norm, torch.optim.SGD(norm.parameters()), store, 1, buffers=buffers)
            assert norm.running_mean is not None
            norm.running_mean.fill_(store.rank)
            averaging.step()
            return norm.running_mean.tolist()

        assert pair.run(work) == ([[0.5, 0.5]] * 2 if buffers else [[0, 0], [1, 1]])


# ---- momentum


def test_momentum(pair: ThreadedJob) -> None:
    """By hand: gradients 0 and 2, momentum 0.5, periods of two steps."""

    def trained(momentum: str) -> list[Any]:
        def work(store: DistStore) -> list[float | None]:
            param, optimizer = constant(2 * store.rank, momentum=0.5)
            averaging = PeriodicAveraging({"w": param}, optimizer, store, 2, momentum=momentum)
            seen: list[float | None] = []
            for _ in range(4):
                averaging.step()
                held = optimizer.state[param].get("momentum_buffer")
                seen.append(None if held is None else held[0].item())
            return [*seen, param[0].item()]

        return pair.run(work)

    assert trained("keep") == [[0, 0, 0, 0, -6.125], [2, 3, 3.5, 3.75, -6.125]]
    assert trained("average") == [[0, 1.5, 0.75, 1.875, -6.125], [2, 1.5, 2.75, 1.875, -6.125]]
    assert trained("reset") == [[0, None, 0, None, -5], [2, None, 2, None, -5]]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "Adamax", "Rprop"])
def test_states_of_other_optimizers_are_averaged(pair: ThreadedJob, name: str) -> None:
    models = [network() for _ in range(2)]

    def work(store: DistStore) -> list[Any]:
        model = models[store.rank]
        optimizer = getattr(torch.optim, name)(model.parameters())
        averaging = PeriodicAveraging(model, optimizer, store, 2, momentum="average")
        for step in range(4):
            backward(model, step, store.rank, 2)
            averaging.step()
        states = [optimizer.state[param] for param in model.parameters()]
        assert all(float(state["step"]) == 4 for state in states)
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    one, two = pair.run(work)
    assert len(one) > 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
    same(*models, atol=0)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_states_that_are_reset_begin_anew(name: str) -> None:
    model = network()
    optimizer = getattr(torch.optim, name)(model.parameters())
    averaging = PeriodicAveraging(model, optimizer, "local", 2, warmup_steps=1, momentum="reset")
    held = []
    for step in range(5):
        backward(model, step, 0, 1)
        averaging.step()
        held.append(len(optimizer.state) > 0)
    assert held == [True, True, False, True, False]


def test_states_that_differ_cannot_be_averaged(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = torch.optim.SGD(params, momentum=0.9)
        averaging = PeriodicAveraging(dict(zip("ab", params, strict=True)), optimizer, store, 1, momentum="average")
        params[0].grad = torch.ones(2)
        averaging.step()
        params[store.rank].grad = torch.ones(2)
        with pytest.raises(kv.Mismatch, match=f"worker {1 - store.rank}'s optimizer has other states .*'keep'"):
            averaging.step()

    pair.run(work)


def test_states_may_come_later(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = torch.optim.SGD(params, momentum=0.9)
        averaging = PeriodicAveraging(dict(zip("ab", params, strict=True)), optimizer, store, 1, momentum="average")
        averaging.step()
        for param in params:
            param.grad = torch.full((2,), 2.0 * store.rank)
            averaging.step()
        return [optimizer.state[param]["momentum_buffer"][0].item() for param in params]

    assert pair.run(work) == [[pytest.approx(1.9), 1]] * 2


# ---- the end


def test_workers_with_more_and_less_data(cluster: ThreadedJob) -> None:
    """Worker 0 ends in its first period, the last one in the third."""

    def work(store: DistStore) -> tuple[list[float], int, int]:
        param, optimizer = constant(1)
        averaging = PeriodicAveraging({"w": param}, optimizer, store, sync_every=3)
        for _ in range(2 + 3 * store.rank):
            averaging.step()
        averaging.finish()
        return param.tolist(), averaging.steps, averaging.rounds

    results = cluster.run(work)
    assert all(result == results[0] for result in results)
    assert results[0][1:] == (3 * cluster.workers - 1, cluster.workers)


@pytest.mark.parametrize("momentum", ["average", "reset"])
@pytest.mark.parametrize("first", [6, 7])
def test_after_an_uneven_end_training_goes_on(pair: ThreadedJob, first: int, momentum: str) -> None:
    def work(store: DistStore) -> tuple[list[float], int, int]:
        param, optimizer = constant(store.rank, momentum=0.5)
        averaging = PeriodicAveraging({"w": param}, optimizer, store, 3, 2, momentum=momentum)
        for steps in (first if store.rank == 0 else 9, 5):
            for _ in range(steps):
                averaging.step()
            averaging.finish()
        return param.tolist(), averaging.steps, averaging.rounds

    one, two = pair.run(work)
    assert one == two
    assert one[1] == 14


def test_step_counts_stay_their_own(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        param, _ = constant(1)
        adam = torch.optim.Adam([param])
        averaging = PeriodicAveraging({"w": param}, adam, store, 2, momentum="average")
        for _ in range(2 + 2 * store.rank):
            averaging.step()
        averaging.finish()
        return float(adam.state[param]["step"])

    assert pair.run(work) == [2, 4]


# ---- errors


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"sync_every": 0}, kv.UsageError, "sync_every=0 must be an integer, at least 1"),
        ({"sync_every": 2.5}, kv.UsageError, "sync_every=2.5"),
        ({"warmup_steps": -1}, kv.UsageError, "warmup_steps=-1 must be an integer, at least 0"),
        ({"momentum": None}, kv.UnknownName, "unknown momentum=None"),
        ({"momentum": "drop"}, kv.UnknownName, "unknown momentum='drop'; choose from keep, average, reset"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], error: type[Exception], text: str) -> None:
    param, optimizer = constant(1)
    with pytest.raises(error, match=text):
        PeriodicAveraging({"w": param}, optimizer, "local", **how)


def test_adagrad_cannot_begin_anew() -> None:
    model = network()
    adagrad = torch.optim.Adagrad(model.parameters())
    with pytest.raises(
        kv.UsageError, match=r"momentum='reset' does not work with Adagrad.* choose 'keep' or 'average'"
    ):
        PeriodicAveraging(model, adagrad, "local", momentum="reset")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ([{"sync_every": 4}, {"sync_every": 8}], "sync_every: {mine} on this one, {theirs} on worker {other}"),
        ([{"warmup_steps": 4}, {"warmup_steps": 8}], "warmup_steps: {mine} on this one, {theirs} on worker {other}"),
        ([{"momentum": "keep"}, {"momentum": "reset"}], "momentum: {mine} on this one, another on worker {other}"),
    ],
)
def test_workers_that_disagree(pair: ThreadedJob, how: list[dict[str, Any]], text: str) -> None:
    def work(store: DistStore) -> None:
        param, optimizer = constant(1)
        ((mine, theirs),) = zip(how[store.rank].values(), how[1 - store.rank].values(), strict=True)
        with pytest.raises(kv.Mismatch, match=text.format(mine=mine, theirs=theirs, other=1 - store.rank)):
            PeriodicAveraging({"w": param}, optimizer, store, **how[store.rank])

    pair.run(work)


def test_one_worker_without_buffers(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        norm = nn.BatchNorm1d(2)
        with pytest.raises(kv.Mismatch, match="another model, optimizer or setting of buffers"):
            PeriodicAveraging(norm, torch.optim.SGD(norm.parameters()), store, buffers=store.rank == 0)

    pair.run(work)


def test_a_worker_that_does_not_come_is_named() -> None:
    with ThreadedJob(workers=2, servers=1, timeout_s=1.0) as cluster:

        def work(store: DistStore) -> None:
            param, optimizer = constant(1)
            averaging = PeriodicAveraging({"w": param}, optimizer, store, sync_every=2)
            averaging.step()
            if store.rank == 0:
                with pytest.raises(kv.DeadlineExceeded, match="worker 1"):
                    averaging.step()

        with pytest.raises(kv.KVStoreError, match="worker 1"):  # at the end, of the push that was left
            cluster.run(work)


# ---- partial synchronization: chunks in turn, bounded distance, and with one chunk synchronous training


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


@pytest.mark.parametrize("chunk_bytes", [0, 7, -1, 8.0, True, "1 MB", None, 2**63])
def test_a_chunk_has_room_for_an_element(chunk_bytes: Any) -> None:
    param, optimizer = constant(1)
    with pytest.raises(kv.UsageError, match=r"chunk_bytes=.* must be an integer, at (least 8|most)"):
        PartialSync({"w": param}, optimizer, "local", chunk_bytes=chunk_bytes)
