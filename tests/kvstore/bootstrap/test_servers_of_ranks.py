"""What rank 0 has its supervisor start: which processes, with which variables and sockets."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.bootstrap.job import start_aggregator, start_servers
from kvstore.bootstrap.server_supervisor import SupervisedJob
from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.place import FILE, ObservingPlace
from kvstore.job.ranks import FAMILIES, Ranks
from kvstore.job.system import cores
from kvstore.job.threads import WAITING

SECRET = "0123456789abcdef0123456789abcdef"
TORCH, OPENMPI, *_ = FAMILIES


class Pipe(io.BytesIO):
    """Keeps what was written when it is closed."""

    told = b""

    def close(self) -> None:
        self.told = self.getvalue()
        super().close()


class Supervisor:
    """Stands for the supervisor's process, and keeps what it was told."""

    def __init__(self, _words: Any, **options: Any) -> None:
        self.options = options
        self.stdin = Pipe()
        self.ended: list[str] = []

    def wait(self, _timeout: float | None = None) -> int:
        self.ended.append("waited for")
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Supervisor]:
    supervisors: list[Supervisor] = []

    def start(words: Any, **options: Any) -> Supervisor:
        supervisors.append(Supervisor(words, **options))
        return supervisors[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return supervisors


def job_of(supervisor: Supervisor) -> SupervisedJob:
    return SupervisedJob.loads(supervisor.stdin.told.decode())


def test_on_one_host_they_meet_in_a_private_directory_which_goes_with_the_job(started: list[Supervisor]) -> None:
    address, processes = start_servers(Config(), Ranks(TORCH, 0, 4, 0, 4), True, "", Path("/run/meeting"))
    job = job_of(started[0])
    private = Path(address.uri.removeprefix("ipc://")).parent
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert job.remove == [str(private), "/run/meeting"]
    assert (job.parent, job.root_fd, started[0].options["pass_fds"]) == (os.getpid(), -1, ())
    assert [process.name for process in job.members] == ["scheduler", "server 0", "server 1"]
    place = ObservingPlace.read(private / FILE)
    assert (place.address, place.key, place.launcher, place.workers) == (address.uri, "", "torchrun", 4)
    for process in job.members:
        assert process.variables["DMLC_PS_ROOT_URI"] == address.uri
        assert process.variables["DMLC_NUM_WORKER"] == "4"
        assert process.argv[-2:] == ["servers", process.name.replace(" ", "-")]
    assert [process.variables.get("KVSTORE_LOCAL_RANK") for process in job.members] == [None, "0", "1"]
    processes.end()
    processes.end()
    assert not private.exists()
    assert started[0].ended == ["waited for"], "the shell between this process and the supervisor"


def test_across_hosts_the_scheduler_inherits_a_listening_socket_and_all_have_keys(started: list[Supervisor]) -> None:
    config = Config(node_host="127.0.0.1", num_servers=1)
    address, processes = start_servers(config, Ranks(TORCH, 0, 2, master="127.0.0.1", port=1), False, SECRET)
    job = job_of(started[0])
    scheduler, server = job.members
    assert (address.uri, address.servers) == ("127.0.0.1", 1)
    assert address.port > 0
    assert scheduler.variables["KVSTORE_ROOT_FD"] == str(job.root_fd)
    assert started[0].options["pass_fds"] == (job.root_fd,)
    assert "KVSTORE_ROOT_FD" not in server.variables
    assert scheduler.variables["KVSTORE_SECRET_KEY"] != server.variables["KVSTORE_SECRET_KEY"]
    assert scheduler.variables["KVSTORE_MEMBER_KEYS"] == server.variables["KVSTORE_MEMBER_KEYS"]
    assert SECRET not in started[0].stdin.told.decode()
    place = ObservingPlace.read(Path(job.directory) / FILE)
    observer = place.config({}).keys
    assert observer is not None
    assert observer.public == scheduler.variables["KVSTORE_OBSERVER_KEY"]
    assert observer.root == scheduler.variables["KVSTORE_ROOT_KEY"]
    assert place.key not in started[0].stdin.told.decode()
    processes.end()


@pytest.mark.parametrize(("ranks", "wanted", "count"), [(1, 0, 1), (2, 0, 2), (8, 0, 2), (1, 3, 3)])
def test_there_are_two_servers_at_most_if_nobody_says_how_many(
    started: list[Supervisor], ranks: int, wanted: int, count: int
) -> None:
    address, processes = start_servers(Config(num_servers=wanted), Ranks(TORCH, 0, ranks, 0, ranks), True, "")
    assert address.servers == count == len(job_of(started[0]).members) - 1
    processes.end()


def test_the_aggregator_of_rank_0s_host_is_started_with_the_servers(started: list[Supervisor]) -> None:
    config = Config(node_host="127.0.0.1", num_servers=2)
    ranks = Ranks(OPENMPI, 0, 5, 0, 2, master="127.0.0.1", port=1)
    address, processes = start_servers(config, ranks, False, SECRET, aggregated=[[0, 2], [1, 3]])
    job = job_of(started[0])
    assert [process.name for process in job.members] == ["scheduler", "server 0", "server 1", "aggregator 0"]
    scheduler, _, _, aggregator = (process.variables for process in job.members)
    assert scheduler["KVSTORE_NUM_AGGREGATORS"] == aggregator["KVSTORE_NUM_AGGREGATORS"] == "2"
    assert (aggregator["KVSTORE_LOCAL_RANK"], aggregator["KVSTORE_LOCAL_SIZE"]) == ("0", "1")
    assert job.reporter == scheduler
    assert len(set(scheduler["KVSTORE_MEMBER_KEYS"].split(","))) == 1 + 2 + 2 + 5
    own = Config.from_env(aggregator).keys
    assert own is not None
    assert own.public in scheduler["KVSTORE_MEMBER_KEYS"].split(",")
    processes.end()
    elsewhere = start_aggregator(Config(), address, replace(ranks, rank=1), SECRET)
    assert elsewhere is not None
    job = job_of(started[1])
    assert [process.name for process in job.members] == ["aggregator 1"]
    assert job.rank == 1
    assert job.reporter["KVSTORE_SECRET_KEY"] == scheduler["KVSTORE_SECRET_KEY"], "which may report on any other"
    assert "DMLC_NODE_HOST" not in job.members[0].variables
    assert SECRET not in started[1].stdin.told.decode()
    elsewhere.end()
    assert not Path(job.directory).exists()
    assert start_aggregator(Config(), address, replace(ranks, rank=2), SECRET) is None


def test_servers_share_the_cores_and_do_not_spin_unless_the_user_wants_it(
    started: list[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*WAITING, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    names = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    for given, expected in (({}, ("passive", str(max(1, cores() // 2)))), (dict.fromkeys(names, "7"), (None, None))):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        _, processes = start_servers(Config(num_servers=2), Ranks(TORCH, 0, 1, 0, 1), True, "")
        scheduler, *both = job_of(started[-1]).members
        assert {tuple(map(server.variables.get, names)) for server in both} == {expected}
        assert not set(names) & set(scheduler.variables)
        processes.end()


def test_without_room_for_a_directory_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR to a writable directory"):
        start_servers(Config(), Ranks(TORCH, 0, 1, 0, 1), True, "")
