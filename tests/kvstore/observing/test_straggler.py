"""Who is named a straggler, and by what cause."""

from __future__ import annotations

import pytest
from made_spans import server_span, worker_span

from kvstore import wire
from kvstore.observing.straggler import ALONE, ENOUGH, FEWEST_WAVES, LAST, PairedLooks, doing_of, find_straggler


def workers(*blocked: float, read: list[float] | None = None, rounds: int = 100):
    return {
        rank: worker_span(rank, share, None if read is None else read[rank], rounds)
        for rank, share in enumerate(blocked)
    }


def test_a_worker_that_computes_for_longer_is_named():
    found = find_straggler(workers(0.35, 0.02, 0.36), [server_span([0, 100, 0], [0.0, 0.33, 0.0])])
    assert found is not None
    assert (found.ranks, found.cause) == ((1,), "local")
    assert (found.seconds, found.waves, found.last) == (10.0, 100, 1.0)
    assert found.alone == pytest.approx(0.33)
    assert found.alone_s == pytest.approx(0.033)
    assert (found.blocked, found.others_blocked) == pytest.approx((0.02, 0.355))
    assert (found.input, found.others_input) == (None, None)


@pytest.mark.parametrize(
    ("read", "cause"), [([0.0, 0.31], "input"), ([0.0, 0.03], "compute"), ([0.3, 0.31], "compute")]
)
def test_input_is_told_from_computation_where_it_is_counted(read: list[float], cause: str):
    found = find_straggler(workers(0.35, 0.02, read=read), [server_span([0, 100], [0.0, 0.33])])
    assert found is not None
    assert found.cause == cause


def test_who_waits_as_long_as_others_has_a_slow_network():
    found = find_straggler(workers(0.36, 0.34, read=[0.0, 0.0]), [server_span([0, 100], [0.0, 0.33])])
    assert found is not None
    assert found.cause == "network"


def test_with_long_exchanges_the_difference_decides():
    """All wait for the exchange of large arrays; the straggler less, by what it computes for longer."""
    found = find_straggler(workers(0.8, 0.65), [server_span([0, 100], [0.0, 0.16])])
    assert found is not None
    assert found.cause == "local"


def test_the_conditions_together_name_and_each_alone_does_not():
    named = {"last": [10, 90], "alone": [0.0, 0.3]}
    assert find_straggler(workers(0.3, 0.0), [server_span(**named)]) is not None
    for other in (
        {"last": [30, 70]},  # less than LAST of the waves
        {"alone": [0.0, 0.09]},  # less than ALONE of the time
        {"last": [0, FEWEST_WAVES - 1]},
    ):
        assert find_straggler(workers(0.3, 0.0), [server_span(**{**named, **other})]) is None
    assert (LAST, ALONE) == (0.8, 0.1)


def test_who_costs_nobody_time_is_not_named():
    named = server_span([0, 100], [0.0, 0.3])
    assert find_straggler(workers(0.04, 0.0), [named]) is None, "nobody waits for the rounds"
    assert find_straggler(workers(0.3, 0.0, rounds=2000), [named]) is None, "1.5 ms a round"
    assert find_straggler(workers(0.3), [named]) is None, "it has left"
    assert find_straggler({}, [named]) is None
    assert find_straggler(workers(0.3, 0.0), []) is None


def test_all_servers_count():
    seen = [server_span([0, 100], [0.0, 0.3]), server_span([70, 30], [0.05, 0.05])]
    assert find_straggler(workers(0.3, 0.0), seen) is None
    seen[1] = server_span([10, 90], [0.0, 0.05])
    found = find_straggler(workers(0.3, 0.0), seen)
    assert found is not None
    assert (found.waves, found.last) == (200, 0.95)


# ---- with aggregators


def test_of_an_aggregators_workers_the_one_that_its_host_waits_for():
    seen = [server_span([0, 0, 100, 100], [0.0, 0.0, 0.3, 0.3], waves=100)]
    groups = [
        server_span([50, 50], [0.0, 0.0], 0, "aggregator"),
        server_span([0, 0, 2, 98], [0.0, 0.0, 0.0, 0.3], 1, "aggregator"),
    ]
    found = find_straggler(workers(0.3, 0.3, 0.3, 0.0), seen, groups)
    assert found is not None
    assert (found.ranks, found.cause) == ((3,), "local")


def test_a_host_whose_workers_are_late_together_is_named_whole():
    seen = [server_span([0, 0, 100, 100], [0.0, 0.0, 0.3, 0.3], waves=100)]
    groups = [
        server_span([50, 50], [0.0] * 2, 0, "aggregator"),
        server_span([0, 0, 50, 50], [0.0] * 4, 1, "aggregator"),
    ]
    found = find_straggler(workers(0.3, 0.31, 0.3, 0.3), seen, groups)
    assert found is not None
    assert (found.ranks, found.cause) == ((2, 3), "network")


def test_on_one_host_its_aggregator_knows():
    seen = [server_span([100, 100, 100], [0.0] * 3, waves=100)]
    found = find_straggler(workers(0.3, 0.3, 0.0), seen, [server_span([1, 1, 98], [0.0, 0.0, 0.3], 0, "aggregator")])
    assert found is not None
    assert found.ranks == (2,)
    assert find_straggler(workers(0.3, 0.3, 0.0), seen) is None


FETCH = ["train.py:9 in <module>", "torch/utils/data/dataloader.py:700 in __next__", "data.py:4 in __getitem__"]
BACKWARD = ["train.py:12 in <module>", "torch/autograd/graph.py:800 in _engine_run_backward"]
PUSH = ["train.py:14 in <module>", "kvstore/client/store.py:200 in pushpull", "selectors.py:400 in select"]
LOAD = ["train.py:10 in <module>", "train.py:41 in load_batch"]


def at(frames: list[str], place: str = "") -> wire.Stacks:
    return wire.Stacks(
        wire.Node("worker", 0, 1), 1, place or frames[-1], "", [["MainThread", frames], ["other", FETCH]]
    )


def looks(own: list[list[str]], other: list[list[str]], times: int = ENOUGH) -> PairedLooks:
    """At the frames of each list in turn."""
    seen = PairedLooks(1, 0)
    for number in range(times):
        seen.add(at(own[number % len(own)]), at(other[number % len(other)]))
    return seen


@pytest.mark.parametrize(
    ("frames", "doing"),
    [
        (FETCH, "input"),
        ([*FETCH, "torch/nn/modules/module.py:1 in __call__"], "input"),
        (BACKWARD, "compute"),
        ([*BACKWARD, "train.py:20 in backward"], "compute"),
        ([*BACKWARD, "workers/trainer/overlap.py:3 in hook", *PUSH[1:]], "waits"),
        (PUSH, "waits"),
        (LOAD, "else"),
        ([], "else"),
    ],
)
def test_frames_say_what_a_worker_does(frames: list[str], doing: str):
    assert doing_of(at(frames, "somewhere")) == doing


def test_what_takes_it_longer_than_the_other_is_the_cause():
    assert looks([BACKWARD, BACKWARD, FETCH], [BACKWARD, BACKWARD, PUSH]).cause == "input"
    assert looks([BACKWARD], [BACKWARD, BACKWARD, PUSH]).cause == "compute"
    assert looks([FETCH, BACKWARD, BACKWARD], [FETCH, BACKWARD, PUSH]).cause == "compute"


def test_a_line_of_the_program_is_named_and_is_no_cause():
    seen = looks([LOAD, BACKWARD], [PUSH, BACKWARD])
    assert seen.cause == ""
    assert seen.words == "10 of 20 looks found it at train.py:41 in load_batch"
    assert looks([LOAD, LOAD], [LOAD, BACKWARD]).words == (
        "20 of 20 looks found it at train.py:41 in load_batch, and 10 found worker 0 there"
    )


def test_few_looks_and_equal_ones_say_nothing():
    few = looks([BACKWARD], [PUSH], ENOUGH - 1)
    assert (few.cause, few.words) == ("", "")
    alike = looks([BACKWARD, PUSH], [BACKWARD, PUSH])
    assert (alike.cause, alike.words) == ("", "")
