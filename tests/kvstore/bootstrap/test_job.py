"""From ranks to a job, as far as that goes without one: which addresses are refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.bootstrap import joining
from kvstore.bootstrap.job_address import JobAddress
from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.ranks import FAMILIES, Ranks

ADDRESS = JobAddress("10.0.0.7", 4711, 2, "kvstore-0-abc")
TORCH, OPENMPI, *_ = FAMILIES


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
    with pytest.raises(ConfigError, match="must belong to this user alone"), joining(ranks):
        pass
