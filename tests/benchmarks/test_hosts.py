"""Hosts that are network namespaces; the facts about a machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cluster.missing import need

from benchmarks import hosts as hosts_module
from benchmarks.hosts import INTERFACE, hosts, limit, line, require
from benchmarks.jobs import Unavailable
from benchmarks.machine import facts


def test_hosts_need_iproute2_and_say_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: None)
    with pytest.raises(
        Unavailable,
        match=r"ip and tc and mount and unshare and hostname; on Debian .* iproute2",
    ):
        require()


def test_hosts_are_removed_when_making_them_fails(monkeypatch):
    said = []

    def pretend(*words):
        said.append(words)
        if words[0] == "tc":
            raise Unavailable("no tbf")
        return ""

    monkeypatch.setattr(hosts_module, "require", lambda: None)
    monkeypatch.setattr(hosts_module, "run", pretend)
    with pytest.raises(Unavailable, match="no tbf"), hosts(2):
        pass
    added = {words[3] for words in said if words[:3] == ("ip", "netns", "add")}
    removed = {words[3] for words in said if words[:3] == ("ip", "netns", "del")}
    assert len(added) == 2
    assert added <= removed


def test_lines_in_words():
    assert line("1gbit") == "1gbit"
    assert line("1gbit", 9000) == "1gbit, packets of 9,000 bytes"


@pytest.mark.parametrize(("rate", "burst"), [("1gbit", 500_000), ("200mbit", 100_000), ("1mbit", 80_000)])
def test_a_line_saves_up_a_few_milliseconds_and_a_packet_at_least(rate, burst):
    assert limit(rate) == ["rate", rate, "burst", str(burst), "latency", "100ms"]


@pytest.mark.long
def test_hosts_are_as_they_should_be_share_no_memory_and_leave_nothing_behind():
    need("ip", "tc")
    try:
        with hosts(2, mtu=9000) as (one, other):
            for host in (one, other):
                words = host.wrap(["cat", f"/sys/class/net/{INTERFACE}/mtu"])
                assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "9000\n"
                named = subprocess.run(host.wrap(["hostname"]), check=True, capture_output=True, text=True).stdout
                assert named.strip() == host.namespace
            subprocess.run(one.wrap(["touch", "/dev/shm/mine"]), check=True)
            assert subprocess.run(one.wrap(["test", "-e", "/dev/shm/mine"]), check=False).returncode == 0
            assert subprocess.run(other.wrap(["test", "-e", "/dev/shm/mine"]), check=False).returncode == 1
            assert not Path("/dev/shm/mine").exists()
    except Unavailable as error:
        pytest.skip(str(error))
    assert not Path(one.shm).exists()
    assert (
        one.namespace not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )


def test_the_machines_facts():
    found = facts()
    assert found["torch"].startswith("2.")
    assert int(found["cores"]) >= 1
    assert all(found.values())
