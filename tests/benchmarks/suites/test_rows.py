"""What the benchmark of rows measures, and with whom."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.contenders import Limit
from benchmarks.options import parse
from benchmarks.peers import Peers, default_cache
from benchmarks.suites.rows import EmbeddingSteps, MxnetRows, OurRows, RowWork, cases


def asked(*words: str) -> Any:
    options = parse(["rows", *words])
    return SimpleNamespace(options=options, peers=Peers(options.peers, default_cache()))


def test_each_case_has_ours_and_what_it_is_compared_with():
    found = {case.name: case for case in cases(asked("--rounds", "7", "-n", "3", "-s", "1"))}
    assert list(found) == ["rows-sgd", "rows-sgd-async", "rows-adam", "rows-many", "rows-tables", "rows-dlrm"]
    for case in found.values():
        assert {one.name for one in case.contenders} & {"kvstore", "26 tables"}
        for one in case.contenders:
            assert isinstance(one, OurRows | MxnetRows | Limit | EmbeddingSteps)
            if isinstance(one, OurRows | MxnetRows):
                assert (one.work.rounds, one.work.workers, one.work.servers) == (7, 3, 1)


@pytest.mark.parametrize(("peers", "kinds"), [("none", {OurRows}), ("mxnet", {OurRows, MxnetRows})])
def test_mxnet_takes_part_if_it_is_asked(peers: str, kinds: set[type]):
    first, *_ = cases(asked("--peers", peers))
    assert {type(one) for one in first.contenders} == kinds


def test_the_words_of_a_program():
    work = replace(RowWork(), batch=100, optimizer="adam", rounds=2)
    assert work.words == ["--batch", "100", "--rounds", "2", "--type", "dist_sync", "--optimizer", "adam"]
