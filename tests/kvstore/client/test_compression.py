"""Compression in stores: what workers get is what the codecs promise, whatever the mode, the cuts and the dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from every_worker import every_worker_of
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client.compression import Compressing
from kvstore.codecs import Compressor, decode, parse
from kvstore.errors import UnknownName, UsageError
from kvstore.optim import states_file
from kvstore.rule import Rule

SHAPES = {"small": (5,), "matrix": (40, 60), "large": (5001,)}  # the larger ones are cut over the servers
EVERY = [
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit", "threshold": 0.0},
    {"type": "topk", "ratio": 0.05},
    {"type": "topk", "ratio": 0.05, "momentum": 0.9, "warmup_steps": 3},
    {"type": "threshold", "threshold": 0.7},
    {"type": "randomk", "ratio": 0.1},
    {"type": "int8"},
    {"type": "powersgd", "rank": 2},
]
PLAIN = {"fp16", "bf16", "int8"}


def gradient(key: str, rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + 10 * rank + len(key))
    return torch.randn(SHAPES[key], generator=made)


@pytest.mark.parametrize(
    ("kind", "pull", "times"),
    [("2bit", None, 1), ("fp16", "fp16", 2), ("2bit", "bf16", 4), ("bf16", "int8", 4), ("2bit", "int8", 8)],
)
def test_what_comes_back_in_fewer_bytes_comes_in_fewer_messages(kind: str, pull: str | None, times: int) -> None:
    numbers = {"threshold": 0.5} if kind == "2bit" else {}
    back = {} if pull is None else {"pull": pull}
    assert Compressing(parse({"type": kind, **numbers, **back})).fold == times


def name(options: Any) -> str:
    if not isinstance(options, dict):
        return f"{options:.3g}"
    return "-".join(str(value) for value in options.values())


def rounds(store: Any, options: dict[str, Any] | None, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """What every round gives, pushed as a list and one by one in turn."""
    store.set_gradient_compression(options)
    store.init(list(SHAPES), [torch.zeros(shape) for shape in SHAPES.values()])
    results = []
    for step in range(steps):
        outs = {key: torch.empty(shape) for key, shape in SHAPES.items()}
        grads = {key: gradient(key, store.rank, step) for key in SHAPES}
        if step % 2:
            for key in SHAPES:
                store.push(key, grads[key])
            for key in SHAPES:
                store.pull(key, out=outs[key])
        else:
            store.pushpull(list(SHAPES), list(grads.values()), out=list(outs.values()))
        results.append(outs)
    return results


@pytest.fixture(scope="module", params=[(1, 1, 10**6), (2, 3, 1000), (3, 2, 1000)], ids=str)
def job(request: pytest.FixtureRequest) -> Iterator[ThreadedJob]:
    workers, servers, bound = request.param
    with ThreadedJob(workers, servers, bigarray_bound=bound, piece_bytes=4096) as job:
        yield job


@pytest.mark.parametrize("options", EVERY, ids=name)
def test_a_round_is_the_sum_of_what_the_encodings_say(job: ThreadedJob, options: dict[str, Any]) -> None:
    results = job.run(lambda store: rounds(store, options))
    compression = parse(options)
    compressors = [Compressor(compression) for _ in range(job.workers)]
    for step in range(3):
        for key, shape in SHAPES.items():
            count = torch.Size(shape).numel()
            expected = torch.zeros(count)
            for rank, compressor in enumerate(compressors):
                encoded = compressor.encode(key, gradient(key, rank, step))
                expected += decode(compression, encoded.payload(0, count), count)
            for outs in (result[step] for result in results):
                assert torch.equal(outs[key], expected.view(shape)), (step, key)


@pytest.mark.parametrize("pull", ["fp16", "bf16", "int8", {"type": "topk", "ratio": 0.1}, "2bit"], ids=str)
def test_all_workers_get_the_same_and_what_it_lacks_comes_later(cluster: ThreadedJob, pull: Any) -> None:
    results = cluster.run(lambda store: rounds(store, {"type": "fp16", "pull": pull}, 12))
    exact = cluster.run(lambda store: rounds(store, None, 12))
    for one, two in zip(*results, strict=True):
        for key in SHAPES:
            assert torch.equal(one[key], two[key])
    kind = pull if isinstance(pull, str) else pull["type"]
    for key in SHAPES:
        lacking = sum(outs[key] - right[key] for outs, right in zip(results[0], exact[0], strict=True))
        largest = max(right[key].abs().max() for right in exact[0])
        assert lacking.abs().max() < (largest * 0.1 if kind in PLAIN else largest * 12)


def test_weights_come_back_near_and_only_so(cluster: ThreadedJob) -> None:
    def work(store: Any) -> tuple[torch.Tensor, torch.Tensor]:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5, "pull": "fp16"})
        store.init("w", torch.full((3000,), 1 / 3))
        squeezed, exact = torch.empty(3000), torch.empty(3000)
        store.pull("w", out=squeezed)
        store.set_gradient_compression({"type": "none"})
        store.pull("w", out=exact)
        store.set_gradient_compression({"type": "2bit", "pull": {"type": "topk"}})
        with pytest.raises(UsageError, match=r"topk compression is for sums, not for weights.*bf16, fp16, int8"):
            store.pull("w", out=exact)
        return squeezed, exact

    for squeezed, exact in cluster.run(work):
        assert torch.equal(squeezed, exact.half().float())
        assert torch.equal(exact, torch.full((3000,), 1 / 3))


@pytest.mark.parametrize("aggregators", [0, 1])
def test_what_decodes_to_more_than_half_precision_has_is_summed(aggregators: int) -> None:
    def work(store: Any) -> torch.Tensor:
        store.set_optimizer("sgd", learning_rate=2.0**-20, rescale_grad=0.25)
        store.set_gradient_compression({"type": "2bit", "threshold": 40_000.0})
        store.init("w", torch.zeros(2500, dtype=torch.float16))
        out = torch.empty(2500, dtype=torch.float16)
        big = torch.full((2500,), 40_000.0, dtype=torch.float16)
        store.pushpull("w", [big, big], out=out)  # from two devices each
        return out

    with ThreadedJob(2, 2, aggregators=aggregators) as job:
        # 80,000 of each worker are 40,000 and a residual; an aggregator's sum of 160,000 is twice that threshold.
        for out in job.run(work):
            assert out.unique().tolist() == torch.tensor([-20_000 * 2.0**-20]).half().tolist()


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_updates_at_once(cluster: ThreadedJob, mode: str) -> None:
    def work(store: Any) -> torch.Tensor:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.set_gradient_compression({"type": "1bit", "pull": "bf16"})
        store.init("w", torch.zeros(2000))
        for _ in range(4):
            store.push("w", torch.full((2000,), 2.0))
        store.barrier()
        out = torch.empty(2000)
        store.pull("w", out=out)
        return out

    rule = Rule("async", staleness=None if mode == "async" else 4)
    for out in cluster.run(work, mode=mode, rule=rule):
        assert torch.equal(out, torch.full((2000,), -8.0)), "two workers, four times, one each"


@every_worker_of("cluster")
def test_it_can_be_changed_and_turned_off_between_two_pushes(store: Any) -> None:
    store.init("w", torch.zeros(4))
    out, seen = torch.empty(4), []
    for options in ({"type": "2bit", "threshold": 2.0}, None, {"type": "1bit"}, {"type": "none"}):
        store.set_gradient_compression(options)
        store.pushpull("w", torch.full((4,), 3.0), out=out)
        seen.append(float(out[0]))
    assert seen == [4.0, 6.0, 2.0, 6.0]


def test_a_run_goes_on_from_its_files_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def steps(store: Any, first: int, last: int) -> torch.Tensor:
        out = torch.empty(SHAPES["large"])
        for step in range(first, last):
            store.pushpull("large", gradient("large", store.rank, step), out=out)
        return out

    def begin(store: Any, value: torch.Tensor) -> None:
        store.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        store.set_gradient_compression({"type": "topk", "ratio": 0.01, "pull": "fp16"})
        store.init("large", value)

    def whole(store: Any) -> torch.Tensor:
        begin(store, torch.zeros(SHAPES["large"]))
        return steps(store, 0, 6)

    def before(store: Any) -> torch.Tensor:
        begin(store, torch.zeros(SHAPES["large"]))
        steps(store, 0, 3)
        store.save_optimizer_states(tmp_path / f"states-{store.rank}")
        store.set_gradient_compression(None)
        out = torch.empty(SHAPES["large"])
        store.pull("large", out=out)
        return out

    def after(store: Any) -> torch.Tensor:
        begin(store, weights)
        store.load_optimizer_states(tmp_path / f"states-{store.rank}")
        store.barrier()
        return steps(store, 3, 6)

    with ThreadedJob(2, 2) as job:
        expected = job.run(whole)
    with ThreadedJob(2, 2) as job:
        weights = job.run(before)[0]
    with ThreadedJob(2, 3) as job:
        assert all(torch.equal(one, two) for one, two in zip(job.run(after), expected, strict=True))


def test_a_worker_takes_no_residuals_of_another(cluster: ThreadedJob, tmp_path: Path) -> None:
    def work(store: Any) -> float:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        store.init("w", torch.zeros(4))
        store.pushpull("w", torch.full((4,), 0.6), out=torch.empty(4))  # all of it is lacking
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "states")
        store.barrier()
        store.set_gradient_compression(None)
        store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        store.load_optimizer_states(tmp_path / "states")
        out = torch.empty(4)
        store.pushpull("w", torch.full((4,), 0.6), out=out)
        return float(out[0])

    assert cluster.run(work) == [-1.0, -1.0], "rank 0's 1.2 are enough to be sent, rank 1's 0.6 are not"


@pytest.mark.parametrize("odd", [torch.ones(3), torch.full((4,), torch.nan)])
@every_worker_of("alone")
def test_residuals_that_no_push_could_carry_are_refused_before_one(
    store: Any, odd: torch.Tensor, tmp_path: Path
) -> None:
    """Else a push would fail when others wait for it already, and all that come after it."""
    store.set_optimizer("sgd", learning_rate=1.0)
    store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    store.init("w", torch.zeros(4))
    out = torch.empty(4)
    store.pushpull("w", torch.full((4,), 0.6), out=out)
    store.save_optimizer_states(tmp_path / "states")
    residuals = states_file.read_residuals(tmp_path / "states")
    assert residuals is not None
    states_file.write(tmp_path / "odd", "sgd", {}, residuals._replace(tensors={"residual.0": odd}))
    with pytest.raises(UsageError, match="the state of key 'w' "):
        store.load_optimizer_states(tmp_path / "odd")
    store.pushpull("w", torch.full((4,), 0.6), out=out)
    assert out[0] == -1


@every_worker_of("alone")
def test_what_is_no_compression(store: Any) -> None:
    with pytest.raises(UnknownName, match="no compression '3bit'; choose from"):
        store.set_gradient_compression({"type": "3bit"})
    with pytest.raises(UsageError, match="threshold=-1"):
        store.set_gradient_compression({"type": "2bit", "threshold": -1})
    store.set_gradient_compression({"type": "fp16"})
    store.init("w", torch.zeros(3))
    with pytest.raises(UsageError, match="infinite or NaN"):
        store.push("w", torch.tensor([1.0, float("nan"), 0.0]))
    store.set_gradient_compression(None)
    store.pushpull("w", torch.ones(3), out=torch.empty(3))


@every_worker_of("alone")
def test_what_cannot_be_encoded_stops_the_whole_push_before_it_begins(store: Any) -> None:
    store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    good = torch.tensor([0.75, 0.0])
    with pytest.raises(UsageError, match="'b' has infinite or NaN"):
        store.push(["a", "b"], [good, torch.tensor([0.0, float("inf")])])
    out = torch.empty(2)
    store.pushpull("a", good, out=out)
    # Had the first push encoded 'a', its residual and this one together would reach the threshold.
    assert out.tolist() == [0, 0]


@every_worker_of("cluster")
def test_compression_that_one_worker_alone_has_set_is_found_out_in_the_first_round(store: kv.KVStore) -> None:
    store.init("w", torch.zeros(50))
    out = torch.zeros(50)
    store.pushpull("w", torch.ones(50), out)
    if store.rank == 1:
        store.set_gradient_compression({"type": "fp16", "pull": "fp16"})
    with pytest.raises(kv.Mismatch, match="compression for the same round of 'w': none on worker 0, fp16 on worker 1"):
        store.pushpull("w", torch.ones(50), out)
    store.set_gradient_compression({"type": "fp16", "pull": "fp16"})
    store.pushpull("w", torch.ones(50), out)
    assert out.eq(2).all()
