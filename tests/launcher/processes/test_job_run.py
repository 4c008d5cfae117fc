from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvstore.job.curve_keys import ROOT, Keyring, split_key
from kvstore.job.place import FILE, ObservingPlace
from kvstore.reading.readers_file import ReadingPlace
from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job
from launcher.job.tasks import Rendezvous, member_variables, members
from launcher.processes import keeper
from launcher.processes.job_run import readers_file, write_observers_file
from launcher.processes.jobdir import JobDir, sweep

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


HERE = Rendezvous(uri="ipc:///t/scheduler", port=0, mark="m")


def job(file: Path | None) -> Job:
    return Job(2, 2, ("python", "train.py"), cluster=Cluster(readers=None if file is None else str(file), replicas=1))


def test_the_file_is_there_as_long_as_the_job(tmp_path: Path) -> None:
    file = tmp_path / "readers.json"
    with readers_file(job(file), HERE, {}):
        assert ReadingPlace.read(file) == ReadingPlace("ipc:///t/scheduler", "", "sockets")
    assert not file.exists()


def test_without_readers_there_is_no_file_and_no_key(tmp_path: Path) -> None:
    one = job(None)
    with readers_file(one, HERE, {}):
        assert list(tmp_path.iterdir()) == []
    assert Keyring.random(members(one)).reader is None
    variables = [member_variables(one, HERE, role, rank) for role, rank in members(one)]
    assert not [name for names in variables for name in names if "READER" in name]


def test_readers_have_their_own_key_and_servers_know_it(tmp_path: Path) -> None:
    one = job(tmp_path / "readers.json")
    keyring = Keyring.random(members(one), readers=True)
    at = Rendezvous("10.0.0.1", 5555, "m", keyring=keyring)
    with readers_file(one, at, {"KVSTORE_TRANSPORT": "zeromq"}):
        place = ReadingPlace.read(tmp_path / "readers.json")
    assert keyring.reader is not None
    assert split_key(place.address) == ("tcp://10.0.0.1:5555", keyring.pairs[ROOT][0])
    assert (place.key, place.transport) == (keyring.reader[1], "zeromq")
    public = keyring.reader[0]
    know = {
        role for role, rank in members(one) if member_variables(one, at, role, rank).get("KVSTORE_READER_KEY") == public
    }
    assert know == {"scheduler", "server", "standby"}
    everybodys = [member_variables(one, at, role, rank) for role, rank in members(one)]
    assert not [1 for variables in everybodys if place.key in " ".join(variables.values())]
    assert not [1 for variables in everybodys if public in variables["KVSTORE_MEMBER_KEYS"]]


def test_a_file_that_cannot_be_written_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot write"), readers_file(job(tmp_path / "none" / "file"), HERE, {}):
        pass


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_it_is_private_and_goes(short: Path) -> None:
    job = JobDir.make(short)
    assert job.path.parent == short
    assert job.path.name.startswith(f"kvstore-{os.getuid()}-{os.getpid()}-")
    assert stat.S_IMODE(job.path.stat().st_mode) == 0o700
    assert len(bytes(job.path)) + 36 <= 103
    job.remove()
    job.remove()
    assert list(short.iterdir()) == []


def test_both_pythons_are_this_one(short: Path) -> None:
    job = JobDir.make(short)
    shims = job.shims(sys.executable)
    for name in ("python", "python3"):
        printed = subprocess.run(
            [shims / name, "-c", "import sys; print(sys.executable)"], capture_output=True, check=True
        )
        assert printed.stdout.decode().strip() == sys.executable
    job.remove()


def test_a_long_tmpdir_is_not_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    job = JobDir.make()
    assert job.path.parent == Path("/tmp")
    job.remove()


def test_no_place_is_an_error_that_says_what_would_do(short: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot make.*No such file.*set TMPDIR to a writable directory"):
        JobDir.make(short / "missing")


def test_what_dead_launchers_left_is_swept(short: Path, dead_pid: int) -> None:
    uid = os.getuid()
    left = short / f"kvstore-{uid}-{dead_pid}-abc"
    (left / "bin").mkdir(parents=True)
    (left / "lock").touch()
    bare = short / f"kvstore-{uid}-{dead_pid}-def"
    bare.mkdir()
    others = [
        short / f"kvstore-{uid}-{os.getpid()}-abc",  # alive
        short / f"kvstore-{uid + 1}-{dead_pid}-abc",  # somebody else's
        short / f"kvstore-{uid}-mine",
    ]
    for other in others:
        other.mkdir()
    link = short / f"kvstore-{uid}-{dead_pid}-link"
    link.symlink_to(others[2])
    assert sorted(sweep(short)) == [left, bare]
    assert sorted(short.iterdir()) == sorted([*others, link])


def test_a_locked_one_is_alive_whatever_its_pid_says(short: Path, dead_pid: int) -> None:
    path = short / f"kvstore-{os.getuid()}-{dead_pid}-container"
    path.mkdir()
    job = JobDir(path)
    assert sweep(short) == []
    job.remove()
    path.mkdir()
    assert sweep(short) == [path]


def test_the_memory_that_the_job_shared_goes_and_nobody_elses(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = short / "shm"
    shared.mkdir()
    monkeypatch.setattr(keeper, "SHARED", shared)
    job = JobDir.make(short)
    uid, name = os.getuid(), job.path.name
    ours = [f"kvstore-{uid}-{name}-{pid}-{'0' * 16}.{number}" for pid in (7, 77) for number in (0, 12)]
    others = [
        f"kvstore-{uid}-{name}x-7-{'0' * 16}.0",
        f"kvstore-{uid}-{name}-7-{'0' * 16}.0x",
        f"kvstore-{uid}-{name[:-1]}-7-{'0' * 16}.0",
        f"kvstore-{uid + 1}-{name}-7-{'0' * 16}.0",
        f"kvstore-{uid}-{name}-x-7-{'0' * 16}.0",
    ]
    for file in ours + others:
        (shared / file).touch()
    (shared / f"kvstore-{uid}-{name}-8-{'0' * 16}.0").mkdir()  # which cannot be unlinked, and stops nothing
    job.remove()
    assert sorted(path.name for path in shared.iterdir() if path.is_file()) == sorted(others)
