"""Hostfiles: what a line may be, and that nothing else gets through."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from any_host import HOSTS
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.hosts.hostfile import Host, parse, place, read
from launcher.job.description import PLACEMENTS, Cluster, Job


def render(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return (
        (f"{host.user}@" if host.user else "")
        + name
        + (f":{host.port}" if host.port else "")
        + ("" if host.slots is None else f" slots={host.slots}")
    )


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host("node1")),
        ("node1 slots=4", Host("node1", slots=4)),
        ("node1\tslots=4  ", Host("node1", slots=4)),
        ("node1:4", Host("node1", slots=4)),
        ("node1:1023", Host("node1", slots=1023)),
        ("node1:1024", Host("node1", port=1024)),
        ("node1:22", Host("node1", port=22)),
        ("node1:2222 slots=4", Host("node1", port=2222, slots=4)),
        ("node1:8 slots=4", Host("node1", slots=4)),
        ("node1 slots=4 max_slots=8", Host("node1", slots=4)),
        ("node1 max-slots=8", Host("node1")),
        ("me@node1.example.com:65535", Host("node1.example.com", "me", 65535)),
        ("me+you-2@10.0.0.1", Host("10.0.0.1", "me+you-2")),
        ("fd00::1", Host("fd00::1")),
        ("[fd00::1]", Host("fd00::1")),
        ("[fd00::1]:2222", Host("fd00::1", port=2222)),
        ("[fd00::1]:2 # two", Host("fd00::1", slots=2)),
        ("me@[fe80::1%eth0]:22 slots=1", Host("fe80::1%eth0", "me", 22, 1)),
        ("::1", Host("::1")),
        ("gpu_7#slots=9", Host("gpu_7")),
    ],
)
def test_a_line(line: str, host: Host) -> None:
    assert parse([line]) == [host]


def test_comments_and_blank_lines_are_nothing() -> None:
    assert parse(["# all of them", "", "  ", "a  # the first", "#b", "\tc"]) == [Host("a"), Host("c")]


def test_the_slots_of_a_host_that_is_named_again_are_added_up() -> None:
    assert parse(["a", "b slots=2", "a", "b:3", "a"]) == [Host("a", slots=3), Host("b", slots=5)]
    assert parse(["a", "me@a", "a:22"]) == [Host("a"), Host("a", "me"), Host("a", port=22)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host name"),
        ("-oProxyCommand=x@node1", "'-oProxyCommand=x' is not a user name"),
        ("-l@node1", "'-l' is not a user name"),
        ("$(reboot)@node1", "'$(reboot)' is not a user name"),
        ("`x`@node1", "is not a user name"),
        ("a;b@node1", "is not a user name"),
        ("a\0b@node1", "is not a user name"),
        ("a\\@node1", "is not a user name"),
        ("me@-v", "'-v' is not a host name"),
        ("node1;reboot", "is not a host name"),
        ("$(reboot)", "is not a host name"),
        ("node1-", "is not a host name"),
        ("nöde", "is not a host name"),
        ("node1 -oProxyCommand=x", "'-oProxyCommand' is not an option of a host"),
        ("node1 sluts=4", "'sluts' is not an option of a host"),
        ("node1 node2", "is not a host"),
        ("me@you@node1", "is not a host"),
        ("@node1", "is not a host"),
        ("node1:", "is not a host"),
        ("node1:ssh", "is not a host"),
        ("[node1", "is not a host"),
        ("[-x]", "is not a host name"),
        ("fd00::1::2", "is not an IPv6 address"),
        ("[fd00::x]:22", "is not an IPv6 address"),
        ("[fe80::1%$(reboot)]", "is not an IPv6 address"),
        ("[fe80::1%\0]", "is not an IPv6 address"),
        ("[fe80::1%]", "is not an IPv6 address"),
        ("node1:65536", "port 65536 is out of range: 1 to 65535"),
        ("node1:0", "slots=0 is out of range: 1 to 1024"),
        ("node1 slots=0", "slots=0 is out of range: 1 to 1024"),
        ("node1 slots=1025", "slots=1025 is out of range: 1 to 1024"),
        (f"node1 slots={'9' * 5000}", "is out of range: 1 to 1024"),
        ("node1 slots=", "slots= is not a number"),
        ("node1 slots=four", "slots=four is not a number"),
        ("node1 slots=-1", "slots=-1 is not a number"),
        ("node1 slots=²", "is not a number"),
    ],
)
def test_a_line_that_is_refused_is_named_with_its_file(line: str, why: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(["node0", "", line], "my-hosts")
    assert str(caught.value).startswith("my-hosts, line 3: ")
    assert why in str(caught.value)
    assert "node1 slots=4" in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["", "# node1"]])
def test_no_host_at_all(lines: list[str]) -> None:
    with pytest.raises(LaunchError, match="my-hosts names no host"):
        parse(lines, "my-hosts")


@given(st.lists(st.text(max_size=30) | st.from_regex(r"[-a-z@:\[\]%0-9 =#$]{0,30}", fullmatch=True), max_size=5))
@example(["x@y slots=1 slots=2"])
def test_whatever_the_text_it_is_hosts_or_a_launch_error(lines: list[str]) -> None:
    try:
        hosts = parse(lines)
    except LaunchError:
        return
    assert hosts
    for host in hosts:
        for word in (host.name, host.user):
            assert not word.startswith("-")
            assert not set("\0\n '\"`;&<>|(){}").intersection(word)
        assert host.slots is None or host.slots >= 1


@given(HOSTS)
def test_a_host_that_is_written_down_is_read_again(host: Host) -> None:
    assert parse([render(host)]) == [host]


@given(st.lists(HOSTS, min_size=1, max_size=8))
def test_every_host_once_and_no_slot_lost(hosts: list[Host]) -> None:
    found = parse(map(render, hosts))
    keys = [(host.user, host.name, host.port) for host in found]
    assert keys == list(dict.fromkeys((host.user, host.name, host.port) for host in hosts))
    if len(found) == len(hosts):
        assert found == hosts
    else:
        assert sum(host.slots or 1 for host in found) == sum(host.slots or 1 for host in hosts)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\nb:2  # zwei Plätze\n")
    assert read(str(path)) == [Host("a"), Host("b", slots=2)]
    path.write_text("a\n-x\n")
    with pytest.raises(LaunchError, match=rf"^{path}, line 2: '-x' is not a host name"):
        read(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot read the hostfile .*/none: No such file"):
        read(str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"cannot read the hostfile .*: Is a directory"):
        read(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(LaunchError, match=r"cannot read the hostfile .*/binary: 'utf-8' codec"):
        read(str(tmp_path / "binary"))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_this_machine_needs_no_ssh(name: str) -> None:
    assert Host(name).here
    assert not Host(name, port=2222).here
    assert not Host(name, user="me").here
    assert not Host("node1").here


A, B, C = Host("a", slots=2), Host("b", slots=1), Host("c", slots=4)


X, Y, Z = Host("x"), Host("y"), Host("z")


def job(workers: int, servers: int = 1, policy: str = "fill", replicas: int = 0) -> Job:
    return Job(workers, servers, ("x",), cluster=Cluster(placement=policy, replicas=replicas))


def shown(placed: dict[Host, list[tuple[str, int]]]) -> dict[str, str]:
    return {
        host.name: " ".join(f"{role.removeprefix('stand')[0]}{rank}" for role, rank in members)
        for host, members in placed.items()
    }


@pytest.mark.parametrize(
    ("job", "hosts", "expected"),
    [
        # Hosts are filled in their order,
        (job(4, 2), [[A, B, C]], {"a": "s0 w0 w1", "b": "s1 w2", "c": "w3"}),
        (job(2, 3), [[A, B, C]], {"a": "s0 s1 s2 w0 w1"}),
        # or taken in turn.
        (job(4, 4, "round-robin"), [[A, B, C]], {"a": "s0 s3 w0 w3", "b": "s1 w1", "c": "s2 w2"}),
        (job(7, 1, "round-robin"), [[A, B, C]], {"a": "s0 w0 w3", "b": "w1", "c": "w2 w4 w5 w6"}),
        # Hosts that say nothing share evenly,
        (job(5), [[X, Y, Z]], {"x": "s0 w0 w1", "y": "w2 w3", "z": "w4"}),
        (job(5, 1, "round-robin"), [[X, Y, Z]], {"x": "s0 w0 w3", "y": "w1 w4", "z": "w2"}),
        # and what hosts with slots do not take.
        (job(5), [[X, A, Y]], {"x": "s0 w0 w1", "a": "w2 w3", "y": "w4"}),
        (job(2), [[X, A, Y]], {"a": "s0 w0 w1"}),
        # Servers with hosts of their own
        (job(2, 3), [[A], [X, Y]], {"a": "w0 w1", "x": "s0 s1", "y": "s2"}),
        (job(2, 1, "round-robin"), [[A, C], [A]], {"a": "s0 w0", "c": "w1"}),
        # A standby is on another host than its server,
        (job(4, 2, replicas=1), [[A, B, C]], {"a": "s0 w0 w1", "b": "s1 b0 w2", "c": "b1 w3"}),
        (job(4, 1, replicas=1), [[A, B, C]], {"a": "s0 w0 w1", "b": "b0 w2", "c": "w3"}),
        (job(1, 2, replicas=1), [[A], [X, Y, Z]], {"a": "w0", "x": "s0", "y": "s1 b0", "z": "b1"}),
        (job(2, 4, replicas=1), [[X, Y]], {"x": "s0 s2 b1 b3 w0", "y": "s1 s3 b0 b2 w1"}),
        # unless there is only one.
        (job(2, 2, replicas=1), [[A, B]], {"a": "s0 s1 b0 b1 w0 w1"}),
        (job(1, 1, replicas=1), [[A], [B]], {"a": "w0", "b": "s0 b0"}),
    ],
)
def test_where_members_are_placed(job: Job, hosts: list[list[Host]], expected: dict[str, str]) -> None:
    assert shown(place(job, *hosts)) == expected


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
