"""Jobs whose servers have standbys, in virtual time: a server that dies changes no value, and no bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from simulation.runs import Plan, carry_out
from simulation.takeovers import CODED, judge

from servers.requests.ledger import Ledger, Verdict


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Deaths are what this is about: nobody needs to read of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "drop", "keep"])
def test_every_push_counts_once(mode: str) -> None:
    plan = Plan(0, mode, program="count")
    assert judge(plan, carry_out(plan)) == "exact"


@pytest.mark.parametrize("compression", CODED)
def test_a_seed_gives_the_same_bits_however_late_messages_are(compression: dict[str, Any] | None) -> None:
    plan = Plan(1, compression=compression, program="bits")
    assert judge(replace(plan, pause=("server 0", 80, 0.3)), carry_out(plan)) == "exact"


def test_a_push_that_counts_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Ledger.admit

    def admit(self: Ledger[Any], request: Any) -> Verdict:
        said = really(self, request)
        return Verdict.NEW if said is Verdict.REPEAT else said

    monkeypatch.setattr(Ledger, "admit", admit)
    plans = [Plan(seed, "async", replace(Plan(0).weather, repeat=0.2), program="count") for seed in range(3)]
    assert any(judge(plan, carry_out(plan)).startswith("wrong") for plan in plans)
