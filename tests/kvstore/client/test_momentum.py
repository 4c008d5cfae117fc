"""Who sets a high momentum where gradients come late is told so, once, at the line that set it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.client.optimizing import advice
from kvstore.optim.optimizer import describe
from kvstore.rule import Rule
from workers import Trainer

ASYNC, SSP, SYNC = Rule("async"), Rule("async", staleness=3), Rule()
MUCH = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("rule", [ASYNC, SSP], ids=["async", "ssp"])
@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "momentum"),
    [
        ("sgd", MUCH, "0.9"),
        ("sgd", {"momentum": 0.5}, "0.5"),
        ("sgd", {"momentum": 0.9, "momentum_style": "mxnet"}, "0.9"),
        ("nag", {"learning_rate": 0.1}, "0.9"),
        ("sgd", {"groups": [{"keys": ["a"], "momentum": 0.8}], "momentum": 0.1}, "0.8"),
    ],
    ids=["sgd", "just enough", "MXNet's", "by default", "of a group"],
)
def test_a_high_momentum(rule: Rule, optimizer: str, hyperparameters: dict[str, Any], momentum: str) -> None:
    text = advice(describe(optimizer, hyperparameters), rule, "dist_x", 4)
    assert f"{optimizer} has momentum {momentum} in a 'dist_x' store of 4 workers" in text
    assert "momentum=0" in text


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "rule", "workers"),
    [
        ("sgd", MUCH, SYNC, 4),
        ("sgd", MUCH, Rule(quorum=2), 4),
        ("sgd", MUCH, ASYNC, 1),
        ("sgd", {"momentum": 0.3}, ASYNC, 4),
        ("sgd", {}, ASYNC, 4),
        ("adam", {}, ASYNC, 4),
        ("signum", {}, ASYNC, 4),
    ],
    ids=["sync", "quorum", "alone", "low", "none", "adam", "signum"],
)
def test_nothing_to_say(optimizer: str, hyperparameters: dict[str, Any], rule: Rule, workers: int) -> None:
    assert not advice(describe(optimizer, hyperparameters), rule, "dist_x", workers)


def test_one_worker_warns_at_the_callers_line() -> None:
    def work(session: Any) -> None:
        with DistStore(session, "dist_async", ASYNC) as store:
            store.set_optimizer("sgd", **MUCH)
        with DistStore(session, "dist_ssp", SSP) as store:
            Trainer([("w", torch.nn.Parameter(torch.zeros(2)))], "sgd", MUCH, kvstore=store)
        with DistStore(session) as store:
            store.set_optimizer("sgd", **MUCH)

    with ThreadedJob(2, 1) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.run_sessions(work)
    assert [(str(each.message).split(":")[0], each.filename, each.category) for each in caught] == [
        (f"sgd has momentum 0.9 in a {name!r} store of 2 workers", __file__, UserWarning)
        for name in ("dist_async", "dist_ssp")
    ]
