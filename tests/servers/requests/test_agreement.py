from __future__ import annotations

import pytest

from kvstore.errors import Mismatch
from servers.store.optimizer_agreement import Agreement


@pytest.fixture
def acts() -> list[str]:
    return []


@pytest.fixture
def agreement() -> Agreement[str, str]:
    return Agreement("the call")


def test_rank_0s_call_acts_once_and_answers_those_who_waited(agreement, acts):
    assert agreement.propose(1, "a", "w1") == []
    assert agreement.propose(1, "a", "w2") == []
    assert agreement.waiting == ["w1", "w2"]
    assert agreement.decide(1, "a", "w0", acts.append) == [("w0", None), ("w1", None), ("w2", None)]
    assert acts == ["a"]
    assert agreement.waiting == []


def test_who_calls_after_rank_0_is_answered_at_once(agreement, acts):
    agreement.decide(1, "a", "w0", acts.append)
    assert agreement.propose(1, "a", "w1") == [("w1", None)]
    assert acts == ["a"]


@pytest.mark.parametrize("early", [True, False])
def test_who_says_something_else_learns_both_sides(agreement, acts, early):
    outcomes = agreement.propose(1, "b", "w1") if early else []
    outcomes += agreement.decide(1, "a", "w0", acts.append)
    outcomes += [] if early else agreement.propose(1, "b", "w1")
    results = dict(outcomes)
    assert results["w0"] is None
    assert isinstance(results["w1"], Mismatch)
    assert str(results["w1"]) == "the call differs from worker 0's: b here, a there"


def test_an_action_that_fails_fails_for_all_who_agreed(agreement):
    def act(_proposal: str) -> None:
        raise ValueError("no")

    agreement.propose(1, "a", "w1")
    agreement.propose(1, "b", "w2")
    results = dict(agreement.decide(1, "a", "w0", act)) | dict(agreement.propose(1, "a", "w3"))
    assert [str(results[who]) for who in ("w0", "w1", "w3")] == ["no"] * 3
    assert isinstance(results["w2"], Mismatch)


def test_the_nth_call_meets_the_nth(agreement, acts):
    assert agreement.propose(2, "b", "w1") == []
    assert agreement.decide(1, "a", "w0", acts.append) == [("w0", None)]
    assert agreement.waiting == ["w1"]
    assert agreement.decide(2, "b", "w0", acts.append) == [("w0", None), ("w1", None)]
    assert acts == ["a", "b"]


def test_who_waits_in_vain_is_let_go(agreement, acts):
    agreement.propose(1, "a", "w1")
    agreement.propose(2, "a", "w2")
    assert agreement.abandon() == ["w1", "w2"]
    assert agreement.abandon() == []
    assert agreement.decide(1, "a", "w0", acts.append) == [("w0", None)]
