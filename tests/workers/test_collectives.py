"""Broadcasts, and sums and averages over workers, of what is not trained."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_tensors import odd_tensors
from threaded import ThreadedJob, shared_job
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import Reducer, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from workers.common.tensors import fingerprint

# ---- broadcasts: every bit of the root's, whoever that is; optimizers' states of every kind


cluster = shared_job(workers=2, servers=2)


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def values(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = {str(dtype): (torch.randn(3, 5, generator=generator) * 9).to(dtype) for dtype in DTYPES}
    found["nan"] = torch.tensor([float("nan"), -0.0, float("inf")]) if rank else torch.ones(3)
    found["none"], found["one"] = torch.zeros(0, 4), torch.tensor(3.5 + rank)
    found["strided"] = torch.randn(4, 6, generator=generator).t()
    found["last"] = torch.randn(1, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    found["large"] = torch.randn(1_200_000, generator=generator)  # more than a piece
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_bit_of_every_dtype_arrives_from_any_root(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        for root in (1, 0):
            mine = values(store.rank)
            memory = [tensor.data_ptr() for tensor in mine.values()]
            broadcast_parameters(mine, root, kvstore=store)
            assert [tensor.data_ptr() for tensor in mine.values()] == memory
            for name, theirs in values(root).items():
                assert bits(mine[name]) == bits(theirs), name

    cluster.run(work)


def test_a_module_gets_its_buffers_too(cluster: ThreadedJob) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    models[0][1].running_mean.fill_(7)  # type: ignore[operator, union-attr]
    models[1].requires_grad_(False)
    cluster.run(lambda store: broadcast_parameters(models[store.rank], kvstore=store))
    mine, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_becomes_the_roots(cluster: ThreadedJob, name: str) -> None:
    def work(store: DistStore) -> None:
        mine = odd_tensors(store.rank)[name]
        broadcast_parameters({"b": mine}, kvstore=store)
        assert fingerprint(mine) == fingerprint(odd_tensors(0)[name])
        assert mine.stride() == odd_tensors(1)[name].stride() if mine.layout == torch.strided else True

    cluster.run(work)


def test_buffers_that_share_memory_stay_views_of_each_other(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        base = torch.arange(6.0) + store.rank
        view = base[2:4]
        broadcast_parameters({"base": base, "view": view}, kvstore=store)
        assert base.tolist() == [0, 1, 2, 3, 4, 5]
        assert view.data_ptr() == base[2:].data_ptr()

    cluster.run(work)


def test_parameters_may_come_as_a_list_or_as_pairs(cluster: ThreadedJob) -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]

    def work(store: DistStore) -> None:
        broadcast_parameters(models[store.rank].parameters(), kvstore=store)
        broadcast_parameters(models[store.rank].named_parameters(), kvstore=store)

    cluster.run(work)
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (lambda mine: broadcast_parameters([torch.zeros(3)], **mine), "worker . broadcasts something else"),
        (lambda mine: broadcast_parameters([torch.zeros(2)], 1, **mine), "worker . broadcasts from root_rank="),
        (lambda mine: broadcast_object(1, **mine), "worker . broadcasts something else"),
    ],
)
def test_workers_that_disagree_are_told(cluster: ThreadedJob, theirs: Callable[[Any], Any], text: str) -> None:
    def work(store: DistStore) -> None:
        call = theirs if store.rank else lambda mine: broadcast_parameters([torch.zeros(2)], **mine)
        with pytest.raises(kv.Mismatch, match=text):
            call({"kvstore": store})

    cluster.run(work)


def test_what_cannot_be_broadcast_is_refused() -> None:
    workers.init()
    try:
        with pytest.raises(kv.UsageError, match="'a' cannot be broadcast: it is int"):
            broadcast_parameters({"a": 3})
        with pytest.raises(kv.UsageError, match="'0' cannot be broadcast"):
            broadcast_parameters([torch.zeros(2, device="meta")])
        with pytest.raises(kv.UsageError, match="root_rank=1 must be the rank of a worker, 0 to 0"):
            broadcast_parameters([torch.zeros(1)], 1)
        with pytest.raises(kv.UsageError, match="optimizer must be an instance of"):
            broadcast_optimizer_state(3)  # type: ignore[arg-type]
        broadcast_parameters(nn.Linear(2, 2))  # alone there is nothing to do
        broadcast_optimizer_state(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1))
        assert broadcast_object({"a": 1}) == {"a": 1}
    finally:
        workers.shutdown()


def test_a_broadcast_makes_no_store_of_its_own() -> None:
    with pytest.raises(kv.UsageError, match=r"kvstore='local' must be a store, or 'auto' for that of workers.init"):
        broadcast_parameters({"w": torch.ones(1)}, kvstore="local")


def test_a_store_with_an_optimizer_will_not_do(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        with pytest.raises(kv.KVStoreError, match=r"floating point only|does not sum"):
            broadcast_parameters([torch.zeros(2)], kvstore=store)

    cluster.run(work)


def test_nor_will_one_that_does_something_else_than_summing() -> None:
    store = kv.create("local")
    store.set_updater(lambda key, pushed, stored: stored.add_(pushed))
    with pytest.raises(kv.UsageError, match="this store does not sum what is pushed"):
        broadcast_parameters([torch.zeros(2)], kvstore=store)


def test_plain_objects(cluster: ThreadedJob) -> None:
    value = {"epoch": 3, "best": (0.5, None), "names": ["a"], "order": torch.arange(5)}

    def work(store: DistStore) -> Any:
        return broadcast_object(value if store.rank == 1 else print, 1, kvstore=store)

    for theirs in cluster.run(work):
        assert torch.equal(theirs.pop("order"), torch.arange(5))
        assert theirs == {"epoch": 3, "best": (0.5, None), "names": ["a"]}


@pytest.mark.parametrize("size", [0, 1, 3000, 1_200_000])  # bytes of the largest: none, few, a small piece, many pieces
def test_every_worker_has_the_objects_of_all(cluster: ThreadedJob, size: int) -> None:
    def value(rank: int) -> Any:
        return {"rank": rank, "text": "ü" * rank, "none": None, "bits": values(rank)["nan"], "much": torch.rand(size)}

    mine = [value(rank) for rank in range(2)]

    def work(store: DistStore) -> Any:
        for _ in range(2):  # the keys are there already
            found = workers.gather_object(mine[store.rank], kvstore=store)
        assert found[store.rank] is mine[store.rank]
        return found

    for found in cluster.run(work):
        assert list(found) == [0, 1]
        for rank, theirs in found.items():
            assert (theirs["rank"], theirs["text"], theirs["none"]) == (rank, "ü" * rank, None)
            assert bits(theirs["bits"]) == bits(mine[rank]["bits"])
            assert torch.equal(theirs["much"], mine[rank]["much"])


def test_every_worker_has_the_tensors_of_all_whatever_their_shapes(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        for name in values(0):
            if "float8" not in name:
                found = workers.all_gather(values(store.rank)[name], kvstore=store)
                assert [bits(found[rank]) for rank in (0, 1)] == [bits(values(rank)[name]) for rank in (0, 1)], name
        found = workers.all_gather(torch.arange(store.rank * 3).view(-1, 3), kvstore=store)
        assert [tensor.shape for tensor in found.values()] == [(0, 3), (1, 3)]
        with pytest.raises(kv.UsageError, match="all_gather takes a tensor, not a list"):
            workers.all_gather([1], kvstore=store)  # type: ignore[arg-type]
        with pytest.raises(kv.UsageError, match=r"the value\['f'\]|\['f'\] is of type function"):
            workers.gather_object({"f": bits}, kvstore=store)

    cluster.run(work)


def test_one_process_gathers_from_itself() -> None:
    store = kv.create("local")
    assert workers.gather_object([1, "a"], kvstore=store) == {0: [1, "a"]}
    assert workers.all_gather(torch.ones(2), kvstore=store)[0].tolist() == [1, 1]
    with pytest.raises(kv.UsageError, match=r"call workers.init\(\) first"):
        workers.gather_object(1)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), betas=(0.8, 0.9), amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params),
    "lbfgs": lambda params: torch.optim.LBFGS(params, history_size=3),
    "asgd": lambda params: torch.optim.ASGD(params),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 12).view(4, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_goes_on_as_the_roots(cluster: ThreadedJob, steps: int) -> None:
    for make in MAKERS.values():
        torch.manual_seed(0)
        root = nn.Linear(3, 2)
        other = copy.deepcopy(root)
        models = [other, root]
        optimizers = [make(other.parameters()), make(root.parameters())]
        train(root, optimizers[1], steps)
        optimizers[1].param_groups[0]["lr"] = 0.05
        train(other, optimizers[0], 3 - steps)  # has state where the root has none

        def work(store: DistStore, models: Any = models, optimizers: Any = optimizers) -> None:
            broadcast_parameters(models[store.rank], 1, kvstore=store)
            broadcast_optimizer_state(optimizers[store.rank], 1, kvstore=store)

        cluster.run(work)
        for model, optimizer in zip(models, optimizers, strict=True):
            assert optimizer.param_groups[0]["lr"] == 0.05
            train(model, optimizer, 2)
        assert torch.equal(root.weight, other.weight), optimizers[0]


class Odd(torch.optim.Optimizer):
    """Its state is of other dtypes than its weights, and of every kind."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "betas": (0.9, 0.99), "flag": None})

    def fill(self) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "master": param.detach().double() / 3,
                "n": 2,
                "none": None,
                "past": [torch.ones(2), 3],
            }
        self.state["all"] = {"step": torch.tensor(4)}  # type: ignore[index]


@pytest.mark.parametrize("root", [0, 1])
def test_the_tensor_that_differs_is_named(cluster: ThreadedJob, root: int) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)) for rank in range(2)]
    said: dict[int, str] = {}

    def work(store: DistStore) -> None:
        with pytest.raises(kv.Mismatch) as raised:
            broadcast_parameters(models[store.rank], root, kvstore=store)
        said[store.rank] = str(raised.value)
        with pytest.raises(kv.Mismatch, match=r"1\.weight|nothing more"):
            broadcast_parameters(models[0] if store.rank else models[0][:1], root, kvstore=store)
        broadcast_parameters(models[0] if store.rank else copy.deepcopy(models[0]), root, kvstore=store)

    cluster.run(work)
    roots = f"worker {root} has 1.weight torch.float32 [{3 + root}, 2] there. "
    start = f"worker {1 - root} broadcasts something else than worker {root}"
    assert said[root].startswith(f"{start}: {roots}")
    assert said[1 - root].startswith(f"{start}, where it has 1.weight torch.float32 [{4 - root}, 2]: {roots}")


def test_states_keep_their_dtypes(cluster: ThreadedJob) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizers = [Odd([param]) for param in params]
    optimizers[0].fill()
    optimizers[0].param_groups[0]["flag"] = "on"
    cluster.run(lambda store: broadcast_optimizer_state(optimizers[store.rank], kvstore=store))
    its = optimizers[1].state[params[1]]
    assert torch.equal(its["master"], torch.ones(3).double() / 3)
    assert (its["n"], its["none"], its["past"][1]) == (2, None, 3)
    assert optimizers[1].state["all"]["step"] == 4  # type: ignore[index]
    assert optimizers[1].param_groups[0]["betas"] == (0.9, 0.99)
    assert optimizers[1].param_groups[0]["flag"] == "on"
    assert optimizers[1].param_groups[0]["params"][0] is params[1]


def test_other_optimizers_are_told(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        groups: Any = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(1 + store.rank)]
        with pytest.raises(kv.Mismatch, match="something else"):
            broadcast_optimizer_state(torch.optim.SGD(groups, lr=1), kvstore=store)

    cluster.run(work)


# ---- sums and averages over workers, for what is not trained


RunAll = Callable[[Callable[[Reducer, int], Any]], list[Any]]


three = shared_job(workers=3, servers=2, bigarray_bound=10)


@pytest.fixture
def run(three: ThreadedJob, monkeypatch: pytest.MonkeyPatch) -> RunAll:
    """Calls a function with a reducer and the rank, on every worker."""
    mine = threading.local()
    names = []

    def create(name: str) -> kv.KVStore:
        names.append(name)
        return DistStore(mine.session)

    def run(work: Callable[[Reducer, int], Any]) -> list[Any]:
        def in_session(session: Any) -> Any:
            mine.session = session
            with Reducer("dist_async") as reducer:
                return work(reducer, session.rank)

        results = three.run_sessions(in_session)
        assert set(names) == {"dist_sync"}  # whatever the training's store is, sums are synchronous
        return results

    monkeypatch.setattr("workers.reducer.kv.create", create)
    return run


def test_sums_over_workers(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> Any:
        first = reducer.sum({"correct": 10.0 + rank, "seen": 100})
        second = reducer.sum({"correct": 0.5, "seen": 1})
        return first, second, reducer.sum({})

    expected = ({"correct": 33.0, "seen": 300.0}, {"correct": 1.5, "seen": 3.0}, {})
    assert run(work) == [expected] * 3


def test_a_metric_of_many_counts_is_summed_and_stopping_is_decided_alike(run: RunAll) -> None:
    scores, labels = torch.randn(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 3 == 0

    def work(reducer: Reducer, rank: int) -> Any:
        metric, stopping = workers.metrics.create("auc"), workers.callbacks.EarlyStopping(patience=2, mode="min")
        part = slice(rank * 120, rank * 120 + 120)
        metric.update(labels[part], scores[part])
        metric.reduce(reducer)
        # Worker 2's losses would end at once, the other ones' never: their mean ends after the fourth.
        losses = [[9.0, 6.0, 5.0, 4.0], [9.0, 6.0, 5.0, 4.0], [0.0, 3.0, 9.0, 8.0]][rank]
        ends = [stopping.update(loss, reducer) for loss in losses]
        return metric.get()[1], ends, stopping.best, stopping.best_epoch

    whole = workers.metrics.create("auc")
    whole.update(labels, scores)
    assert run(work) == [(whole.get()[1], [False, False, False, True], 5.0, 1)] * 3


def test_sums_are_exact_for_large_counts(run: RunAll) -> None:
    assert run(lambda reducer, rank: reducer.sum({"n": 2**50 + rank})["n"]) == [3.0 * 2**50 + 3] * 3


def test_names_may_come_later_and_in_another_order(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> Any:
        reducer.sum({"a": 1})
        numbers = {"b": 2.0, "a": 3.0} if rank == 1 else {"a": 3.0, "b": 2.0}
        return reducer.sum(numbers)

    assert run(work) == [{"a": 9.0, "b": 6.0}] * 3


def test_averages_of_buffers(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        norm = nn.BatchNorm1d(12)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        for round_number in (1, 2):
            norm.running_mean.fill_(float(rank * round_number))
            norm.num_batches_tracked.fill_(rank + 1 + (rank == 2))  # 1, 2, 4
            reducer.average(dict(norm.named_buffers()))
            assert norm.running_mean.tolist() == [round_number] * 12
            assert norm.num_batches_tracked.item() == 2  # 7 / 3, rounded down

    run(work)


def test_averages_of_half_precision_and_nothing(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        half = torch.full((3,), float(rank), dtype=torch.bfloat16)
        reducer.average({"half": half})
        reducer.average({})
        assert half.tolist() == [1, 1, 1]

    run(work)


def test_a_number_and_a_tensor_may_have_one_name(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        assert reducer.sum({"x": 1.0}) == {"x": 3.0}
        value = torch.ones(2)
        reducer.average({"x": value})
        assert value.tolist() == [1, 1]

    run(work)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_alone_a_sum_is_the_number_itself(kind: str) -> None:
    with Reducer(kind) as reducer:
        for value in (3.0, 4.0):
            assert reducer.sum({"n": value}) == {"n": value}
        buffers = {"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(5)}
        reducer.average(buffers)
        assert [value.tolist() for value in buffers.values()] == [[1, 2], 5]


def test_without_an_argument_a_process_outside_of_a_job_is_alone() -> None:
    with Reducer() as reducer:
        assert reducer.sum({"n": 2.0}) == {"n": 2.0}


def test_a_store_stands_for_its_type() -> None:
    with Reducer(kvstore=kv.create("device")) as reducer:
        assert reducer.sum({"n": 2.0}) == {"n": 2.0}


def test_a_store_may_be_used_as_it_is() -> None:
    store = kv.create("local")
    reducer = Reducer.over(store)
    reducer.sum({"n": 2.0})
    assert store.statistics().keys == 1


def test_the_old_name_of_its_argument_warns() -> None:
    with pytest.warns(DeprecationWarning, match="kind= is now kvstore="):
        reducer = Reducer(kind="local")
    assert reducer.sum({"n": 2.0}) == {"n": 2.0}
    reducer.close()


def test_outside_a_job_a_dist_reducer_says_what_to_run() -> None:
    with pytest.raises(kv.ConfigError, match=r"launch\.py"):
        Reducer("dist_async")


def test_an_exception_passes_through_the_block() -> None:
    with pytest.raises(ZeroDivisionError), Reducer("local"):
        _ = 1 / 0


LOW = torch.finfo(torch.float32).min


def test_what_every_worker_has_equal_keeps_its_bits(run: RunAll) -> None:
    def constants() -> dict[str, torch.Tensor]:
        wide = torch.linspace(1, 2, 97) ** -0.7
        return {
            "mask": torch.tensor([0.0, LOW, float("-inf"), float("nan"), -0.0]),
            "frequencies": wide,
            "double": wide.double() / 3,
            "half": wide.half(),
            "complex": torch.polar(wide, wide),
            "count": torch.tensor(7),
        } | odd_tensors(3)

    def work(reducer: Reducer, rank: int) -> None:
        mine = constants()
        reducer.average(mine)
        assert [name for name, tensor in constants().items() if fingerprint(tensor) != fingerprint(mine[name])] == []

    run(work)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_a_mean_of_the_largest_numbers_there_are_is_no_infinity(run: RunAll, dtype: torch.dtype) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        most = torch.finfo(dtype).max
        value = torch.tensor([most, -most, most, 3.0 * rank], dtype=dtype)
        value[2] = most if rank else -most
        reducer.average({"a": value})
        third = torch.tensor(most / 3, dtype=dtype)
        torch.testing.assert_close(value, torch.tensor([most, -most, third, 3.0], dtype=dtype), rtol=1e-2, atol=0)
        assert value[0] == most

    run(work)


def test_integers_of_few_bits_do_not_wrap_around(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        value = torch.tensor([100 + rank, -100], dtype=torch.int8)
        reducer.average({"a": value})
        assert value.tolist() == [101, -100]

    run(work)


def test_buffers_without_a_mean_become_rank_zeros(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        model = nn.BatchNorm1d(2)
        model.register_buffer("low", torch.full((2,), LOW), persistent=False)
        for name, tensor in odd_tensors(rank).items():
            model.register_buffer(name.replace(" ", "_"), tensor)
        model.running_mean.fill_(float(rank))  # type: ignore[union-attr]
        model.num_batches_tracked.fill_(5 - rank)  # type: ignore[union-attr]
        reducer.average_buffers(model)
        assert model.running_mean.tolist() == [1, 1]  # type: ignore[union-attr]
        assert model.num_batches_tracked == 5
        assert model.low.tolist() == [LOW, LOW]  # type: ignore[union-attr]
        found = dict(model.named_buffers())
        for name, tensor in odd_tensors(0).items():
            if name not in ("expanded", "expanded scalar", "channels last"):  # these have a mean
                assert fingerprint(found[name.replace(" ", "_")]) == fingerprint(tensor), name
        assert found["expanded_scalar"].tolist() == [[2.5, 2.5], [2.5, 2.5]]
        assert found["expanded"].stride() == (0, 1)

    run(work)


def test_a_broadcast_of_what_differs(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(rank)
            model.bias.fill_(3)
        model.weight.requires_grad_(False)
        reducer.broadcast(model)
        assert model.weight.tolist() == [[0, 0], [0, 0]]
        assert model.bias.tolist() == [3, 3]

    run(work)


def test_workers_that_average_other_tensors_are_told(run: RunAll) -> None:
    def work(reducer: Reducer, rank: int) -> None:
        with pytest.raises(kv.Mismatch, match=r"worker \d averages other tensors"):
            reducer.average({"a": torch.zeros(2 if rank else 3)})

    run(work)
