"""Measurements across hosts."""

from __future__ import annotations

import os

import pytest
from places import HOSTS

from benchmarks.contenders import Limit
from benchmarks.figures import Result, Row
from benchmarks.hosts import hosts
from benchmarks.jobs import JobFailed, Unavailable
from benchmarks.suites import network as network_module
from benchmarks.suites.grid import Grid
from benchmarks.suites.network import Counted, add_limit, network


def test_hosts_need_root_and_say_so(monkeypatch, session):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"), hosts(2):
        pass
    made = session("network")
    network(made)
    assert "network: skipped: hosts are network namespaces, which need root" in made.console.file.getvalue()
    assert not made.results
    assert not made.failures


def test_options_that_say_which_hosts_to_make_ask_for_rounds_on_those_alone(monkeypatch, session):
    made = []
    monkeypatch.setattr(network_module, "require", lambda: None)
    monkeypatch.setattr(network_module.ssh, "require", lambda: None)
    monkeypatch.setattr(network_module, "grid", lambda session, chosen: made.append(chosen))
    network(session("network", "--hosts", "2,4", "--workers-per-host", "1,8", "--rate", "1gbit", "--net", "resnet50"))
    assert made == [Grid((2, 4), (1, 8), "1gbit", "resnet50", ())]


def test_hosts_need_openssh_and_say_so(monkeypatch, session):
    def lacking():
        raise Unavailable("jobs over ssh need sshd")

    made = session("network", "--hosts", "2")
    monkeypatch.setattr(network_module, "require", lambda: None)
    monkeypatch.setattr(network_module.ssh, "require", lacking)
    network(made)
    assert "network: skipped: jobs over ssh need sshd" in made.console.file.getvalue()
    assert not made.failures


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
