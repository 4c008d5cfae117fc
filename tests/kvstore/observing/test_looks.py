"""What looks at a straggler and at another worker say."""

from __future__ import annotations

import pytest

from kvstore import wire
from kvstore.observing.straggler import ENOUGH, PairedLooks, doing_of

FETCH = ["train.py:9 in <module>", "torch/utils/data/dataloader.py:700 in __next__", "data.py:4 in __getitem__"]
BACKWARD = ["train.py:12 in <module>", "torch/autograd/graph.py:800 in _engine_run_backward"]
PUSH = ["train.py:14 in <module>", "kvstore/client/dist.py:200 in pushpull", "selectors.py:400 in select"]
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
