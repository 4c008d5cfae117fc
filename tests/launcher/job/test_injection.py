"""What `--inject` takes, and what it says of the rest."""

from __future__ import annotations

import signal

import pytest

from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job
from launcher.job.injection import Injection


@pytest.mark.parametrize(
    ("text", "injection", "shown"),
    [
        (
            "kill:server:1@round:100",
            Injection("kill", "server", 1, round=100),
            "SIGKILL for server 1, at its round 100",
        ),
        (
            "stop:standby:0@10s",
            Injection("stop", "standby", 0, after_s=10),
            "SIGSTOP for the standby of server 0, 10 s after the start",
        ),
        (
            "cont:worker:12@0.25s",
            Injection("cont", "worker", 12, after_s=0.25),
            "SIGCONT for worker 12, 0.25 s after the start",
        ),
        (
            "kill:scheduler@5s",
            Injection("kill", "scheduler", 0, after_s=5),
            "SIGKILL for scheduler, 5 s after the start",
        ),
    ],
)
def test_a_fault_is_who_what_and_when(text: str, injection: Injection, shown: str) -> None:
    assert Injection.parse(text) == injection
    assert str(injection) == shown
    assert injection.member == (injection.role, injection.rank)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected ACTION:ROLE:RANK@WHEN, such as kill:server:1@round:100"),
        ("kill:server:1", "expected ACTION:ROLE:RANK@WHEN"),
        ("kill:server:1@10", "expected ACTION"),
        ("kill:server:1@round:0", "expected ACTION"),
        ("kill:server:-1@10s", "expected ACTION"),
        ("kill:server:1@10s ", "expected ACTION"),
        ("term:server:1@10s", "there is no action term; valid: kill, stop, cont"),
        ("kill:aggregator:1@10s", "there is no role aggregator; valid: scheduler, server, standby, worker"),
        ("kill:server@10s", "a server has a rank"),
        ("kill:scheduler:0@10s", "a scheduler has no rank"),
        ("kill:worker:0@round:3", "a worker counts no rounds; give a time, such as kill:worker:0@10s"),
        ("kill:scheduler@round:3", "a scheduler counts no rounds; give a time, such as kill:scheduler@10s"),
        ("cont:server:0@round:3", "a stopped process sees no round; give a time, such as cont:server:0@10s"),
    ],
)
def test_what_makes_no_sense_is_an_error(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Injection.parse(text)
    assert str(caught.value).startswith(f"--inject {text}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("member", ["server:2", "standby:0", "worker:1"])
def test_the_member_must_be_there(member: str) -> None:
    with pytest.raises(LaunchError, match="no such member; it has 1 workers, 2 servers and 0 standbys"):
        Job(1, 2, ("x",), cluster=Cluster(inject=(f"kill:{member}@1s",)))
    assert Job(2, 3, ("x",), cluster=Cluster(replicas=1, inject=(f"kill:{member}@1s",))).injections


def test_actions_are_signals() -> None:
    signals = [Injection.parse(f"{action}:scheduler@1s").signal for action in ("kill", "stop", "cont")]
    assert signals == [signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT]
