"""What may be asked for."""

from __future__ import annotations

from dataclasses import fields

import pytest
from every_option import VALUES

from launcher.errors import LaunchError
from launcher.job.description import MAX_PER_ROLE, Cluster, Job, OutputOptions, parse_ranks
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
