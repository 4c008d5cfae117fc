"""What ranks have to know of their job: its address, the variables of its members, and the keys that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.bootstrap.job_address import JobAddress, require_safe
from kvstore.errors import ConfigError
from kvstore.job.config import Config

SECRET = "0123456789abcdef0123456789abcdef"
ADDRESS = JobAddress("10.0.0.7", 4711, 2, "kvstore-0-abc")


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
