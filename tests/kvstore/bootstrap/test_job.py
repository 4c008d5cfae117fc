"""From ranks to a job, as far as that goes without one: the address, its keys, the meeting, and what is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.bootstrap import joining
from kvstore.bootstrap.job import _require_private
from kvstore.bootstrap.job_address import JobAddress, require_safe
from kvstore.bootstrap.keeper import KeptJob, KeptProcess
from kvstore.bootstrap.meeting import FileMeeting, StoreMeeting, meeting, meeting_file, on_one_host
from kvstore.errors import ConfigError, DeadlineExceeded
from kvstore.job.config import Config
from kvstore.job.ranks import FAMILIES, Ranks

SECRET = "0123456789abcdef0123456789abcdef"
ADDRESS = JobAddress("10.0.0.7", 4711, 2, "kvstore-0-abc")
TORCH, OPENMPI, *_ = FAMILIES


def config_of(role: str, rank: int, address: JobAddress = ADDRESS, secret: str = SECRET) -> Config:
    return Config.from_env(address.variables(role, rank, 3, secret))


def test_a_place_survives_being_said() -> None:
    assert JobAddress.loads(ADDRESS.dumps()) == ADDRESS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "{}",
        '{"uri": "x"}',
        '{"uri": 1, "port": 1, "servers": 1, "job": "x"}',
        ADDRESS.dumps()[:-1] + ',"x":1}',
        "[" * 200_000,
        replace(ADDRESS, servers=0).dumps(),
        replace(ADDRESS, servers=4097).dumps(),
        replace(ADDRESS, servers=True).dumps(),
        replace(ADDRESS, port=-1).dumps(),
        replace(ADDRESS, port=65536).dumps(),
        replace(ADDRESS, uri="").dumps(),
        replace(ADDRESS, uri="ipc://\0/x").dumps(),
        replace(ADDRESS, uri="h" * 256).dumps(),
        replace(ADDRESS, job="").dumps(),
        replace(ADDRESS, job="\ud800").dumps(),
        replace(ADDRESS, job="j" * 41).dumps(),
    ],
    ids=range(19),
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="address of the job"):
        JobAddress.loads(text)


def test_the_variables_make_a_member() -> None:
    config = config_of("worker", 2).require_job("worker")
    assert (config.rank_hint, config.num_workers, config.num_servers, config.job) == (2, 3, 2, "kvstore-0-abc")
    assert config.root.startswith("tcp://10.0.0.7:4711?key=")


def test_all_make_the_same_keys_and_each_its_own() -> None:
    members = [("scheduler", 0), ("server", 0), ("server", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
    keys = [config_of(*member).keys for member in members]
    assert all(one is not None and one.public in one.members for one in keys)
    assert len({one.secret for one in keys if one is not None}) == len(members)
    assert len({(one.root, one.members) for one in keys if one is not None}) == 1


def test_keys_are_of_one_job_and_one_secret() -> None:
    mine = config_of("worker", 0).keys
    for other in (config_of("worker", 0, replace(ADDRESS, job="next")), config_of("worker", 0, secret=SECRET[::-1])):
        assert mine is not None
        assert other.keys is not None
        assert not mine.members & other.keys.members


def test_links_between_hosts_need_a_secret() -> None:
    assert require_safe(Config(), one_host=True) == ""
    assert require_safe(Config(encryption=False), one_host=False) == ""
    assert require_safe(Config(job_secret=SECRET), one_host=False) == SECRET
    with pytest.raises(ConfigError, match=r"KVSTORE_JOB_SECRET is not set: .*openssl.*KVSTORE_ENCRYPTION=0"):
        require_safe(Config(), one_host=False)
    with pytest.raises(ConfigError, match="is too short") as caught:
        require_safe(Config(job_secret="hunter2"), one_host=False)
    assert "hunter2" not in str(caught.value)
    assert SECRET not in repr(Config(job_secret=SECRET))


def test_a_task_survives_the_pipe_and_shows_no_keys() -> None:
    task = KeptJob(7, [KeptProcess("server", 1, ["python"], {"KVSTORE_SECRET_KEY": "hush"})], ["/tmp/x"], 5, 3.0)
    assert KeptJob.loads(task.dumps()) == task
    assert "hush" not in repr(task)


def test_a_file_tells_the_others_until_it_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    rank0, other = FileMeeting(path, 50.0), FileMeeting(path, 50.0)
    heard: list[str] = []
    listener = threading.Thread(target=lambda: heard.append(other.hear()))
    listener.start()
    rank0.tell("here")
    listener.join(50.0)
    assert heard == ["here"]
    assert path.stat().st_mode & 0o077 == 0
    rank0.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere/meeting, where the ranks meet: No such file"):
        FileMeeting(tmp_path / "nowhere" / "meeting", 50.0).tell("here")


def test_silence_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"rank 0 has not said within 0\.05 s") as caught:
        FileMeeting(tmp_path / "meeting", 0.05).hear()
    assert caught.value.silent == ("rank 0",)


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("trap")
    (tmp_path / "meeting").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic links"):
        FileMeeting(tmp_path / "meeting", 0.05).hear()


@pytest.mark.parametrize("kind", ["a pipe", "a directory", "another user's"])
def test_what_another_has_put_where_the_ranks_meet_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "meeting"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.write_text("trap")
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused: list[str] = []

    def hear() -> None:
        try:
            FileMeeting(path, 50.0).hear()
        except ConfigError as exc:
            refused.append(str(exc))

    # To open a pipe may wait for ever, whatever the deadline is.
    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    listener.join(20.0)
    assert [str(path) in text for text in refused] == [True]


def test_siblings_share_the_name_of_the_file() -> None:
    ranks = Ranks(OPENMPI, 0, 2, 0, 2)
    assert meeting_file(ranks) == meeting_file(replace(ranks, rank=1))
    assert f"kvstore-{os.getuid()}-{os.getppid()}-" in meeting_file(ranks).name


def test_torchs_store_tells_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = Ranks(TORCH, 0, 2, master="127.0.0.1", port=port)
    assert on_one_host(ranks)
    rank0, other = StoreMeeting(ranks, 50.0), StoreMeeting(replace(ranks, rank=1), 50.0)
    rank0.tell("here")
    assert other.hear() == "here"
    rank0.forget()
    with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port}"):
        StoreMeeting(replace(ranks, rank=1), 0.2).hear()


def test_nobody_at_the_master_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot reach rank 0 at MASTER_ADDR and MASTER_PORT, 127.0.0.1:{port}"):
        StoreMeeting(Ranks(TORCH, 1, 2, master="127.0.0.1", port=port), 0.2)


def test_several_hosts_without_an_address() -> None:
    with (
        pytest.raises(ConfigError, match=r"rank 1 of 4, on several hosts.*MASTER_ADDR.*mpirun -x.*launch\.py"),
        meeting(Ranks(OPENMPI, 1, 4, 1, 2), 1.0),
    ):
        pass


def test_without_ranks_nothing_happens() -> None:
    config = Config()
    with joining(config) as same:
        assert same is config


def told(monkeypatch: pytest.MonkeyPatch, address: JobAddress) -> None:
    """Have all meetings say that address."""

    class Heard:
        def hear(self) -> str:
            return address.dumps()

    monkeypatch.setattr("kvstore.bootstrap.job.meeting", lambda ranks, timeout_s: contextlib.nullcontext(Heard()))


@pytest.mark.parametrize("uri", ["127.0.0.1", "localhost", "10.0.0.7", "stranger.example"])
def test_ranks_on_one_host_go_to_no_address_of_a_network(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    """There are no keys on one host, and whoever reaches torchrun's store can write there, from any host."""
    told(monkeypatch, replace(ADDRESS, uri=uri))
    one_host = Ranks(TORCH, 1, 2, 1, 2, "10.0.0.7", 4711, hosted=True)
    with pytest.raises(ConfigError, match=r"not on this host.*Rank 0 has not told it"), joining(Config(ranks=one_host)):
        pass
    several = Config(ranks=replace(one_host, local_size=1), encryption=False)
    with joining(several) as config:
        assert config.root == f"tcp://{uri}:4711"


def test_ranks_on_one_host_go_where_rank_0_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, replace(ADDRESS, uri=f"ipc://{tmp_path}/scheduler", port=0))
    ranks = Config(ranks=Ranks(TORCH, 1, 2, 1, 2, "10.0.0.7", 4711, hosted=True))
    tmp_path.chmod(0o700)
    with joining(ranks) as config:
        assert config.root == f"ipc://{tmp_path}/scheduler"
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="not this user's alone"), joining(ranks):
        pass


def test_a_directory_that_others_can_enter_is_not_trusted(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    _require_private(private)
    private.chmod(0o755)
    with pytest.raises(ConfigError, match="not this user's alone"):
        _require_private(private)
    with pytest.raises(ConfigError, match="is not on this host"):
        _require_private(tmp_path / "none")
