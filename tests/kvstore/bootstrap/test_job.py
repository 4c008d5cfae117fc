"""From ranks to a job, as far as that goes without one: which addresses are refused."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.bootstrap import joining
from kvstore.bootstrap.job_address import JobAddress
from kvstore.bootstrap.server_supervisor import SupervisedProcess
from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.ranks import FAMILIES, Ranks

ADDRESS = JobAddress("10.0.0.7", 4711, 2, "kvstore-0-abc")
TORCH, OPENMPI, *_ = FAMILIES


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
