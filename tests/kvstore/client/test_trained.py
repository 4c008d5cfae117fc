"""A store as checkpoints see it: what is saved of it, and what it takes from the checkpoint that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for
from played_session import PlayedSession
from written import write

from kvstore.client.compression import Compressing, describe
from kvstore.client.entries import PushClocks
from kvstore.client.optimizing import Optimizing, StoredStates, described
from kvstore.client.plans import RowPlans
from kvstore.client.pushes import Pushes
from kvstore.client.requests import Joining, Requests
from kvstore.client.resuming import Resumed, TrainedStore
from kvstore.client.stored_tables import StoredTables
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.ticket import WaitLimits

SPEC = Spec((3,), "float32")


def trained(rule: Rule | None = None) -> TrainedStore:
    """The first store of each worker, with the keys "w" and "v"; "v" has been pushed twice."""
    rule = rule or Rule()
    session: Any = PlayedSession()
    clocks = PushClocks()
    clocks.grow(2)
    clocks.note(np.array([1]), np.array([2]), push=1)
    requests = Requests(session, 1, rule, WaitLimits(1.0, 1.0))
    entries = entries_for({"w": SPEC, "v": SPEC}, 2, 100)
    tables = StoredTables(requests, entries.tables)
    states = StoredStates(tables, entries, RowPlans(entries), clocks, lambda _, ids: np.empty((len(ids), 0)))
    optimizing = Optimizing(requests, states, "dist_sync")
    pushes = Pushes(requests, rule, clocks, optimizing, Joining(requests, clocks))
    return TrainedStore(1, entries, optimizing, pushes, tables)


def compressing(threshold: float) -> Compressing:
    compression = describe({"type": "2bit", "threshold": threshold})
    assert compression is not None
    return Compressing(compression)


class Part:
    """Stands for the checkpoint that is resumed: it has residuals of a store."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.asked: list[str] = []

    def part(self, name: str, shared: bool) -> Any:
        assert not shared
        self.asked.append(name)
        return self.state

    def shapes(self, ordinal: int) -> dict[str, tuple[int, ...]]:
        assert ordinal == 1
        return {"w": (3,)}


def test_workers_are_in_step_where_no_round_goes_on_without_one() -> None:
    assert trained().in_step
    assert not trained(Rule("sync", quorum=1)).in_step
    assert not trained(Rule("async")).in_step


def test_what_is_saved_stays_as_it_was_at_that_moment() -> None:
    store = trained()
    saved = store.saved()
    store.clocks.note(np.array([1]), np.array([3]), push=2)
    store.entries.add(entries_for({"late": SPEC}, 2, 100))
    assert (saved.ordinal, saved.mode, list(saved.entries), saved.clocks) == (1, "sync", ["w", "v"], [0, 2])
    assert store.rounds == 3


def test_values_are_the_checkpoints_and_states_are_given_once_there_is_an_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = trained()
    states = {("w", "momentum_buffer"): torch.full((3,), 4.0)}
    resumed = Resumed(write(tmp_path, 3, {"w": torch.ones(3)}, states), 0, 2)
    values = store.first_values(resumed, ["w", "v"], [SPEC] * 2, [torch.zeros(3)] * 2)
    assert [value.tolist() for value in values] == [[1] * 3, [0] * 3]
    assert f"{resumed} does not have 'v': what init was given is used" in caplog.text
    store.give_states(resumed, store.entries)
    assert list(store.restored) == ["w"]
    store.optimizing.set(described("sgd", {"learning_rate": 0.1, "momentum": 0.9}, store.entries))
    given = []
    store.optimizing.restore = lambda *args: given.append(args[:2])  # type: ignore[method-assign]
    store.give_states(resumed, store.entries)
    store.give_states(resumed, store.entries)
    ((optimizer, restored),) = given
    assert optimizer == "sgd"
    assert restored["w", "momentum_buffer"].tolist() == [4] * 3
    assert not store.restored


def test_residuals_are_those_of_the_same_compression(caplog: pytest.LogCaptureFixture) -> None:
    store = trained()
    assert store.residuals() is None
    resumed: Any = Part(None)
    store.give_residuals(resumed)
    assert not store.has_residuals  # the compression may still be set
    store.pushes.compressing = compressing(0.5)
    assert store.compresses
    state = store.residuals()
    resumed = Part(state)
    store.give_residuals(resumed)
    assert resumed.asked == [store.residuals_name] == ["residuals.1"]
    assert store.has_residuals
    assert caplog.text == ""
    store.pushes.compressing = compressing(0.25)
    store.give_residuals(resumed)
    assert "the residuals of another compression are left out" in caplog.text
