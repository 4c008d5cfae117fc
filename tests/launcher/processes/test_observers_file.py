from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvstore.job.curve_keys import split_key
from kvstore.job.keyring import ROOT, Keyring
from kvstore.job.observing_place import FILE, ObservingPlace
from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.job.tasks import Rendezvous, member_variables, members
from launcher.processes.observers_file import write_observers_file

JOB = Job(2, 1, ("python", "train.py"))


def test_the_file_is_its_owners_alone_and_says_what_is_observed(tmp_path: Path) -> None:
    write_observers_file(tmp_path, JOB, Rendezvous("ipc:///t/scheduler", 0, "m"), {})
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    place = ObservingPlace.read(tmp_path / FILE)
    assert (place.address, place.key, place.transport) == ("ipc:///t/scheduler", "", "sockets")
    assert (place.job, place.command, place.launcher) == ("m", "python train.py", "local")
    assert (place.workers, place.servers) == (2, 1)
    assert place.started > 0 < place.pid


def test_observers_have_a_key_that_no_member_is_told(tmp_path: Path) -> None:
    keyring = Keyring.random(members(JOB))
    at = Rendezvous("10.0.0.1", 5555, "m", "ssh", keyring=keyring)
    write_observers_file(tmp_path, JOB, at, {"KVSTORE_TRANSPORT": "zeromq"})
    place = ObservingPlace.read(tmp_path / FILE)
    assert split_key(place.address) == ("tcp://10.0.0.1:5555", keyring.pairs[ROOT][0])
    assert (place.launcher, place.transport) == ("ssh", "zeromq")
    everybodys = [member_variables(JOB, at, role, rank) for role, rank in members(JOB)]
    assert not [1 for variables in everybodys if place.key in " ".join(variables.values())]


def test_a_long_command_is_cut(tmp_path: Path) -> None:
    write_observers_file(tmp_path, Job(1, 1, ("x" * 100_000,)), Rendezvous("ipc:///t/scheduler", 0, "m"), {})
    assert ObservingPlace.read(tmp_path / FILE).command == "x" * 1000


def test_a_directory_that_is_gone_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot write"):
        write_observers_file(tmp_path / "none", JOB, Rendezvous("ipc:///t/scheduler", 0, "m"), {})


def test_a_transport_that_is_none_ends_it_too(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="KVSTORE_TRANSPORT"):
        write_observers_file(tmp_path, JOB, Rendezvous("ipc:///t/scheduler", 0, "m"), {"KVSTORE_TRANSPORT": "pigeon"})
