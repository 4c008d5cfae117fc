"""DiLoCo against the algorithm written plainly; what it sends; ends that are not even; going on; wrong arguments."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models import backward, constant, network, same
from plain_diloco import diloco, inner_adam
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import DiLoCo, PeriodicAveraging
from workers.averaging.diloco import GlobalWeights, Schedule, layer_of, require_synchronous, split

HALVES = [(["0.weight", "0.bias"], 2), (["2.weight", "2.bias"], 4)]  # of ``network``, with four inner steps


def trained(cluster: ThreadedJob, steps: int, *, finish: bool = False, **options: Any) -> list[nn.Module]:
    """The workers' models after ``steps``."""
    models = [network(rank) for rank in range(cluster.workers)]
    inners = [inner_adam(model.parameters()) for model in models]  # not in threads: torch's first one imports a lot

    def work(store: DistStore) -> None:
        model = models[store.rank]
        outer = DiLoCo(model, inners[store.rank], store, **options)
        for step in range(1, steps + 1):
            backward(model, step, store.rank, store.num_workers)
            outer.step()
        if finish:
            outer.finish()
        outer.close()

    cluster.run(work)
    return models


def all_same(models: Sequence[nn.Module], expected: Sequence[nn.Module], atol: float = 1e-6) -> None:
    for mine, theirs in zip(models, expected, strict=True):
        same(mine, theirs, atol)


# ---- the weights


def test_it_is_the_algorithm_of_the_paper(cluster: ThreadedJob) -> None:
    models = trained(cluster, 11, inner_steps=3)
    all_same(models, diloco(network(), cluster.workers, 11, 3))
    if cluster.workers > 1:
        assert not torch.equal(models[0][0].weight, models[1][0].weight), "two steps after the last synchronization"


@pytest.mark.parametrize(("overlap", "mixing"), [(0, 0.5), (1, 0.5), (3, 0.25), (3, 0)])
def test_fragments_and_overlap_are_those_of_the_paper(pair: ThreadedJob, overlap: int, mixing: float) -> None:
    models = trained(pair, 13, inner_steps=4, fragments=2, overlap=overlap, mixing=mixing)
    kept = mixing if overlap else 0.0
    all_same(models, diloco(network(), 2, 13, 4, fragments=HALVES, overlap=overlap, mixing=kept))


def test_another_outer_optimizer(pair: ThreadedJob) -> None:
    models = trained(pair, 8, inner_steps=4, outer_optimizer="adam", outer_params={"lr": 0.1})
    all_same(models, diloco(network(), 2, 8, 4, outer=lambda params: torch.optim.Adam(params, lr=0.1)))


def test_outer_sgd_with_a_rate_of_one_is_averaging(pair: ThreadedJob) -> None:
    averaged = [network() for _ in range(2)]

    def work(store: DistStore) -> None:
        model = averaged[store.rank]
        averaging = PeriodicAveraging(model, inner_adam(model.parameters()), store, sync_every=1)
        for step in range(1, 6):
            backward(model, step, store.rank, 2)
            averaging.step()

    pair.run(work)
    all_same(trained(pair, 5, inner_steps=1, outer_optimizer="sgd", outer_params={"learning_rate": 1.0}), averaged)


def test_in_one_process() -> None:
    model = network()
    outer = DiLoCo(model, inner_adam(model.parameters()), "local", inner_steps=3, fragments=2, overlap=2)
    for step in range(1, 8):
        backward(model, step, 0, 1)
        outer.step()
    halves = [(["0.weight", "0.bias"], 1), (["2.weight", "2.bias"], 3)]
    all_same([model], diloco(network(), 1, 7, 3, fragments=halves, overlap=2, mixing=0.5))
    assert outer.fragments == [names for names, _ in halves]


def test_half_precision_loses_no_small_changes(pair: ThreadedJob) -> None:
    """Each period moves the global weights by 1/512, of which bfloat16 near 1 has no multiple but every fourth."""

    def work(store: DistStore) -> float:
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([param], lr=1.0)
        outer = DiLoCo({"w": param}, optimizer, store, 1, outer_optimizer="sgd", outer_params={"lr": 1 / 4})
        for _ in range(16):
            param.grad = torch.full_like(param, 1 / 128)
            outer.step()
        return param[0].item()

    assert pair.run(work) == [1 - 16 / 512] * 2


def test_global_weights_in_the_middle(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[list[float]]:
        param, optimizer = constant(2 * store.rank, size=1)
        outer = DiLoCo({"w": param}, optimizer, store, 4, "sgd", {"lr": 1.0}, overlap=2, mixing=0.5)
        seen = []
        for _ in range(6):
            outer.step()
            with outer.global_weights():
                here = param.item()
            seen.append([param.item(), here])
        return seen

    zero, one = pair.run(work)
    assert zero == [[0, 0], [0, 0], [0, 0], [0, -4], [0, -4], [-2, -4]]
    assert one == [[-2, 0], [-4, 0], [-6, 0], [-8, -4], [-10, -4], [-8, -4]]


def test_buffers_are_averaged_at_the_end(pair: ThreadedJob) -> None:
    for buffers in (True, False):

        def work(store: DistStore, buffers: bool = buffers) -> list[float]:
            norm = nn.BatchNorm1d(2)
            outer = DiLoCo(norm, torch.optim.SGD(norm.parameters()), store, 2, buffers=buffers)
            assert norm.running_mean is not None
            norm.running_mean.fill_(store.rank)
            outer.finish()
            return norm.running_mean.tolist()

        assert pair.run(work) == ([[0.5, 0.5]] * 2 if buffers else [[0, 0], [1, 1]])


# ---- what is sent


def test_bytes(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> tuple[list[int], int]:
        model = network()
        outer = DiLoCo(model, inner_adam(model.parameters()), store, 4, fragments=2, overlap=1)
        sent = [store.statistics().bytes_pushed]
        for step in range(1, 7):
            backward(model, step, store.rank, 2)
            outer.step()
            sent.append(store.statistics().bytes_pushed)
        for _ in range(2):
            outer.finish()
            sent.append(store.statistics().bytes_pushed)
        return [later - before for before, later in pairwise(sent)], outer.rounds

    one, two = 4 * (6 * 8 + 8), 4 * (8 * 3 + 3)
    assert pair.run(work) == [([0, one, 0, two, 0, one, two, 0], 4)] * 2  # the last step's fragment does not go twice


@pytest.mark.parametrize("back", ["fp16", "int8"])
def test_compressed(pair: ThreadedJob, back: str) -> None:
    """Half-precision and 8-bit values both ways: close to the exact weights, and the same on all workers."""
    options = {"inner_steps": 3, "finish": True}
    exact = trained(pair, 9, **options)
    models = trained(pair, 9, compression_params={"type": "int8", "pull": back}, **options)
    same(*models, atol=0)
    with torch.no_grad():
        for mine, theirs in zip(models[0].parameters(), exact[0].parameters(), strict=True):
            assert 0 < (mine - theirs).abs().max() < 0.03


# ---- the end


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "overlap": 2}], ids=["whole", "streaming"])
def test_workers_with_more_and_less_data(cluster: ThreadedJob, options: dict[str, Any]) -> None:
    models = [network() for _ in range(cluster.workers)]
    inners = [inner_adam(model.parameters()) for model in models]

    def work(store: DistStore) -> int:
        model = models[store.rank]
        outer = DiLoCo(model, inners[store.rank], store, inner_steps=3, **options)
        for _ in range(2):  # after an uneven end training goes on
            for step in range(2 + 3 * store.rank):
                backward(model, step, store.rank, store.num_workers)
                outer.step()
            outer.finish()
        return outer.steps

    assert cluster.run(work) == [2 * (2 + 3 * rank) for rank in range(cluster.workers)]
    for model in models:
        same(model, models[0], atol=0)


def test_one_that_has_finished_counts_as_unchanged(pair: ThreadedJob) -> None:
    """By hand: outer SGD with a rate of 1; worker 1 makes two steps more, in a round of its own."""

    def work(store: DistStore) -> float:
        param, optimizer = constant(1, size=1)
        outer = DiLoCo({"w": param}, optimizer, store, 2, "sgd", {"lr": 1.0})
        for _ in range(3 + 2 * store.rank):
            outer.step()
        outer.finish()
        return param.item()

    # Both send 2; then worker 0 the 1 of its end and worker 1 a period of 2; then worker 1 alone the 1 of its end.
    assert pair.run(work) == [-2 - 1.5 - 0.5] * 2


def test_a_worker_that_waits_too_short_may_wait_again(pair: ThreadedJob) -> None:
    go_on = threading.Event()

    def work(store: DistStore) -> float:
        param, optimizer = constant(1, size=1)
        outer = DiLoCo({"w": param}, optimizer, store, 4, "sgd", {"lr": 1.0})
        outer.step()
        if store.rank == 0:
            with pytest.raises(kv.DeadlineExceeded, match="worker 1"):
                outer.finish(timeout=0.1)
            go_on.set()
        else:
            go_on.wait(30)
        outer.finish()
        return param.item()

    assert pair.run(work) == [-1, -1]


# ---- going on


@pytest.mark.parametrize("compression", [None, {"type": "int8"}], ids=["plain", "int8"])
@pytest.mark.parametrize("at", [6, 7, 9])
def test_it_goes_on_to_the_bit(pair: ThreadedJob, tmp_path: Path, at: int, compression: Any) -> None:
    """Stopped after step 6, right after a fragment has left; with another on its way; and between two."""
    options = {"inner_steps": 4, "fragments": 2, "overlap": 3, "compression_params": compression}
    models = [network(rank) for rank in range(4)]
    inners = [inner_adam(model.parameters()) for model in models]
    saved: list[Any] = [None, None]

    def steps(outer: DiLoCo, model: nn.Module, store: DistStore, begin: int, end: int) -> None:
        for step in range(begin + 1, end + 1):
            backward(model, step, store.rank, 2)
            outer.step()

    def whole(store: DistStore) -> None:
        model, inner = models[store.rank], inners[store.rank]
        outer = DiLoCo(model, inner, store, **options)
        steps(outer, model, store, 0, at)
        with outer.global_weights():
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = outer.state_dict()
        state["weights"] = {name: value.clone() for name, value in state["weights"].items()}
        outer.save_states(tmp_path / f"outer.{store.rank}")
        adam = {param: {name: value.clone() for name, value in held.items()} for param, held in inner.state.items()}
        saved[store.rank] = weights, state, list(adam.values())
        store.barrier()
        steps(outer, model, store, at, 15)
        outer.finish()

    def second(store: DistStore) -> None:
        model, inner = models[2 + store.rank], inners[2 + store.rank]
        weights, state, adam = saved[store.rank]
        model.load_state_dict(weights)
        inner.state.update(zip(model.parameters(), adam, strict=True))
        outer = DiLoCo(model, inner, store, **options)
        outer.load_states(tmp_path / f"outer.{store.rank}")
        outer.load_state_dict(state)
        steps(outer, model, store, at, 15)
        outer.finish()
        assert outer.steps == 15

    pair.run(whole)
    pair.run(second)
    all_same(models[2:], models[:2], atol=0)


def test_states_that_do_not_fit() -> None:
    def made(**options: Any) -> DiLoCo:
        model = network()
        return DiLoCo(model, inner_adam(model.parameters()), "local", 4, **options)

    state = made(fragments=2).state_dict()
    with pytest.raises(kv.UsageError, match="has 2 fragments, but there are 1"):
        made().load_state_dict(state)
    with pytest.raises(kv.UsageError, match=r"another model: it has no 'local/0.weight' of this shape"):
        made(fragments=2).load_state_dict({**state, "weights": {}})
    for damage in ({"steps": -1}, {"position": "x"}, {"in_flight": [2]}, {"unsent": 3}):
        with pytest.raises(kv.UsageError, match=r"steps=-1|position='x'|in_flight=2|damaged: TypeError"):
            made(fragments=2).load_state_dict({**state, **damage})
    with pytest.raises(kv.UsageError, match="damaged: KeyError: 'steps'"):
        made().load_state_dict({})


# ---- errors


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"inner_steps": 0}, kv.UsageError, "inner_steps=0 must be an integer, at least 1"),
        ({"fragments": 0}, kv.UsageError, "fragments=0 must be an integer, at least 1"),
        ({"fragments": 3}, kv.UsageError, "fragments=3 must be at most the number of layers"),
        ({"overlap": 4}, kv.UsageError, "overlap=4 must be less than inner_steps=4"),
        ({"overlap": 1.5}, kv.UsageError, "overlap=1.5 must be an integer"),
        ({"mixing": 1}, kv.UsageError, "mixing=1 must be a number from 0 to less than 1"),
        ({"mixing": "half"}, kv.UsageError, "mixing='half' must be a number"),
        ({"outer_optimizer": "nothing"}, kv.UnknownName, "no optimizer 'nothing'"),
        ({"outer_params": {"lr": 1, "push": 2}}, kv.UnknownName, "push"),
        ({"outer_params": {"rescale_grad": 2}}, kv.UsageError, "outer_params must not have rescale_grad"),
        ({"compression_params": {"type": "int8", "pull": "int8"}}, kv.Unsupported, "leave out 'pull'"),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], error: type[Exception], text: str) -> None:
    model = network()
    with pytest.raises(error, match=text):
        DiLoCo(model, inner_adam(model.parameters()), "local", **{"inner_steps": 4, **how})


def test_an_optimizer_by_name_is_no_inner_optimizer() -> None:
    with pytest.raises(kv.UsageError, match=r"optimizer must be an instance of torch.optim.Optimizer, not str"):
        DiLoCo(network(), "adamw", "local")  # type: ignore[arg-type]


def test_stores_that_do_not_wait(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        param, optimizer = constant(1)
        with pytest.raises(kv.UsageError, match="synchronous store, 'dist_sync' or 'local', not 'dist_async'"):
            DiLoCo({"w": param}, optimizer, store, 2)

    pair.run(work, "async")


def test_a_store_that_is_in_use() -> None:
    store = kv.create("local")
    param, optimizer = constant(1)
    DiLoCo({"w": param}, optimizer, store, 2)
    with pytest.raises(kv.UsageError, match="already has another model's weights"):
        DiLoCo({"w": param}, optimizer, store, 2)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ([{"inner_steps": 4}, {"inner_steps": 8}], "inner_steps: {mine} on this one, {theirs} on worker {other}"),
        ([{"overlap": 1}, {"overlap": 2}], "overlap: {mine} on this one, {theirs} on worker {other}"),
        ([{"fragments": 1}, {"fragments": 2}], "fragments: {mine} on this one, {theirs} on worker {other}"),
    ],
)
def test_workers_that_disagree(pair: ThreadedJob, how: list[dict[str, Any]], text: str) -> None:
    def work(store: DistStore) -> None:
        model = network()
        ((mine, theirs),) = zip(how[store.rank].values(), how[1 - store.rank].values(), strict=True)
        with pytest.raises(kv.Mismatch, match=text.format(mine=mine, theirs=theirs, other=1 - store.rank)):
            DiLoCo(model, inner_adam(model.parameters()), store, **how[store.rank])

    pair.run(work)


# ---- Which layers are synchronized together, and after which steps


def times(schedule: Schedule, steps: int) -> tuple[list[list[int]], list[list[int]]]:
    """After which steps each fragment leaves, and arrives."""
    leaving: list[list[int]] = [[] for _ in range(schedule.fragments)]
    arriving: list[list[int]] = [[] for _ in range(schedule.fragments)]
    for step in range(1, steps + 1):
        for number in schedule.leaving(step):
            leaving[number].append(step)
        for number in schedule.arriving(step):
            arriving[number].append(step)
    return leaving, arriving


def test_one_fragment_is_due_at_the_end_of_each_period() -> None:
    assert times(Schedule(5), 16) == ([[5, 10, 15]], [[5, 10, 15]])


def test_fragments_take_turns_and_travel() -> None:
    leaving, arriving = times(Schedule(10, 3, 4), 30)
    assert leaving == [[3, 13, 23], [6, 16, 26], [10, 20, 30]]
    assert arriving == [[7, 17, 27], [10, 20, 30], [14, 24]]


@pytest.mark.parametrize(("inner_steps", "fragments", "overlap"), [(1, 1, 0), (7, 7, 6), (8, 3, 7), (100, 7, 13)])
def test_every_fragment_leaves_once_in_a_period_and_arrives_before_it_leaves_again(
    inner_steps: int, fragments: int, overlap: int
) -> None:
    leaving, arriving = times(Schedule(inner_steps, fragments, overlap), 3 * inner_steps)
    for left, came in zip(leaving, arriving, strict=True):
        assert len(left) == 3
        assert 1 <= left[0] <= inner_steps
        assert [later - earlier for earlier, later in pairwise(left)] == [inner_steps] * 2
        assert came == [step + overlap for step in left if step + overlap <= 3 * inner_steps]
    assert len({steps[0] for steps in leaving}) == fragments, "two fragments never leave after the same step"


def test_a_schedule_that_cannot_be() -> None:
    with pytest.raises(kv.UsageError, match="fragments=4 must be at most inner_steps=3"):
        Schedule(3, 4)
    with pytest.raises(kv.UsageError, match="overlap=3 must be less than inner_steps=3"):
        Schedule(3, 1, 3)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attention.weight", "blocks.3"),
        ("encoder.layers.0.1.bias", "encoder.layers.0"),
        ("fc.weight", "fc"),
        ("0.weight", "0"),
        ("weight", ""),
        ("7", ""),
    ],
)
def test_the_layer_of_a_parameter(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_layers_of_equal_size_are_dealt_out() -> None:
    params = {f"blocks.{layer}.{name}": torch.empty(4) for layer in range(5) for name in ("weight", "bias")}
    blocks = [[f"blocks.{layer}.weight", f"blocks.{layer}.bias"] for layer in range(5)]
    assert split(params, 2) == [blocks[0] + blocks[2] + blocks[4], blocks[1] + blocks[3]]
    assert split(params, 1) == [list(params)]


def test_a_large_layer_has_a_fragment_for_itself() -> None:
    sizes = {"embedding.weight": 100, "blocks.0.weight": 30, "blocks.1.weight": 30, "blocks.2.weight": 30, "none.w": 0}
    params = {name: torch.empty(size) for name, size in sizes.items()}
    assert split(params, 2) == [["embedding.weight"], ["blocks.0.weight", "blocks.1.weight", "blocks.2.weight"]]


def test_more_fragments_than_layers() -> None:
    with pytest.raises(kv.UsageError, match=r"fragments=3 must be at most the number of layers .* which is 2"):
        split({"a.weight": torch.empty(2), "a.bias": torch.empty(2), "b.weight": torch.empty(2)}, 3)


# ---- a worker's side of the global weights, with a store in this process: outer gradients out, new weights in


def made(*values: float, dtype: torch.dtype = torch.float32) -> tuple[GlobalWeights, dict[str, torch.Tensor]]:
    params = {f"w{number}": torch.full((2,), value, dtype=dtype) for number, value in enumerate(values)}
    return GlobalWeights(kv.create("local"), params, "sgd", {"learning_rate": 0.5}), params


def test_an_outer_step_goes_part_of_the_way() -> None:
    weights, params = made(1.0, 5.0)
    params["w0"].fill_(3.0)
    weights.push(["w0"]).wait()
    assert params["w0"].tolist() == [3, 3], "until it is taken"
    weights.take(["w0"])
    assert (params["w0"].tolist(), params["w1"].tolist()) == ([2, 2], [5, 5])


def test_mixing() -> None:
    weights, params = made(1.0)
    params["w0"].fill_(3.0)
    weights.push(["w0"]).wait()
    params["w0"].fill_(10.0)
    weights.take(["w0"], mixing=0.25)
    assert params["w0"].tolist() == [4, 4]
    weights.pull()
    assert params["w0"].tolist() == [2, 2]


def test_what_one_began_with_is_no_gradient_in_half_precision() -> None:
    weights, params = made(1.0, dtype=torch.bfloat16)
    params["w0"].fill_(1.0 + 2**-7)
    weights.push(["w0"]).wait()
    weights.take(["w0"])
    assert params["w0"].tolist() == [1, 1], "rounded"
    weights.push(["w0"]).wait()
    assert weights.state()["global/w0"].tolist() == [1 + 2**-8] * 2


def test_the_global_weights_for_a_while() -> None:
    weights, params = made(1.0)
    params["w0"].fill_(3.0)
    with weights.swapped_in():
        assert params["w0"].tolist() == [1, 1]
    assert params["w0"].tolist() == [3, 3]


def test_state() -> None:
    weights, params = made(1.0)
    params["w0"].fill_(3.0)
    saved = {name: value.clone() for name, value in weights.state().items()}
    again, others = made(7.0)
    again.load_state(saved)
    assert others["w0"].tolist() == [3, 3]
    again.take(["w0"])
    assert others["w0"].tolist() == [1, 1]
    with pytest.raises(kv.UsageError, match="another model: it has no 'local/w1'"):
        made(1.0, 2.0)[0].load_state(saved)


def test_stores_that_update_for_every_push() -> None:
    require_synchronous(kv.create("local"))

    class MyAsyncStore(kv.KVStore):
        pass

    with pytest.raises(kv.UsageError, match=r"not 'myasyncstore': .* momentum makes training unstable"):
        require_synchronous(MyAsyncStore())
