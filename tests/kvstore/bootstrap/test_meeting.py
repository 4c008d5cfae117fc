"""From ranks to a job: its address, where rank 0 tells it, and what is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from waiting import until

from kvstore.bootstrap import joining
from kvstore.bootstrap import meeting as meetings
from kvstore.bootstrap.job_address import JobAddress, require_safe
from kvstore.bootstrap.meeting import FileMeeting, StoreMeeting, meeting, meeting_file, on_one_host
from kvstore.bootstrap.server_supervisor import SupervisedProcess
from kvstore.errors import ConfigError, DeadlineExceeded
from kvstore.job.config import Config
from kvstore.job.ranks import FAMILIES, Ranks

# ---- from ranks to a job, as far as that goes without one: which addresses are refused


ADDRESS = JobAddress("10.0.0.7", 4711, 2, "kvstore-0-abc")
TORCH, OPENMPI = FAMILIES[:2]


def test_without_ranks_nothing_happens() -> None:
    config = Config()
    with joining(config) as same:
        assert same is config


def test_nobody_is_there_to_start_a_standby_again() -> None:
    config = Config(ranks=Ranks(TORCH, 1, 2, 1, 2, "10.0.0.7", 4711, hosted=True), replicas=1)
    with pytest.raises(ConfigError, match=r"KVSTORE_REPLICAS=1: .*start the job with launch.py"), joining(config):
        pass


def told(monkeypatch: pytest.MonkeyPatch, address: JobAddress) -> list[str]:
    """Have all meetings say that address; return the hosts that ranks say they are on."""
    introduced: list[str] = []

    class Heard:
        def introduce(self, host: str) -> None:
            introduced.append(host)

        def hear(self) -> str:
            return address.dumps()

    monkeypatch.setattr("kvstore.bootstrap.job.meeting", lambda ranks, timeout_s: contextlib.nullcontext(Heard()))
    return introduced


@pytest.mark.parametrize("uri", ["127.0.0.1", "localhost", "10.0.0.7", "stranger.example"])
def test_ranks_on_one_host_go_to_no_address_of_a_network(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    """There are no keys on one host, and whoever reaches torchrun's store can write there, from any host."""
    told(monkeypatch, replace(ADDRESS, uri=uri))
    one_host = Ranks(TORCH, 1, 2, 1, 2, "10.0.0.7", 4711, hosted=True)
    with pytest.raises(ConfigError, match=r"not on this host.*Rank 0 did not publish"), joining(Config(ranks=one_host)):
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
    with pytest.raises(ConfigError, match="must belong to this user alone"), joining(ranks):
        pass


class Started:
    """Stands for the supervisor of an aggregator."""

    made: ClassVar[list[Started]] = []

    def __init__(self, config: Config, rank: int, members: list[SupervisedProcess], *_: object) -> None:
        self.rank, self.members, self.ended = rank, [member.name for member in members], 0
        self.variables = members[-1].variables
        self.made.append(self)

    def wait(self) -> None:
        """Nothing runs."""

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    monkeypatch.setattr("kvstore.bootstrap.job.MemberProcesses", Started)
    monkeypatch.setattr("kvstore.bootstrap.job.atexit.register", lambda _call: None)
    monkeypatch.setattr(Started, "made", [])
    return Started.made


@pytest.mark.parametrize(("rank", "starts"), [(1, []), (2, [["aggregator 1"]]), (3, []), (4, [])])
def test_the_first_rank_of_a_host_starts_its_aggregator(
    monkeypatch: pytest.MonkeyPatch, started: list[Started], rank: int, starts: list[list[str]]
) -> None:
    introduced = told(monkeypatch, replace(ADDRESS, aggregated=[[0, 1], [2, 3]]))
    ranks = Ranks(OPENMPI, rank, 5, rank % 2, 2, "10.0.0.7", 4711)
    with joining(Config(ranks=ranks, encryption=False)) as config:
        assert (config.num_aggregators, config.aggregator) == (2, [0, 0, 1, 1, -1][rank])
    assert introduced[0].startswith(socket.gethostname())
    assert [one.members for one in started] == starts
    for one in started:
        assert (one.rank, one.ended) == (2, 0)
        assert (one.variables["DMLC_ROLE"], one.variables["DMLC_TASK_ID"]) == ("aggregator", "1")
    with pytest.raises(KeyError), joining(Config(ranks=ranks, encryption=False)):
        raise KeyError
    assert [one.ended for one in started[len(starts) :]] == [1] * len(starts), "who does not join ends what it started"


def test_rank_0_hears_on_which_hosts_the_others_are(monkeypatch: pytest.MonkeyPatch, started: list[Started]) -> None:
    said: list[str] = []

    class Meeting:
        def hosts(self) -> list[str]:
            return ["other", "", mine, "other", "", "third"]

        def tell(self, text: str) -> None:
            said.append(text)

        def forget(self) -> None:
            """Nothing is kept."""

    introduced = told(monkeypatch, ADDRESS)
    several = Ranks(OPENMPI, 1, 7, 0, 0, "10.0.0.7", 4711)
    with joining(Config(ranks=several, encryption=False)):
        (mine,) = introduced
    monkeypatch.setattr("kvstore.bootstrap.job.meeting", lambda ranks, timeout_s: contextlib.nullcontext(Meeting()))
    for aggregate, groups in ((True, [[0, 3], [1, 4]]), (False, [[1, 4]])):
        first = Config(ranks=replace(several, rank=0), encryption=False, aggregate=aggregate, node_host="127.0.0.1")
        with joining(first) as config:
            assert (config.num_aggregators, config.aggregator) == (len(groups), 0 if aggregate else -1)
        assert JobAddress.loads(said[-1]).aggregated == groups
        assert started[-1].members[3:] == (["aggregator 0"] if aggregate else [])


def test_a_rank_that_wants_no_aggregator_does_not_say_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    introduced = told(monkeypatch, ADDRESS)
    ranks = Ranks(OPENMPI, 1, 2, 1, 2, "10.0.0.7", 4711)
    with joining(Config(ranks=replace(ranks, size=5), encryption=False, aggregate=False)):
        assert introduced == [""]


# ---- what ranks have to know of their job: its address, the variables of its members, and the keys that they make


SECRET = "0123456789abcdef0123456789abcdef"


def config_of(role: str, rank: int, address: JobAddress = ADDRESS, secret: str = SECRET) -> Config:
    return Config.from_env(address.contract(3, secret).variables(role, rank))


def test_an_address_survives_being_told() -> None:
    for address in (ADDRESS, replace(ADDRESS, aggregated=[[0, 2], [1, 3]])):
        assert JobAddress.loads(address.dumps()) == address


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
        ADDRESS.dumps().replace("[]", "null"),
        ADDRESS.dumps().replace("[]", "[3]"),
        ADDRESS.dumps().replace("[]", "[[]]"),
        ADDRESS.dumps().replace("[]", "[[1]]"),
        ADDRESS.dumps().replace("[]", "[[1, 0]]"),
        ADDRESS.dumps().replace("[]", "[[0, 4096]]"),
        ADDRESS.dumps().replace("[]", '[[0, "1"]]'),
    ],
    ids=range(26),
)
def test_what_is_no_address_is_refused(text: str) -> None:
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


def test_aggregators_have_keys_and_everybody_knows_them() -> None:
    address = replace(ADDRESS, aggregated=[[1, 2]])
    assert [address.aggregator_beside(rank) for rank in range(3)] == [-1, 0, -1]
    aggregator, worker = (config_of(role, 0, address).keys for role in ("aggregator", "worker"))
    assert aggregator is not None
    assert worker is not None
    assert aggregator.public in worker.members


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


# ---- where rank 0 tells the others of the job: a file of one host, and torch's store


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


def test_torchs_store_tells_rank_0_where_the_others_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = Ranks(TORCH, 0, 4, master="127.0.0.1", port=port)
    rank0 = StoreMeeting(ranks, 50.0)
    StoreMeeting(replace(ranks, rank=1), 50.0).introduce("one")
    with pytest.raises(DeadlineExceeded, match=r"rank 2, rank 3 did not come within 0\.05 s") as caught:
        StoreMeeting(replace(ranks, rank=0, hosted=True), 0.05).hosts()
    assert caught.value.silent == ("rank 2", "rank 3")
    monkeypatch.setattr(meetings, "REMIND_S", 0.01)
    late = [StoreMeeting(replace(ranks, rank=rank), 50.0) for rank in (2, 3)]

    def come_when_missed() -> None:
        until(lambda: bool(caplog.messages), "a reminder")
        for rank, one in enumerate(late, 2):
            one.introduce(f"host {rank}")

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come_when_missed)
        assert rank0.hosts() == ["one", "host 2", "host 3"]
        coming.result()
    assert caplog.messages[0] == "rank 0 waits for rank 2, rank 3 to create a distributed store"
    rank0.forget()
    with pytest.raises(DeadlineExceeded, match="rank 1, rank 2, rank 3 did not come"):
        StoreMeeting(replace(ranks, rank=0, hosted=True), 0.05).hosts()


def test_where_all_are_on_one_host_nobody_asks_which(tmp_path: Path) -> None:
    meeting = FileMeeting(tmp_path / "meeting", 0.0)
    meeting.introduce("here")
    assert meeting.hosts() == []
    assert list(tmp_path.iterdir()) == []


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
