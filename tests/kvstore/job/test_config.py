"""Settings from the environment: each variable, and what a bad value costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from jobkeys import variables

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.curve_keys import with_key

JOB = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
}


AFAR = {"DMLC_PS_ROOT_URI": "10.0.0.1"}


@pytest.mark.parametrize("root", ["ipc:///tmp/x", "tcp://127.0.0.1:99", "tcp://localhost:99", "tcp://[::1]:99"])
def test_on_one_host_nothing_waits_for_its_turn(root: str) -> None:
    assert Config(root=root).first_bytes == Config(root=root).window_bytes > 1 << 30
    config = Config(root="tcp://10.0.0.1:99", piece_bytes=1000)
    assert (config.window_bytes, config.first_bytes) == (4000, 2000)
    assert Config(root="tcp://127.cluster.local:99", piece_bytes=1000).window_bytes == 4000, "a name, of any host"


@pytest.mark.parametrize(
    ("variables", "piece"),
    [
        ({"DMLC_NUM_WORKER": "1", **AFAR}, 2 << 20),
        ({"DMLC_NUM_WORKER": "2", **AFAR}, 2 << 20),
        ({"DMLC_NUM_WORKER": "3", **AFAR}, 640 << 10),  # a server that needs a piece from each waits as long
        ({"DMLC_NUM_WORKER": "3", "KVSTORE_SHM": "0"}, 64 << 20),  # on one host nothing waits for a network card
        ({"DMLC_NUM_WORKER": "3", "DMLC_PS_ROOT_URI": "ipc:///tmp/x"}, 64 << 20),
        ({"DMLC_NUM_WORKER": "3", "DMLC_PS_ROOT_URI": "ipc:///tmp/x", "KVSTORE_SHM": "0"}, 64 << 20),
        ({"KVSTORE_PIECE_BYTES": "5000"}, 5000),
    ],
)
def test_how_much_a_message_carries_follows_from_what_all_members_know(variables: dict[str, str], piece: int) -> None:
    assert Config.from_env(JOB | variables).piece_bytes == piece


@pytest.mark.parametrize(
    ("variables", "least"),
    [
        (AFAR, 160 << 10),
        (AFAR | {"DMLC_NUM_SERVER": "16"}, 160 << 10),
        (AFAR | {"DMLC_NUM_SERVER": "17"}, 0),
        (AFAR | {"KVSTORE_NUM_AGGREGATORS": "2"}, 160 << 10),
        (AFAR | {"KVSTORE_PIECE_BYTES": "655360"}, 0),
        ({}, 0),
    ],
)
def test_small_stores_have_small_messages_between_few_servers_and_workers(
    variables: dict[str, str], least: int
) -> None:
    assert Config.from_env(JOB | variables).least_piece_bytes == least


@pytest.mark.parametrize(("servers", "bound"), [("1", 1_000_000), ("16", 1_000_000), ("64", 25_000), ("4096", 390)])
def test_among_many_servers_smaller_arrays_are_cut(servers: str, bound: int) -> None:
    assert Config.from_env(JOB | {"DMLC_NUM_SERVER": servers}).bigarray_bound == bound
    given = JOB | {"DMLC_NUM_SERVER": servers, "KVSTORE_BIGARRAY_BOUND": "7"}
    assert Config.from_env(given).bigarray_bound == 7


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_env({}) == Config()


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "7")
    assert Config.from_env().timeout_s == 7


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("DMLC_ROLE", "server", "role", "server"),
        ("DMLC_ROLE", "scheduler", "role", "scheduler"),
        ("DMLC_NUM_WORKER", "4", "num_workers", 4),
        ("DMLC_NUM_SERVER", " 5 ", "num_servers", 5),
        ("DMLC_NODE_HOST", "10.0.0.7", "node_host", "10.0.0.7"),
        ("DMLC_INTERFACE", " eth1 ", "interface", "eth1"),
        ("DMLC_TASK_ID", "3", "rank_hint", 3),
        ("DMLC_RANK", "2", "rank_hint", 2),
        ("KVSTORE_ROOT_FD", "9", "root_fd", 9),
        ("KVSTORE_TIMEOUT_S", "2.5", "timeout_s", 2.5),
        ("KVSTORE_HEARTBEAT_S", "0.25", "heartbeat_s", 0.25),
        ("KVSTORE_HEARTBEAT_TIMEOUT_S", "30", "heartbeat_timeout_s", 30.0),
        ("KVSTORE_BIGARRAY_BOUND", "12", "bigarray_bound", 12),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "13", "bigarray_bound", 13),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "", "bigarray_bound", Config.bigarray_bound),
        ("MXNET_UPDATE_ON_KVSTORE", "0", "update_on_kvstore", False),
        ("MXNET_UPDATE_ON_KVSTORE", "1", "update_on_kvstore", True),
        ("KVSTORE_CONGESTION", " reno ", "congestion", "reno"),
        ("KVSTORE_COLUMNS", "80", "columns", 80),
        ("KVSTORE_CHECKPOINT_DIR", "/shared/run", "checkpoint_dir", "/shared/run"),
        ("KVSTORE_CHECKPOINT_EVERY", "500r", "checkpoint_every", (500, 0.0)),
        ("KVSTORE_CHECKPOINT_EVERY", "1.5m", "checkpoint_every", (0, 90.0)),
        ("KVSTORE_CHECKPOINT_KEEP", "7", "checkpoint_keep", 7),
        ("KVSTORE_CHECKPOINT_RESUME", "/shared/run", "checkpoint_resume", "/shared/run"),
        ("KVSTORE_PACING", "0", "pacing", False),
        ("KVSTORE_PACING", "1", "pacing", True),
        ("KVSTORE_DEVICE_SUM", "", "device_sum", "off"),
        ("KVSTORE_DEVICE_SUM", "CUDA", "device_sum", "cuda"),
        ("KVSTORE_SHM", "0", "shm", False),
        ("KVSTORE_SHM", "False", "shm", False),
        ("KVSTORE_TRANSPORT", "TCP", "transport", "tcp"),
        ("KVSTORE_SHM", "1", "shm", True),
        ("DMLC_ROLE", "aggregator", "role", "aggregator"),
        ("KVSTORE_NUM_AGGREGATORS", "2", "num_aggregators", 2),
        ("KVSTORE_AGGREGATOR", "1", "aggregator", 1),
        ("KVSTORE_AGGREGATE", "0", "aggregate", False),
        ("KVSTORE_REPLICAS", "1", "replicas", 1),
        ("KVSTORE_START", "3", "start", 3),
        ("KVSTORE_ENCRYPTION", "0", "encryption", False),
        ("KVSTORE_ENCRYPTION", "1", "encryption", True),
        ("KVSTORE_JOB", "kvstore-0-17-ab_c1x.y", "job", "kvstore-0-17-ab_c1x.y"),
        ("KVSTORE_JOB", "../my job\0", "job", ".._my_job_"),
        ("KVSTORE_JOB", "x" * 50, "job", "x" * 40),
    ],
)
def test_each_variable(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(Config.from_env({name: text}), field) == value


def test_our_own_name_goes_before_mxnets() -> None:
    env = {"MXNET_KVSTORE_BIGARRAY_BOUND": "13", "KVSTORE_BIGARRAY_BOUND": "12"}
    assert Config.from_env(env).bigarray_bound == 12
    assert Config.from_env({"DMLC_RANK": "2", "DMLC_TASK_ID": "3"}).rank_hint == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DMLC_ROLE", "boss"),
        ("DMLC_NUM_WORKER", "two"),
        ("DMLC_NUM_WORKER", "-1"),
        ("DMLC_NUM_SERVER", "1.5"),
        ("DMLC_TASK_ID", "-2"),
        ("KVSTORE_TIMEOUT_S", "0"),
        ("KVSTORE_TIMEOUT_S", "nan"),
        ("KVSTORE_TIMEOUT_S", "inf"),
        ("KVSTORE_HEARTBEAT_S", "soon"),
        ("KVSTORE_BIGARRAY_BOUND", "0"),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", "1e6"),
        ("MXNET_UPDATE_ON_KVSTORE", "maybe"),
        ("KVSTORE_COLUMNS", "-1"),
        ("KVSTORE_CHECKPOINT_EVERY", "0r"),
        ("KVSTORE_CHECKPOINT_EVERY", "500"),
        ("KVSTORE_CHECKPOINT_EVERY", "infm"),
        ("KVSTORE_CHECKPOINT_KEEP", "0"),
        ("KVSTORE_ENCRYPTION", "2"),
        ("KVSTORE_TRANSPORT", "carrier pigeon"),
    ],
)
def test_a_bad_value_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_env({name: text})


def test_one_late_beat_must_not_be_a_death() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_HEARTBEAT_TIMEOUT_S"):
        Config.from_env({"KVSTORE_HEARTBEAT_S": "16"})


@pytest.mark.parametrize(
    ("uri", "port", "root"),
    [
        ("127.0.0.1", "9091", "tcp://127.0.0.1:9091"),
        ("node-1.cluster", "1", "tcp://node-1.cluster:1"),
        ("::1", "9091", "tcp://[::1]:9091"),
        ("[::1]", "9091", "tcp://[::1]:9091"),
        ("fe80::1%eth0", "9091", "tcp://[fe80::1%eth0]:9091"),
        ("ipc:///run/job/scheduler", "", "ipc:///run/job/scheduler"),
        ("", "", ""),
    ],
)
def test_where_the_scheduler_is(uri: str, port: str, root: str) -> None:
    assert Config.from_env({"DMLC_PS_ROOT_URI": uri, "DMLC_PS_ROOT_PORT": port}).root == root


@pytest.mark.parametrize(
    ("uri", "port"),
    [
        ("127.0.0.1", ""),
        ("127.0.0.1", "0"),
        ("127.0.0.1", "65536"),
        ("127.0.0.1", "http"),
        ("tcp://127.0.0.1", "9091"),
        ("127.0.0.1:9091", "9091"),
    ],
)
def test_where_the_scheduler_cannot_be(uri: str, port: str) -> None:
    with pytest.raises(ConfigError, match="DMLC_PS_ROOT"):
        Config.from_env({"DMLC_PS_ROOT_URI": uri, "DMLC_PS_ROOT_PORT": port})


def test_a_job_can_be_joined() -> None:
    config = Config.from_env(JOB)
    assert config.require_job("worker") is config


@pytest.mark.parametrize("missing", ["DMLC_PS_ROOT_URI", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"])
def test_outside_a_job_the_error_says_what_to_run(missing: str) -> None:
    env = {name: text for name, text in JOB.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"not part of a distributed job: not set, or 0: {missing}; .*launch\.py"):
        Config.from_env(env).require_job("worker")


def test_a_count_of_none_is_named_as_if_it_were_missing() -> None:
    env = {**JOB, "DMLC_NUM_WORKER": "0", "DMLC_NUM_SERVER": "0"}
    with pytest.raises(ConfigError, match="not set, or 0: DMLC_NUM_WORKER, DMLC_NUM_SERVER; and"):
        Config.from_env(env).require_job("worker")


def test_another_role_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DMLC_ROLE=server.*python -m servers"):
        Config.from_env({**JOB, "DMLC_ROLE": "server"}).require_job("worker")
    with pytest.raises(ConfigError, match="DMLC_ROLE=worker"):
        Config.from_env(JOB).require_job("scheduler")


def test_a_job_without_a_name_gets_one_from_where_its_members_meet() -> None:
    one, other = Config.from_env(JOB), Config.from_env({**JOB, "DMLC_ROLE": "server", "DMLC_TASK_ID": "1"})
    assert one.job == other.job != Config.from_env({**JOB, "DMLC_PS_ROOT_PORT": "9092"}).job
    assert re.fullmatch("[0-9a-f]{16}", one.job)
    assert Config.from_env({}).job == Config().job == "none"


def test_a_port_that_something_else_was_given_is_not_ours() -> None:
    assert Config.from_env({**JOB, "PORT": "8080"}) == Config.from_env(JOB)


def test_with_keys_the_scheduler_is_reached_by_its_own() -> None:
    env = variables(2)[1]
    config = Config.from_env({**JOB, **env})
    assert config.keys is not None
    assert config.keys.secret == env["KVSTORE_SECRET_KEY"]
    assert config.root == with_key("tcp://127.0.0.1:9091", env["KVSTORE_ROOT_KEY"])
    assert config.job == Config.from_env(JOB).job
    assert config.window_bytes > 1 << 30
    inside = Config.from_env({**JOB, **env, "DMLC_PS_ROOT_URI": "ipc:///run/job/scheduler"})
    assert inside.root == "ipc:///run/job/scheduler"


def test_without_encryption_keys_are_not_read() -> None:
    config = Config.from_env({**JOB, **variables(2)[1], "KVSTORE_MEMBER_KEYS": "rubbish", "KVSTORE_ENCRYPTION": "0"})
    assert (config.keys, config.root) == (None, "tcp://127.0.0.1:9091")


def test_settings_are_shown_without_secrets() -> None:
    env = variables(2)[1]
    config = Config.from_env({**JOB, **env})
    assert env["KVSTORE_SECRET_KEY"] not in f"{config!r} {config} {config.keys!r}"
