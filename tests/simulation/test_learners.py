"""DiLoCo in virtual time, with learners of different speed: who is in which outer step, and how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from simulation.job import Outcome, SimulatedJob
from simulation.network import Weather

from kvstore.client import DistStore
from kvstore.member.mutual_waits import LOOK_S
from kvstore.rule import Rule
from servers.store.array_updates import Updates
from servers.store.grace import FEW, Grace
from servers.store.rounds import Rounds
from workers import DiLoCo, Reducer, fit

CALM = Weather(delay_s=0.001)
ROUGH = Weather(delay_s=0.02, cut=0.01, repeat=0.1)
SIZES = {"a.w": 4000, "b.w": 8}  # the first is cut over both servers
KEEP: dict[str, Any] = {"quorum": 2, "late": "keep"}


class Counted(NamedTuple):
    """A contribution that an update has counted."""

    rank: int
    clock: int
    weight: float


Closed = dict[tuple[int, int], list[Counted]]  # by segment and round, what was in it


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Closed:
    """What servers count, whose segments have numbers of their own."""
    found: Closed = {}
    really = Updates.close

    def close(self: Updates, wave: Sequence[Any]) -> Any:
        for bucket, contributions in wave:
            for number in bucket.ids:
                found[number, bucket.rounds.version] = [
                    Counted(rank, each.clock, each.weight) for each in contributions for rank in each.ranks
                ]
        return really(self, wave)

    monkeypatch.setattr(Updates, "close", close)
    return found


def run(
    rule: Rule,
    paces: Sequence[float],
    periods: Sequence[int],
    weather: Weather = CALM,
    seed: int = 0,
    replicas: int = 0,
    kill_at: int = 0,
    kill_s: float = 0.0,
    hosts: Sequence[Sequence[int]] = (),
    **options: Any,
) -> Outcome:
    """Run learners, of which each takes so many seconds for a period of two steps, and makes so many periods.

    Each returns its last weights, and how many virtual seconds it has trained.

    Args:
        kill_at: after which delivery server 0 is killed.
        hosts: the workers of each host that has an aggregator.
        kill_s: or how long after the training has begun; its standby then hears from it half a second late.
    """
    job = SimulatedJob(
        *(seed, weather, len(paces), 2, hosts),
        rule=rule,
        bigarray_bound=1000,
        replicas=replicas,
        restarts=5 * replicas,
    )

    def program(store: DistStore) -> Any:
        rank = store.rank
        params = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
        optimizer = torch.optim.SGD(params.values(), lr=1.0)
        outer = DiLoCo(params, optimizer, store, 2, "sgd", {"lr": 1.0}, weight="samples", **options)
        store.barrier()
        task = job.world.current
        assert task is not None
        began = job.world.now
        if kill_s and not rank:
            job.network.late_s["server 0", "standby 0"] = 0.5
            job.world.after(kill_s, lambda: job.kill("server 0"))
        for _ in range(2 * periods[rank]):
            task.wait(paces[rank] / 2)
            for param in params.values():
                param.grad = torch.full_like(param, rank + 1)
            outer.step(samples=rank + 1)
        took = job.world.now - began
        outer.finish()
        return [param.tolist() for param in params.values()], took

    def happen() -> None:
        if job.network.deliveries == kill_at:
            job.world.after(0.0, lambda: job.kill("server 0"))

    job.network.on_delivery = happen
    return job.run(program)


def require_even(outcome: Outcome) -> list[float]:
    """All learners have ended well, with the same weights; return how long each has trained."""
    assert not outcome.errors, outcome.errors
    assert not outcome.hanging
    weights = [weights for weights, _ in outcome.results]
    assert all(each == weights[0] for each in weights)
    return [took for _, took in outcome.results]


def require_once(closed: Closed, periods: Sequence[int]) -> None:
    """Each outer gradient counts once, in its round or the next that is closed after it came, with its weight.

    One that comes when no more rounds do is kept for those after the end.
    """
    for number in {number for number, _ in closed}:
        rounds = {round_: found for (segment, round_), found in closed.items() if segment == number}
        counts = Counter(each for found in rounds.values() for each in found)
        assert set(counts.values()) == {1}, "counted twice"
        for round_, found in rounds.items():
            assert all(each.clock <= round_ and each.weight == 2 * (each.rank + 1) for each in found)
        for rank, made in enumerate(periods):
            own = sorted(each.clock for each in counts if each.rank == rank)
            assert made - 1 <= len(own) <= made


def late(closed: Closed) -> int:
    return sum(each.clock < round_ for (_, round_), found in closed.items() for each in found)


def test_a_learner_of_half_the_speed_does_not_hold_up_the_others(closed: Closed) -> None:
    took = require_even(run(Rule(**KEEP, grace=0.2), [1.0, 1.0, 2.0], [20, 20, 10]))
    require_once(closed, [20, 20, 10])
    assert late(closed) > 0
    assert max(took[:2]) < 20 * 1.1, "a few times the whole grace, and then no more"
    assert took[2] < 10 * 2.2


def test_without_a_quorum_it_does() -> None:
    took = require_even(run(Rule(), [1.0, 1.0, 2.0], [10, 10, 10]))
    assert min(took) == pytest.approx(20, rel=0.1)


def test_those_that_are_a_little_late_are_in_all_steps(closed: Closed) -> None:
    """A grace that is longer than the learners differ: nobody is late, and it costs no more than the difference."""
    took = require_even(run(Rule(**KEEP, grace=0.5), [1.0, 1.1, 1.3], [10, 10, 10]))
    require_once(closed, [10, 10, 10])
    assert late(closed) == 0
    assert max(took) == pytest.approx(13, rel=0.05)


def test_a_quorum_alone_leaves_them_behind(closed: Closed) -> None:
    took = require_even(run(Rule(**KEEP), [1.0, 1.1, 1.3], [10, 10, 10]))
    require_once(closed, [10, 10, 10])
    assert late(closed) > 0
    assert took[0] < 12


def test_servers_agree_on_who_is_in_a_step_when_pushes_reach_them_at_once(closed: Closed) -> None:
    require_even(run(Rule(**KEEP, grace=0.2), [1.0, 1.05, 2.1], [12, 12, 6]))
    of_first = sorted(number for number, _ in closed)
    for number, round_ in closed:
        assert sorted(closed[number, round_]) == sorted(closed[of_first[0], round_])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "overlap": 1}], ids=["whole", "streaming"])
def test_rough_links_lose_and_double_nothing(closed: Closed, seed: int, options: dict[str, Any]) -> None:
    rule = Rule(**KEEP, grace=0.1)
    require_even(run(rule, [0.5, 0.6, 1.1], [8, 7, 5], ROUGH, seed, **options))
    if not options:  # fragments have different samples at the end
        require_once(closed, [8, 7, 5])


def test_learners_of_hosts_with_aggregators_count_once(closed: Closed) -> None:
    took = require_even(run(Rule(**KEEP, grace=0.2), [1.0, 1.0, 2.0, 2.1], [8, 8, 4, 4], hosts=[[0, 2], [1, 3]]))
    require_once(closed, [8, 8, 4, 4])
    assert late(closed) > 0
    assert max(took[:2]) < 8 * 1.5


def test_what_is_dropped_counts_nowhere(closed: Closed) -> None:
    require_even(run(Rule(quorum=2, grace=0.1), [1.0, 1.0, 2.0], [10, 10, 5]))
    assert late(closed) == 0
    assert all(len(found) == len({each.rank for each in found}) for found in closed.values())


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_grace_is_over_in_time(replicas: int) -> None:
    """Learner 2 comes once, much later: the others wait for it a few times, each time for the whole grace."""
    took = require_even(run(Rule(**KEEP, grace=0.3), [1.0, 1.0, 20.0], [FEW + 2, FEW + 2, 1], replicas=replicas))
    assert took[:2] == pytest.approx([FEW * 1.3 + 2] * 2, abs=0.1)


@pytest.mark.parametrize("kill_s", [1.25, 1.35, 1.45])
def test_what_a_grace_has_ended_is_not_told_before_the_standby_has_it(kill_s: float) -> None:
    """The first round is closed after 1.3 s. Server 0 dies before that, and while its record is on its way."""
    rule = Rule(**KEEP, grace=0.3)
    took = require_even(run(rule, [1.0, 1.0, 9.0], [4, 4, 1], replicas=1, kill_s=kill_s))
    assert max(took[:2]) < 15


@pytest.mark.parametrize("at", range(150, 490, 60))
def test_a_server_that_dies_costs_nothing_but_time(at: int) -> None:
    took = require_even(run(Rule(**KEEP, grace=0.2), [0.5, 0.5, 1.0], [6, 6, 3], replicas=1, kill_at=at))
    assert max(took) < 30


def test_a_worker_that_waits_for_those_in_the_grace_is_no_deadlock() -> None:
    """Worker 2 waits for the others, whose round waits for it until the grace is over, beyond a call's deadline."""
    job = SimulatedJob(0, CALM, 3, rule=Rule(quorum=2, grace=5 * LOOK_S))

    def program(store: DistStore) -> None:
        store.init("w", torch.zeros(1))
        if store.rank < 2:
            store.pushpull("w", torch.ones(1), torch.zeros(1))
        store.barrier()

    outcome = job.run(program)
    assert not outcome.errors, outcome.errors
    assert outcome.worked_s == pytest.approx(5 * LOOK_S, abs=1.0)


# ---- what is broken is found


def verdicts(closed: Closed) -> list[str]:
    """What is wrong with some of the runs above."""
    wrong = []
    for rule, paces, periods in (
        (Rule(**KEEP, grace=0.2), [1.0, 1.0, 2.0], [20, 20, 10]),
        (Rule(**KEEP, grace=0.5), [1.0, 1.1, 1.3], [10, 10, 10]),
    ):
        closed.clear()
        outcome = run(rule, paces, periods)
        try:
            took = require_even(outcome)
            require_once(closed, periods)
            assert (late(closed) == 0) == (rule.grace == 0.5)
            assert max(took) < 22
        except AssertionError as exc:
            wrong.append(str(exc))
    return wrong


MUTATIONS: dict[str, tuple[type, str, Any]] = {
    "a round never waits": (Grace, "seconds", lambda self, ranks: 0.0),
    "a round waits for whoever is slow": (Grace, "_seconds", lambda self, rank: self._most_s if rank == 2 else 0.0),
    "nobody looks when the grace is over": (Grace, "due", property(lambda self: None, lambda self, due: None)),
}


def test_what_is_sound_is_not_called_broken(closed: Closed) -> None:
    assert not verdicts(closed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(closed: Closed, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutated = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutated, raising=False)
    assert verdicts(closed)


def test_late_ones_that_are_forgotten_are_caught(closed: Closed, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Rounds.complete

    def complete(self: Rounds[Any]) -> Any:
        self._late.clear()
        return really(self)

    monkeypatch.setattr(Rounds, "complete", complete)
    assert verdicts(closed)


# ---- learners that die, and are started again


def returning(workers: int, kills: Sequence[tuple[int, float]], **options: Any) -> SimulatedJob:
    """A job that starts workers again; ``kills`` says which ranks die, and when."""
    job = SimulatedJob(
        *(0, CALM, workers, 2), restarts=5, returns=True, reaped=True, start_s=0.2, min_workers=1, **options
    )
    for rank, at_s in kills:
        job.world.after(at_s, partial(job.kill, f"worker {rank}"))
    return job


def rest(job: SimulatedJob, seconds: float) -> None:
    assert job.world.current is not None
    job.world.current.wait(seconds)


def let_in(rule: Rule, kills: Sequence[tuple[int, float]], periods: int = 12, **options: Any) -> int:
    """Run three learners, of which the last takes twice as long if there is a quorum; return how many came back."""
    job = returning(3, kills, rule=rule, bigarray_bound=1000)
    entered: set[int] = set()

    def program(store: DistStore) -> Any:
        params = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
        optimizer = torch.optim.SGD(params.values(), lr=1.0)
        outer = DiLoCo(params, optimizer, store, 2, "sgd", {"lr": 1.0}, weight="samples", **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
        store.attach("scheduler", scheduler, shared=True)
        start = job.starts[f"worker {store.rank}"]
        if outer.come_back() and outer.steps < 2 * periods:
            entered.add(start)
            for name, param in params.items():
                store.pull(name, out := torch.empty(SIZES[name]))
                assert torch.equal(out, param), "it has the weights of now"
        pace = 1.0 if store.rank == 2 and rule.quorum is not None else 0.5
        while outer.steps < 2 * periods:
            rest(job, pace)
            for param in params.values():
                param.grad = torch.full_like(param, store.rank + 1)
            outer.step(samples=store.rank + 1)
            scheduler.step()
            assert scheduler.last_epoch == outer.steps
        outer.finish()
        return [param.tolist() for param in params.values()], outer.steps

    outcome = job.run(program)
    require_even(outcome)
    assert {steps for _, steps in outcome.results} == {2 * periods}
    return len(entered)


@pytest.mark.parametrize("rule", [Rule(), Rule(**KEEP, grace=0.2)], ids=["all", "quorum"])
@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "overlap": 1}], ids=["whole", "streaming"])
def test_a_learner_that_died_comes_back(rule: Rule, streaming: dict[str, Any], closed: Closed) -> None:
    """Between two pushes, while a fragment travels, and twice; each outer gradient counts once at most."""
    for kills in ([(1, 2.3)], [(2, 2.501)], [(0, 3.002), (1, 3.4)], [(1, 1.7), (1, 4.2)]):
        closed.clear()
        assert let_in(rule, kills, **streaming)
        counts = Counter((number, each.rank, each.clock) for (number, _), found in closed.items() for each in found)
        assert set(counts.values()) == {1}, kills


def test_a_learner_that_comes_back_must_train_what_the_others_train() -> None:
    job = returning(2, [(1, 2.3)])

    def program(store: DistStore) -> Any:
        params = {name: torch.nn.Parameter(torch.zeros(4)) for name in ("a.w", "b.w")}
        params["b.w"].requires_grad_(job.starts[f"worker {store.rank}"] == 1)
        outer = DiLoCo(params, torch.optim.SGD(params.values(), lr=1.0), store, 2)
        while outer.steps < 20:
            rest(job, 0.5)
            params["a.w"].grad = torch.ones(4)
            outer.step()
        outer.finish()
        return outer.steps

    outcome = job.run(program)
    assert list(outcome.errors) == [1]
    assert "have changed requires_grad of b.w: change it" in str(outcome.errors[1])
    assert outcome.results[0] == 20


def test_fit_goes_on_at_the_epoch_and_batch_of_the_others() -> None:
    job = returning(3, [(1, 3.7)])
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def program(store: DistStore) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        own = seen.setdefault((store.rank, job.starts[f"worker {store.rank}"]), [])

        def note(param: Any) -> None:
            rest(job, 0.5)
            own.append((param.epoch, param.nbatch))

        data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))] * 6
        options = {"inner_steps": 2, "fragments": 1, "weight": "samples"}
        with Reducer.over(store.companion()) as reducer:
            fit(
                *(model, data),
                num_epoch=3,
                kvstore=store,
                reducer=reducer,
                optimizer_params={"learning_rate": 0.1},
                batch_end_callback=note,
                diloco=options,
                split=False,
            )
        return [param.tolist() for param in model.parameters()]

    outcome = job.run(program)
    assert not outcome.errors, outcome.errors
    assert all(weights == outcome.results[0] for weights in outcome.results)
    whole, before, after = seen[0, 1], seen[1, 1], seen[1, 2]
    assert whole == [(epoch, batch) for epoch in range(3) for batch in range(6)]
    assert before
    assert before == whole[: len(before)]
    assert after
    assert after == whole[-len(after) :]
