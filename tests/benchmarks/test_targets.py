from __future__ import annotations

import re

import pytest

from benchmarks.figures import Result, Row
from benchmarks.remote import SETTINGS
from benchmarks.suites import compression, exchange, grid, rows, training
from benchmarks.suites.memory import summary
from benchmarks.suites.network import add_limit
from benchmarks.targets import TARGETS, Target, judge


def result(ours: float, peer: float) -> Result:
    return Result("work", "", [Row("kvstore", [ours]), Row("mxnet", [peer])])


@pytest.mark.parametrize(("ours", "reached"), [(10.0, True), (9.0, True), (10.1, False)])
def test_a_target_is_a_ratio_of_two_rows(ours, reached):
    (verdict,) = judge([result(ours, 60.0)], [Target("work", "kvstore", "mxnet", 1 / 6)])
    assert verdict.to_json()["reached"] is reached
    assert verdict.to_json()["ratio"] == pytest.approx(ours / 60)


def test_what_was_not_measured_is_neither_reached_nor_missed():
    (verdict,) = judge([result(1.0, 2.0)], [Target("work", "kvstore", "gloo", 1.0)])
    assert (verdict.ratio, verdict.word, verdict.to_json()["reached"]) == (None, "not measured", None)
    assert judge([], TARGETS) == []


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1 / 6, "1/6 of "),
        (1 / 1.6, "1/1.6 of "),
        (1 / 1.5, "1/1.5 of "),
        (1.05, "1.05 × "),
        (0.65, "0.65 × "),
        (1.0, ""),
    ],
)
def test_a_target_in_words(factor, text):
    assert str(Target("work", "ours", "gloo", factor)) == f"work: ours ≤ {text}gloo"


def test_every_target_names_rows_that_there_will_be(session):
    """A name that is misspelt would be a target that nobody ever misses."""
    made = session("all")
    found: dict[str, set[str]] = {}
    made.measure = lambda case: found.update({case.name: {one.name for one in case.contenders}})
    for measurement in (exchange.pushpull, exchange.small, exchange.asynchronous, rows.rows, training.train):
        measurement(made)
    found |= {one.name: {row.name for row in one.rows} for one in summary([(0, [{"all": 1.0}])], 2.0)}
    for name in ("hosts-4", "hosts-4+4"):  # these need root to be asked
        found[name] = {"kvstore", f"kvstore, {SETTINGS['plain-one-thread'].label}", "gloo", "wire"}
    for target in TARGETS:
        if re.fullmatch(r"hosts-\d+x\d+-(resnet50|\d+MB)-\d+[mg]bit", target.result):
            ours = {"kvstore", *(f"kvstore, {setting.label}" for setting in SETTINGS.values())}
            found[target.result] = {*ours, *grid.PEERS}
    found |= {f"codecs-{way}": {compression.FLOOR, *compression.CODECS} for way in ("encode", "decode")}
    found["hosts-4-compressed"] = {compression.PLAIN, *compression.BOTH_WAYS}
    timed = [Row(name, [1.0]) for name in ("kvstore", "ddp", "alone", "alone, forward only", "wire")]
    hosts = Result("hosts-train", "", timed)
    add_limit(hosts)
    found[hosts.name] = {row.name for row in hosts.rows}
    for target in TARGETS:
        if target.result.startswith(("table-", "publish-")):  # tests of these suites measure them
            continue
        assert {target.row, target.peer} <= found[target.result], target
