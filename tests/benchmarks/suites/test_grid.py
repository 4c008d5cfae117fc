"""Rounds on hosts with many workers."""

from __future__ import annotations

import contextlib

import pytest
from places import HOSTS

from benchmarks.figures import Result, Row
from benchmarks.jobs import JobFailed
from benchmarks.ssh import Ssh
from benchmarks.suites import grid as grid_module
from benchmarks.suites.grid import Crossing, Grid, grid


class Sender:
    def __init__(self, name, sent):
        self.name = name
        self.sent = []
        self._next = list(sent)

    def run(self):
        self.sent.append(self._next.pop(0))
        return {self.name: [400.0]}


@pytest.mark.parametrize(("megabytes", "crossed"), [(0.3, False), (2.9, True), (40.0, True)])
def test_what_did_not_cross_the_wire_is_no_measurement(megabytes, crossed):
    crossing = Crossing(Sender("kvstore", [megabytes * 1e6]), 10e6)
    if crossed:
        assert crossing.run() == {"kvstore": [400.0]}
    else:
        with pytest.raises(JobFailed, match=r"a host sent 0\.3 MB a round, and its part is 10\.0: the hosts are not"):
            crossing.run()


def test_each_number_of_workers_is_measured_on_the_same_hosts(monkeypatch, session, tmp_path):
    made, cases = [], []

    @contextlib.contextmanager
    def pretend(count, rate, mtu):
        made.append((count, rate, mtu))
        yield HOSTS[:count]

    @contextlib.contextmanager
    def logged(places):
        yield Ssh(places, tmp_path)

    def measure(case):
        cases.append(case)
        return Result(case.name, case.title, [Row("kvstore", [1.0])])

    monkeypatch.setattr(grid_module, "hosts", pretend)
    monkeypatch.setattr(grid_module, "logins", logged)
    chosen = session("network", "--peers", "gloo,openmpi", "--mtu", "9000")
    chosen.measure = measure
    grid(chosen, Grid((2,), (1, 4), also=("flat",)))
    assert made == [(2, "200mbit", 9000)]
    assert [case.name for case in cases] == ["hosts-2x1-10MB-200mbit", "hosts-2x4-10MB-200mbit"]
    names = [contender.name for contender in cases[1].contenders]
    assert names == ["kvstore", "kvstore, no host aggregation", "gloo", "openmpi", "wire"]
    ours, _, gloo, _, wire = cases[1].contenders
    assert (ours.sender.work.workers, ours.sender.work.servers) == (8, 2)
    assert [place.namespace for place in gloo.sender.places] == ["host1"] * 4 + ["host2"] * 4
    assert wire.ms == pytest.approx(400)
    assert "10.0 MB, 2·M·(n-1)/n, from each host" in cases[1].title
    assert chosen.curves[0].lines == {"kvstore": [(1.0, 1.0), (4.0, 1.0)]}
