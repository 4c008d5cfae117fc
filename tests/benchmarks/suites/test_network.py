"""Measurements across hosts, and what the wire allows."""

from __future__ import annotations

import os

import pytest
from places import HOSTS

from benchmarks.contenders import Limit
from benchmarks.figures import Result, Row
from benchmarks.hosts import hosts
from benchmarks.jobs import JobFailed, Unavailable
from benchmarks.suites import network as network_module
from benchmarks.suites.network import Counted, add_limit, network, wire_ms


def test_hosts_need_root_and_say_so(monkeypatch, session):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"), hosts(2):
        pass
    made = session("network")
    network(made)
    assert "network: skipped: hosts are network namespaces, which need root" in made.console.file.getvalue()
    assert not made.results
    assert not made.failures


def test_what_the_wire_allows():
    assert wire_ms(102_228_128, 4, servers_apart=False) == pytest.approx(1227, abs=1)
    assert wire_ms(102_228_128, 4, servers_apart=True) == pytest.approx(818, abs=1)


def test_the_limit_of_a_step_across_hosts():
    rows = [Row("kvstore", [500.0]), Row("alone", [300.0]), Row("alone, forward only", [100.0]), Row("wire", [400.0])]
    result = Result("hosts-train", "", rows)
    add_limit(result)
    assert result.row("limit").median == pytest.approx(1.1 * 400 + 100)
    assert Limit("wire", 818.0).run() == {"wire": [818.0]}


@pytest.mark.parametrize(("megabytes", "crossed"), [(3, False), (154 * 7, True)])
def test_what_did_not_cross_the_wire_is_no_measurement(monkeypatch, fake, megabytes, crossed):
    """Shared memory between hosts that are one machine once gave a fifth of what the wire allows."""
    counters = iter([1000, 1000 + megabytes * 10**6])
    monkeypatch.setattr(network_module, "sent", lambda host: next(counters))
    counted = Counted(fake("kvstore", [245.0]), HOSTS[0], rounds=4, nbytes=153e6)
    if crossed:
        assert counted.run() == {"kvstore": [245.0]}
        assert counted.note == "a worker's host sent 154 MB a round, what goes before the first included"
    else:
        with pytest.raises(JobFailed, match="sent 3 MB, and must have sent 536 at the very least"):
            counted.run()
