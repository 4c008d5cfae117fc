"""What may be asked for."""

from __future__ import annotations

import signal
from dataclasses import fields

import pytest
from every_option import VALUES

from launcher.errors import LaunchError
from launcher.job.description import MAX_PER_ROLE, Cluster, Injection, Job, OutputOptions, parse_ranks
from launcher.job.tasks import HostEnvironment, Rendezvous, render

AT = Rendezvous(uri="ipc:///t/scheduler", port=0, mark="kvstore-0-1-x")


def test_what_is_given_is_what_is_not_at_its_default() -> None:
    assert {field.name for field in fields(Cluster)} == set(VALUES)
    assert Cluster().given() == []
    assert Cluster(**VALUES).given() == list(VALUES)
    for field, value in VALUES.items():
        assert Cluster(**{field: value}).given() == [field]


def job(**options: object) -> Job:
    return Job(**{"num_workers": 2, "num_servers": 1, "command": ("python", "train.py"), **options})  # type: ignore[arg-type]


def test_nothing_that_is_printed_shows_a_value() -> None:
    secret = job(env_server={"A": "hunter2"}, env_worker={"B": "hunter2"})
    around = HostEnvironment(environ={"C": "hunter2"}, python="/py", cores=1)
    assert "hunter2" not in repr((secret, around, render(secret, AT, around)))


@pytest.mark.parametrize("count", [0, -1, MAX_PER_ROLE + 1])
@pytest.mark.parametrize("what", ["workers", "servers"])
def test_the_counts_have_bounds(what: str, count: int) -> None:
    with pytest.raises(LaunchError, match=f"{count} {what} are not possible; valid: 1 to {MAX_PER_ROLE}"):
        job(**{f"num_{what}": count})


@pytest.mark.parametrize("command", [(), ("",), (" ", "")])
def test_a_job_has_a_command(command: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match="command is missing"):
        job(command=command)


@pytest.mark.parametrize("option", ["env_server", "env_worker"])
def test_the_contract_cannot_be_overridden(option: str) -> None:
    with pytest.raises(LaunchError, match="cannot set DMLC_ROLE") as caught:
        job(**{option: {"DMLC_ROLE": "hunter2"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", None),
        ("none", ()),
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("3,1,1-2", (1, 2, 3)),
        ("007", (7,)),
        ("5-5", (5,)),
    ],
)
def test_ranks(text: str, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a rank"),
        ("0,", "'' is not a rank"),
        ("-1", "'-1' is not a rank"),
        ("1-", "'1-' is not a rank"),
        ("a", "'a' is not a rank"),
        ("0 1", "'0 1' is not a rank"),
        ("²", "'²' is not a rank"),
        ("0,none", "'none' is not a rank"),
        ("3-1", "3-1 ends before it begins"),
        ("0-999999999", "0-999999999 are too many workers"),
        ("9" * 5000, "is not a rank"),
    ],
)
def test_what_names_no_ranks(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; valid: all, none, or ranks of workers such as 0, 0,2 or 0,4-7"):
        parse_ranks(text)


@pytest.mark.parametrize(("workers", "valid"), [(1, "the workers' rank is 0"), (4, "the workers' ranks are 0 to 3")])
def test_a_job_has_the_workers_that_are_to_be_shown(workers: int, valid: str) -> None:
    Job(workers, 1, ("x",), output=OutputOptions(show=(0,)))
    with pytest.raises(LaunchError, match=f"--show 4: there is no worker 4; {valid}"):
        Job(workers, 1, ("x",), output=OutputOptions(show=(0, 4, 5)))


def test_only_workers_are_hidden() -> None:
    options = OutputOptions(show=(1,))
    assert [rank for rank in range(3) if options.shows("worker", rank)] == [1]
    assert options.shows("server", 0)
    assert options.shows("scheduler", 0)
    assert OutputOptions().shows("worker", 5)


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
