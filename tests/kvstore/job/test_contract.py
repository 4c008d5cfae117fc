from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.job.config import Config
from kvstore.job.contract import COMPUTED, Contract, Role, aggregated, member_name, member_title, members
from kvstore.job.curve_keys import Keyring

CONTRACT = Contract(num_workers=3, num_servers=2, uri="10.0.0.7", port=4711, job="kvstore-0-abc")
KEYS = {"KVSTORE_SECRET_KEY", "KVSTORE_ROOT_KEY", "KVSTORE_MEMBER_KEYS"}


def test_members_are_in_the_order_in_which_they_start() -> None:
    assert members(2, 1) == [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    assert members(1, 1, 2)[2:] == [("aggregator", 0), ("aggregator", 1), ("worker", 0)]
    assert members(1, 2, 1, replicas=1)[1:6] == [
        *(("server", 0), ("server", 1), ("standby", 0), ("standby", 1), ("aggregator", 0))
    ]
    assert members(0, 2) == [("scheduler", 0), ("server", 0), ("server", 1)]


@pytest.mark.parametrize(
    ("placed", "groups"),
    [
        ({"a": "w0 w1 w2 w3"}, []),  # one host: nothing leaves it
        ({"a": "s0 w0", "b": "s1 w1"}, []),
        ({"a": "s0 w0 w1", "b": "s1 w2 w3"}, [[0, 1], [2, 3]]),
        ({"a": "w0 w1", "b": "w2"}, [[0, 1]]),
        ({"a": "w0", "b": "w1 w2 w3", "c": "w4"}, [[1, 2, 3]]),
        ({"a": "w0 w3", "b": "w1 w4", "c": "w2"}, [[0, 3], [1, 4]]),
        ({"a": "w2 w3", "b": "w0 w1"}, [[0, 1], [2, 3]]),
        ({"a": "w0 w1", "b": "s0"}, [[0, 1]]),  # servers elsewhere: gradients leave the host
    ],
)
def test_hosts_with_two_workers_or_more_have_aggregators(placed: dict[str, str], groups: list[list[int]]) -> None:
    roles: dict[str, Role] = {"s": "server", "w": "worker"}
    members = [(host, [(roles[word[0]], int(word[1:])) for word in text.split()]) for host, text in placed.items()]
    assert aggregated(members) == groups
    one_by_one = [(host, [member]) for host, many in members for member in many]
    assert aggregated(reversed(one_by_one)) == groups, "as agents of a cluster manager report"


def test_members_have_names() -> None:
    assert [member_name(*member) for member in members(1, 1)] == ["scheduler", "server 0", "worker 0"]
    assert (member_name("standby", 1), member_title("standby", 1)) == ("standby 1", "the standby of server 1")
    assert member_title("worker", 1) == "worker 1"


@pytest.mark.parametrize("role", ["worker", "server", "standby", "aggregator", "scheduler"])
def test_a_member_reads_what_it_was_told(role: Role) -> None:
    config = Config.from_env(CONTRACT.variables(role, 1)).require_job(role)
    assert (config.root, config.job) == ("tcp://10.0.0.7:4711", "kvstore-0-abc")
    assert (config.num_workers, config.num_servers, config.rank_hint) == (3, 2, 1)
    assert (config.keys, config.root_fd) == (None, -1)
    assert (config.num_aggregators, config.aggregator, config.replicas, config.start) == (0, -1, 0, 1)
    assert Config.from_env(replace(CONTRACT, replicas=1).variables(role, 1)).replicas == 1


def test_workers_are_told_of_their_aggregator_and_all_of_how_many_there_are() -> None:
    contract = replace(CONTRACT, aggregated=[[0, 2], [3, 4]])
    told = {member: Config.from_env(contract.variables(*member)) for member in members(6, 1, 2)}
    assert {config.num_aggregators for config in told.values()} == {2}
    assert [told["worker", rank].aggregator for rank in range(6)] == [0, -1, 0, 1, 1, -1]
    assert {config.aggregator for (role, _), config in told.items() if role != "worker"} == {-1}


def test_a_unix_socket_is_the_whole_address() -> None:
    contract = replace(CONTRACT, uri="ipc:///run/j/scheduler", port=0)
    with pytest.raises(Exception, match="DMLC_PS_ROOT_PORT='0'"):  # which is out of range for TCP
        Config.from_env(replace(contract, uri="10.0.0.7").variables("worker", 0))
    assert Config.from_env(contract.variables("worker", 0)).root == "ipc:///run/j/scheduler"


def test_the_listening_socket_and_the_log_are_for_the_scheduler_alone() -> None:
    contract = replace(CONTRACT, root_fd=5, scheduler_log="/run/j/log")
    told = [Config.from_env(contract.variables(role, 0)) for role, _ in members(1, 1)]
    assert [(config.root_fd, config.scheduler_log) for config in told] == [(5, "/run/j/log"), (-1, ""), (-1, "")]


def test_each_member_has_keys_of_its_own() -> None:
    contract = replace(CONTRACT, keyring=Keyring.random(members(3, 2)))
    keys = [Config.from_env(contract.variables(*member)).keys for member in members(3, 2)]
    assert len({key.public for key in keys if key is not None}) == 6


def test_all_that_is_computed_is_known() -> None:
    contract = replace(CONTRACT, cluster="ssh", root_fd=5, keyring=Keyring.random(members(3, 2), readers=True))
    contract = replace(contract, aggregated=[[0, 1]], replicas=1, scheduler_log="/run/j/log", readers=4)
    again = {"KVSTORE_START", "KVSTORE_LOST"}  # of a process that is started again
    schedulers = {"KVSTORE_ROOT_FD", "KVSTORE_SCHEDULER_LOG", "KVSTORE_READERS", "KVSTORE_READER_KEY"}
    schedulers.add("KVSTORE_OBSERVER_KEY")
    assert COMPUTED - set(contract.variables("scheduler", 0)) == {"KVSTORE_AGGREGATOR"} | again
    assert COMPUTED - set(contract.variables("worker", 0)) == schedulers | again
    absent = {"DMLC_JOB_CLUSTER", "KVSTORE_ROOT_FD", "KVSTORE_NUM_AGGREGATORS", "KVSTORE_AGGREGATOR", *KEYS}
    absent |= {"KVSTORE_REPLICAS", "KVSTORE_SCHEDULER_LOG", "KVSTORE_READERS", "KVSTORE_READER_KEY"} | again
    absent.add("KVSTORE_OBSERVER_KEY")
    assert COMPUTED - set(CONTRACT.variables("worker", 0)) == absent
