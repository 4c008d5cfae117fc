"""Who runs where, by hostfiles."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.hosts.hostfile import Host
from launcher.hosts.placement import place
from launcher.job.cluster import PLACEMENTS, Cluster
from launcher.job.description import Job

A, B, C = Host("a", slots=2), Host("b", slots=1), Host("c", slots=4)


X, Y, Z = Host("x"), Host("y"), Host("z")


def job(workers: int, servers: int = 1, policy: str = "fill", replicas: int = 0) -> Job:
    return Job(workers, servers, ("x",), cluster=Cluster(placement=policy, replicas=replicas))


def shown(placed: dict[Host, list[tuple[str, int]]]) -> dict[str, str]:
    return {
        host.name: " ".join(f"{role.removeprefix('stand')[0]}{rank}" for role, rank in members)
        for host, members in placed.items()
    }


def test_hosts_are_filled_in_their_order() -> None:
    assert shown(place(job(4, 2), [A, B, C])) == {"a": "s0 w0 w1", "b": "s1 w2", "c": "w3"}
    assert shown(place(job(2, 3), [A, B, C])) == {"a": "s0 s1 s2 w0 w1"}


def test_or_taken_in_turn() -> None:
    assert shown(place(job(4, 4, "round-robin"), [A, B, C])) == {"a": "s0 s3 w0 w3", "b": "s1 w1", "c": "s2 w2"}
    assert shown(place(job(7, 1, "round-robin"), [A, B, C])) == {"a": "s0 w0 w3", "b": "w1", "c": "w2 w4 w5 w6"}


def test_hosts_that_say_nothing_share_evenly() -> None:
    assert shown(place(job(5), [X, Y, Z])) == {"x": "s0 w0 w1", "y": "w2 w3", "z": "w4"}
    assert shown(place(job(5, 1, "round-robin"), [X, Y, Z])) == {"x": "s0 w0 w3", "y": "w1 w4", "z": "w2"}


def test_what_hosts_with_slots_do_not_take_the_others_share() -> None:
    assert shown(place(job(5), [X, A, Y])) == {"x": "s0 w0 w1", "a": "w2 w3", "y": "w4"}
    assert shown(place(job(2), [X, A, Y])) == {"a": "s0 w0 w1"}


def test_servers_with_hosts_of_their_own() -> None:
    assert shown(place(job(2, 3), [A], [X, Y])) == {"a": "w0 w1", "x": "s0 s1", "y": "s2"}
    assert shown(place(job(2, 1, "round-robin"), [A, C], [A])) == {"a": "s0 w0", "c": "w1"}


def test_a_standby_is_on_another_host_than_its_server() -> None:
    assert shown(place(job(4, 2, replicas=1), [A, B, C])) == {"a": "s0 w0 w1", "b": "s1 b0 w2", "c": "b1 w3"}
    assert shown(place(job(4, 1, replicas=1), [A, B, C])) == {"a": "s0 w0 w1", "b": "b0 w2", "c": "w3"}
    assert shown(place(job(1, 2, replicas=1), [A], [X, Y, Z])) == {"a": "w0", "x": "s0", "y": "s1 b0", "z": "b1"}
    assert shown(place(job(2, 4, replicas=1), [X, Y])) == {"x": "s0 s2 b1 b3 w0", "y": "s1 s3 b0 b2 w1"}


def test_unless_there_is_only_one() -> None:
    assert shown(place(job(2, 2, replicas=1), [A, B])) == {"a": "s0 s1 b0 b1 w0 w1"}
    assert shown(place(job(1, 1, replicas=1), [A], [B])) == {"a": "w0", "b": "s0 b0"}


def test_too_few_slots() -> None:
    with pytest.raises(LaunchError, match="4 workers do not fit into 3 slots on 2 hosts; add hosts, or raise slots=N"):
        place(job(4), [A, B])
    with pytest.raises(LaunchError, match="3 servers do not fit into 2 slots on 1 hosts"):
        place(job(1, 3), [X], [A])


HOSTS = st.lists(st.builds(Host, st.sampled_from("abcdefgh"), slots=st.none() | st.integers(1, 6)), min_size=1).map(
    lambda hosts: list({host.name: host for host in hosts}.values())
)


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(PLACEMENTS), HOSTS, st.none() | HOSTS)
def test_everybody_has_one_place_and_no_host_too_many(
    workers: int, servers: int, policy: str, hosts: list[Host], apart: list[Host] | None
) -> None:
    wanted = job(workers, servers, policy)
    try:
        placed = place(wanted, hosts, apart)
    except LaunchError:
        for there, count in ((hosts, workers), (apart, servers)):
            if there is not None and None not in (slots := [host.slots for host in there]) and sum(slots) < count:
                return
        raise
    assert placed == place(wanted, hosts, apart)
    everybody = Counter(member for members in placed.values() for member in members)
    assert everybody == Counter(
        [("worker", rank) for rank in range(workers)] + [("server", rank) for rank in range(servers)]
    )
    assert set(placed) <= {*hosts, *(apart or [])}
    for host, members in placed.items():
        roles = Counter(role for role, _ in members)
        limited = ["worker"] if apart is None else ["worker", "server"]
        assert members
        assert host.slots is None or all(roles[role] <= host.slots for role in limited)
        assert apart is not None or roles["worker"]
        assert members == sorted(members)
    silent = [Counter(role for role, _ in placed.get(host, []))["worker"] for host in hosts if host.slots is None]
    assert not silent or max(silent) - min(silent) <= 1 or policy == "fill"


def test_large_jobs_are_placed_at_once() -> None:
    hosts = [Host(f"n{number}") for number in range(1024)]
    placed = place(job(1024, 1024), hosts)
    assert all(members == [("server", n), ("worker", n)] for n, members in enumerate(placed.values()))
