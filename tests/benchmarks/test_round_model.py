"""The model of a round: what bounds it, that it is near what was measured, and that the page has what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.round_model import MEASURED, Cluster, Constants, predict, tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
FAST = Constants(0.0, 0.0, 1e15, 1e15, 1e15, 1e15, 1e15)  # processors that cost nothing


@pytest.mark.parametrize("name", [name for name, _, _ in MEASURED])
def test_it_is_near_what_was_measured(name: str) -> None:
    cluster, measured = next((cluster, ms) for other, cluster, ms in MEASURED if other == name)
    assert 1e3 * predict(cluster).round_s == pytest.approx(measured, rel=0.11)


def test_with_fast_processors_lines_are_the_limit() -> None:
    beside = Cluster(4, 1, 4, 1e9, 100e6, beside=True)
    assert predict(beside, FAST).round_s == pytest.approx(1.046 * 1.5 * 0.8)
    apart = predict(replace(beside, beside=False), FAST)
    assert apart.round_s - apart.fill_s == pytest.approx(1.046 * 0.8)
    few = predict(replace(beside, beside=False, servers=2), FAST)
    assert few.bottleneck == "server's line"
    assert few.round_s - few.fill_s == pytest.approx(1.046 * 1.6)


def test_without_aggregation_each_worker_of_a_host_costs_as_much_as_a_host() -> None:
    flat = Cluster(8, 4, 8, 1e9, beside=True, aggregated=False)
    assert predict(flat, FAST).round_s == pytest.approx(4 * predict(replace(flat, aggregated=True), FAST).round_s)


def test_what_is_compressed_crosses_lines_in_less_time() -> None:
    plain = Cluster(8, 1, 8, 1e9, beside=True)
    half = replace(plain, up=2, down=2)
    assert predict(half, FAST).round_s == pytest.approx(predict(plain, FAST).round_s / 2)
    assert predict(half).parts["server's thread"] < predict(plain).parts["server's thread"]


def test_slow_encryption_and_slow_messages_are_named() -> None:
    cluster = Cluster(8, 4, 2, 100e9, encrypted=True)
    assert predict(cluster, replace(FAST, curve=1e6)).bottleneck == "server's encryption"
    assert predict(cluster, replace(FAST, message_s=1.0)).bottleneck == "server's thread"
    many = replace(cluster, servers=512)
    assert predict(many, replace(FAST, message_s=1.0)).bottleneck == "aggregator's thread"


def test_hosts_that_share_cores_wait_for_them() -> None:
    cluster = Cluster(4, 1, 4, 100e9, beside=True, cores=2)
    assert predict(cluster).bottleneck == "shared cores"
    assert predict(replace(cluster, cores=1)).round_s == pytest.approx(2 * predict(cluster).round_s)


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [line for line in tables() if line not in page]
    assert not missing, "put what `python -m benchmarks.round_model` prints into docs/scaling.md"
