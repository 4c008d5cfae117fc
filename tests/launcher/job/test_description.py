"""What may be asked for."""

from __future__ import annotations

import pytest

from launcher.errors import LaunchError
from launcher.job.description import MAX_PER_ROLE, Job
from launcher.job.tasks import HostEnvironment, Rendezvous, render

AT = Rendezvous(uri="ipc:///t/scheduler", port=0, mark="kvstore-0-1-x")


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
