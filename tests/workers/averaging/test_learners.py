"""DiLoCo of workers that are not alike: outer steps with a quorum and a grace, and means by the number of samples."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import backward, constant, network, same
from plain_diloco import inner_adam
from threaded import ThreadedJob
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule
from workers import DiLoCo
from workers.common import stores

PLAIN: dict[str, Any] = {"outer_optimizer": "sgd", "outer_params": {"lr": 1.0}}  # the mean, and no more


def learner(store: DistStore, inner_steps: int, **options: Any) -> tuple[DiLoCo, torch.nn.Parameter]:
    """A DiLoCo of one element, which worker r moves by -(r + 1) in each inner step."""
    param, optimizer = constant(store.rank + 1, size=1)
    return DiLoCo({"w": param}, optimizer, store, inner_steps, **PLAIN, **options), param


# ---- by samples


def test_the_mean_is_by_samples(pair: ThreadedJob) -> None:
    """Worker 0 moves by -2 with 2 samples, worker 1 by -4 with 6."""

    def work(store: DistStore) -> list[float]:
        outer, param = learner(store, 2, weight="samples")
        seen = []
        for _ in range(4):
            outer.step(samples=1 if store.rank == 0 else 3)
            seen.append(param.item())
        return seen

    assert pair.run(work) == [[-1, -3.5, -4.5, -7], [-2, -3.5, -5.5, -7]]


def test_each_period_has_its_own_samples(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        outer, param = learner(store, 1, weight="samples")
        seen = []
        for samples in ((1, 3), (3, 1), (0, 2), (2, 2)):
            outer.step(samples=samples[store.rank])
            seen.append(param.item())
        return seen

    assert pair.run(work) == [[-1.75, -3.0, -5.0, -6.5]] * 2


def test_fragments_are_weighed_by_the_samples_since_each_was_sent(pair: ThreadedJob) -> None:
    """Worker 1 has 3 samples in the first step, and one in each of the others, as worker 0 has."""

    def work(store: DistStore) -> list[float]:
        params = {name: constant(store.rank + 1, size=1)[0] for name in ("a.w", "b.w")}
        optimizer = torch.optim.SGD(list(params.values()), lr=1.0)
        outer = DiLoCo(params, optimizer, store, 2, fragments=2, weight="samples", **PLAIN)
        for step in range(3):
            outer.step(samples=3 if store.rank == 1 and step == 0 else 1)
        outer.finish()
        return [param.item() for param in params.values()]

    # a leaves after steps 1 (1 and 3 samples: -1.75) and 3 (2 and 2: -3), b after step 2 (2 and 4: -10/3) and at the
    # end (1 and 1: -1.5).
    for values in pair.run(work):
        assert values == [-1.75 - 3, pytest.approx(-10 / 3 - 1.5)]


def test_the_end_is_by_samples_too(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        outer, param = learner(store, 100, weight="samples")
        for _ in range(1 + store.rank):
            outer.step(samples=3 - 2 * store.rank)  # 3 in one step, and twice 1
        outer.step(samples=store.rank)  # and nothing, or 1
        outer.finish()
        return param.item()

    assert pair.run(work) == [-(3 * 2 + 3 * 6) / 6] * 2


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "overlap": 2}], ids=["whole", "streaming"])
def test_as_many_samples_each_change_no_bit(pair: ThreadedJob, options: dict[str, Any]) -> None:
    models = [network() for _ in range(4)]
    inners = [inner_adam(model.parameters()) for model in models]
    for first, how in ((0, {}), (2, {"weight": "samples"})):

        def work(store: DistStore, first: int = first, how: dict[str, Any] = how) -> None:
            model = models[first + store.rank]
            outer = DiLoCo(model, inners[first + store.rank], store, inner_steps=4, **options, **how)
            for step in range(1, 14):
                backward(model, step, store.rank, store.num_workers)
                outer.step(samples=7 if how else None)
            outer.finish()

        pair.run(work)
    same(models[0], models[2], atol=0)
    same(models[1], models[3], atol=0)


def test_it_goes_on_with_the_samples_that_it_has_counted(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        first, _ = learner(store, 4, weight="samples")
        first.step(samples=1 + 4 * store.rank)
        state = first.state_dict()
        assert state["samples"] == [1 + 4 * store.rank]
        state["weights"] = {name: value.clone() for name, value in state["weights"].items()}
        with store.companion() as another:
            second, param = learner(another, 4, weight="samples")  # type: ignore[arg-type]
            second.load_state_dict(state)
            for _ in range(3):
                second.step(samples=0 if store.rank == 0 else 1)
            return param.item()

    assert pair.run(work) == [pytest.approx(-(1 * 4 + 8 * 8) / 9)] * 2


def test_a_step_that_says_no_samples_has_no_effect() -> None:
    param, optimizer = constant(1)
    outer = DiLoCo({"w": param}, optimizer, "local", 2, weight="samples")
    for samples in (None, -1, 1.5, True):
        with pytest.raises(kv.UsageError, match=r"call step\(samples=len\(inputs\)\)|samples=.* must be an integer"):
            outer.step(samples=samples)  # type: ignore[arg-type]
    assert (outer.steps, param[0].item()) == (0, 0)
    outer.step(samples=3)
    assert (outer.steps, param[0].item()) == (1, -1)
    with pytest.raises(kv.UsageError, match="damaged: KeyError: 'samples'"):
        outer.load_state_dict({name: value for name, value in outer.state_dict().items() if name != "samples"})


def test_workers_that_weigh_otherwise(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        param, optimizer = constant(1)
        with pytest.raises(kv.Mismatch, match=f"weight: .* on this one, another on worker {1 - store.rank}"):
            DiLoCo({"w": param}, optimizer, store, 2, weight=[None, "samples"][store.rank])

    pair.run(work)


# ---- with a quorum


def late_once(pair: ThreadedJob, rule: Rule, samples: tuple[int | None, int | None]) -> list[list[float]]:
    """Periods of two steps: worker 0 makes two, and worker 1 is late for the first. What each has after its own."""
    over = [threading.Event() for _ in range(3)]

    def work(store: DistStore) -> list[float]:
        outer, param = learner(store, 2, weight="samples" if samples[0] else None)
        store.barrier()  # one that has its first values after a round takes part from the next one on
        seen = []
        for turn, rank in enumerate((0, 1, 0)):
            if rank == store.rank:
                for _ in range(2):
                    outer.step(samples=samples[rank])
                seen.append(param.item())
                over[turn].set()
            assert over[turn].wait(LONG)
        assert store.statistics().late == store.rank
        outer.finish()
        return [*seen, param.item()]

    return pair.run(work, rule=rule)


def test_late_outer_gradients_count_in_the_next_step_with_their_weight(pair: ThreadedJob) -> None:
    """Exact: the sums of the weights are powers of two."""
    zero, one = late_once(pair, Rule(quorum=1, late="keep"), (1, 3))
    assert zero == [-2, -2 - (2 * 2 + 6 * 4) / 8, -5.5]
    assert one == [-2, -5.5], "its own change is in the next step, and it goes on from what was there"


def test_late_outer_gradients_count_as_others_without_weights(pair: ThreadedJob) -> None:
    assert late_once(pair, Rule(quorum=1, late="keep"), (None, None)) == [[-2, -5, -5], [-2, -5]]


def test_late_outer_gradients_are_dropped(pair: ThreadedJob) -> None:
    assert late_once(pair, Rule(quorum=1), (1, 3)) == [[-2, -4, -4], [-2, -4]]


def test_within_the_grace_nobody_is_late(pair: ThreadedJob) -> None:
    """The quorum is there at once, and the other one comes much later than the quorum."""

    def work(store: DistStore) -> tuple[list[float], int]:
        outer, param = learner(store, 1)
        seen = []
        for step in range(3):
            if store.rank == step % 2:
                assert not sent[step].wait(0.05), "the round is not over"
            outer.step()
            sent[step].set()
            seen.append(param.item())
        outer.finish()
        return seen, store.statistics().late

    sent = [threading.Event() for _ in range(3)]
    assert pair.run(work, rule=Rule(quorum=1, grace=LONG)) == [([-1.5, -3, -4.5], 0)] * 2


def test_who_has_finished_ends_the_grace(pair: ThreadedJob) -> None:
    """Worker 0 makes more steps: nobody is waited for in its last rounds, though the grace is longer than the test."""

    def work(store: DistStore) -> float:
        outer, param = learner(store, 1)
        for _ in range(4 - 3 * store.rank):
            outer.step()
        outer.finish()
        return param.item()

    assert pair.run(work, rule=Rule(quorum=1, grace=10 * LONG)) == [-1.5 - 3 * 0.5] * 2


def test_learners_of_different_speed_end_with_the_same_weights(pair: ThreadedJob) -> None:
    models = [network() for _ in range(2)]
    inners = [inner_adam(model.parameters()) for model in models]

    def work(store: DistStore) -> int:
        model = models[store.rank]
        options = {"fragments": 2, "overlap": 2, "weight": "samples"}
        outer = DiLoCo(model, inners[store.rank], store, inner_steps=4, **options)  # type: ignore[arg-type]
        for step in range(1, 40 - 20 * store.rank):
            backward(model, step, store.rank, store.num_workers)
            outer.step(samples=4 - store.rank)
        outer.finish()
        return outer.steps

    assert pair.run(work, rule=Rule(quorum=1, late="keep", grace=0.01)) == [39, 19]
    same(*models, atol=0)


# ---- what is asked for


def test_the_store_that_is_made_has_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Asked(Exception):
        pass

    def create(name: str, **options: Any) -> None:
        asked.append((name, options))
        raise Asked

    monkeypatch.setattr(stores.kv, "create", create)
    for options in ({"quorum": 2}, {"quorum": 3, "grace": 1.5, "late": "drop"}, {}):
        param, optimizer = constant(1)
        with pytest.raises(Asked):
            DiLoCo({"w": param}, optimizer, "dist_sync", 2, **options)  # type: ignore[arg-type]
    assert asked == [
        ("dist_sync", {"quorum": 2, "grace": 0.0, "late": "keep"}),
        ("dist_sync", {"quorum": 3, "grace": 1.5, "late": "drop"}),
        ("dist_sync", {}),
    ]


def test_one_process_has_nobody_to_wait_for() -> None:
    param, optimizer = constant(1, size=1)
    outer = DiLoCo({"w": param}, optimizer, "auto", 1, quorum=3, grace=5.0, weight="samples", **PLAIN)
    outer.step(samples=3)
    assert param.item() == -1


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"weight": "tokens"}, kv.UnknownName, "unknown weight='tokens'; choose 'samples' or None"),
        ({"grace": 1.0}, kv.UsageError, "give a quorum, too"),
        ({"quorum": 1, "kvstore": kv.create("local")}, kv.UsageError, "quorum is for a store that DiLoCo makes"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], error: type[Exception], text: str) -> None:
    param, optimizer = constant(1)
    with pytest.raises(error, match=text):
        DiLoCo({"w": param}, optimizer, **{"kvstore": "local", "inner_steps": 4, **how})
