"""Contenders that are not ours."""

from __future__ import annotations

from places import HOSTS

from benchmarks.contenders import ranks
from benchmarks.jobs import HERE


def test_ranks_of_gloo_know_their_interface_where_they_are_in_a_host():
    made = ranks(["sum"], [HERE, HOSTS[0]])
    assert made[0].env == {"RANK": "0", "WORLD_SIZE": "2"}
    assert made[1].env == {"RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
