"""Measurements across hosts."""

from __future__ import annotations

import os

import pytest
from places import HOSTS

from benchmarks.hosts import hosts
from benchmarks.jobs import JobFailed, Unavailable
from benchmarks.suites import network as network_module
from benchmarks.suites.network import Counted, network


def test_hosts_need_root_and_say_so(monkeypatch, session):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"), hosts(2):
        pass
    made = session("network")
    network(made)
    assert "network: skipped: hosts are network namespaces, which need root" in made.console.file.getvalue()
    assert not made.results
    assert not made.failures


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
