"""Settings from the environment, their table, and what a bad value costs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobkeys import variables

from kvstore.errors import ConfigError
from kvstore.job import settings
from kvstore.job.config import Config
from kvstore.job.contract import COMPUTED, Contract, Role, aggregated, member_name, member_title, members
from kvstore.job.curve_keys import Keyring, with_key
from kvstore.job.settings import SETTINGS, Setting
from kvstore.job.valid_values import (
    ClassReference,
    ClassReferences,
    EarlierEnd,
    Flag,
    Integer,
    OneOf,
    RoundFaults,
    RoundWindow,
    RoundWindows,
    Seconds,
    Text,
)

# ---- settings from the environment: each variable, and what a bad value costs


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
    contract = replace(contract, aggregated=[[0, 1]], replicas=1, scheduler_log="/run/j/log", readers=4, min_workers=2)
    contract = replace(contract, max_workers=5)
    again = {"KVSTORE_START", "KVSTORE_LOST"}  # of a process that is started again
    schedulers = {"KVSTORE_ROOT_FD", "KVSTORE_SCHEDULER_LOG", "KVSTORE_READERS", "KVSTORE_READER_KEY"}
    schedulers.add("KVSTORE_OBSERVER_KEY")
    assert COMPUTED - set(contract.variables("scheduler", 0)) == {"KVSTORE_AGGREGATOR"} | again
    assert COMPUTED - set(contract.variables("worker", 0)) == schedulers | again
    absent = {"DMLC_JOB_CLUSTER", "KVSTORE_ROOT_FD", "KVSTORE_NUM_AGGREGATORS", "KVSTORE_AGGREGATOR", *KEYS}
    absent |= {"KVSTORE_REPLICAS", "KVSTORE_SCHEDULER_LOG", "KVSTORE_READERS", "KVSTORE_READER_KEY"} | again
    absent |= {"KVSTORE_OBSERVER_KEY", "KVSTORE_MIN_WORKERS", "KVSTORE_MAX_WORKERS"}
    assert COMPUTED - set(CONTRACT.variables("worker", 0)) == absent


# ---- the table of settings: what each accepts, what an error says, and that the documentation agrees with the table


ROOT = Path(__file__).parents[3]
PACKAGES = ("kvstore", "servers", "launcher", "workers", "examples")
NAMES = {name: setting for setting in SETTINGS for name in (setting.name, *setting.aliases)}
NO_SETTINGS = {"KVSTORE_END_OF_JOB"}  # the end of a here-document in a batch script


def test_all_settings_are_in_the_table_once() -> None:
    defined = [value for value in vars(settings).values() if isinstance(value, Setting)]
    assert sorted(map(id, defined)) == sorted(map(id, SETTINGS))
    assert len(NAMES) == sum(1 + len(each.aliases) for each in SETTINGS)


def test_defaults_are_valid_values() -> None:
    for each in SETTINGS:
        if each.default not in ("", 0, -1, ()):
            assert each.read({each.name: str(each.default)}) == each.default, each.name


def test_config_has_the_defaults_of_the_table() -> None:
    assert Config.from_env({}) == Config()


def test_every_variable_that_the_code_names_is_in_the_table() -> None:
    named = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r"""["']((?:KVSTORE|DMLC|MXNET)_[A-Z][A-Z_0-9]*)["']""", path.read_text()))
    assert named - NO_SETTINGS <= set(NAMES)


# ---- documentation


def rows(path: Path) -> dict[str, list[str]]:
    """The rows of the tables in ``path`` whose first cell names variables: the cells, by what is in the first one."""
    found = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and re.match(r"`[A-Z_]+`", cells[0]):
            found[cells[0]] = cells
    return found


def test_docs_settings_has_every_row_of_the_table() -> None:
    documented = (ROOT / "docs" / "settings.md").read_text().splitlines()
    missing = [each.row for each in SETTINGS if each.row not in documented]
    assert not missing, "python -m kvstore.job.settings prints the tables for docs/settings.md"
    assert set(rows(ROOT / "docs" / "settings.md")) == {each.row.strip("|").split("|")[0].strip() for each in SETTINGS}


def test_readme_names_about_ten_settings_with_the_defaults_of_the_table() -> None:
    documented = rows(ROOT / "README.md")
    assert 8 <= len(documented) <= 12
    for cells in documented.values():
        (name,) = re.findall(r"`([A-Z_]+)`", cells[0])
        assert cells[1] == NAMES[name].shown_default, name


def setting(values: Any, default: Any = None, *aliases: str) -> Setting[Any]:
    return Setting("KVSTORE_X", values, default, "what it is for", aliases=aliases)


def test_the_default_stands_for_what_is_not_set_or_empty() -> None:
    number = setting(Integer(0), 7)
    assert number.read({}) == number.read({"KVSTORE_X": " "}) == 7
    assert number.read({}, 8) == 8
    assert number.read({"KVSTORE_X": "9"}, 8) == 9


def test_the_name_goes_before_its_aliases() -> None:
    number = setting(Integer(0), 0, "OLD_X")
    assert number.read({"OLD_X": "3"}) == 3
    assert number.read({"OLD_X": "3", "KVSTORE_X": "4"}) == 4
    with pytest.raises(ConfigError, match=r"^OLD_X='x'"):
        number.read({"OLD_X": "x"})


@pytest.mark.parametrize(
    ("values", "text", "value"),
    [
        *((Flag(), text, True) for text in ("1", "true", "True", "YES", "on", " on ")),
        *((Flag(), text, False) for text in ("0", "false", "FALSE", "no", "Off")),
        (Integer(0), "0", 0),
        (Integer(1, 65535), "65535", 65535),
        (Seconds(), "0.001", 0.001),
        (Seconds(0), "0", 0.0),
        (EarlierEnd(), "exit code 7 1234.5", ("exit code 7", 1234.5)),
        (RoundFaults(), "stop:100, kill:9", (("kill", 9), ("stop", 100))),
        (OneOf(("tcp", "zeromq")), "ZeroMQ", "zeromq"),
        (Text("anything"), " a b ", "a b"),
        (RoundWindows(), "100", RoundWindow(1, 100)),
        (RoundWindows(), "500-600", RoundWindow(500, 600)),
        (RoundWindows(), "None", RoundWindow()),
        (ClassReferences(), "a.b:C", (ClassReference("c", "a.b", "C"),)),
        (ClassReferences(), "X=a:C.D, e:F,", (ClassReference("x", "a", "C.D"), ClassReference("f", "e", "F"))),
    ],
)
def test_what_a_setting_accepts(values: Any, text: str, value: Any) -> None:
    found = setting(values).read({"KVSTORE_X": text})
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("values", "text", "valid"),
    [
        (Flag(), "2", "1 or 0, true or false, yes or no, on or off"),
        (Integer(1), "0", "an integer, at least 1"),
        (Integer(1), "1.5", "an integer, at least 1"),
        (Integer(1, 65535), "65536", "an integer, from 1 to 65535"),
        (EarlierEnd(), "SIGKILL", "words and a number of seconds, such as `SIGKILL 1234.5`"),
        (EarlierEnd(), "SIGKILL at noon", "words and a number of seconds, such as `SIGKILL 1234.5`"),
        *((RoundWindows(), text, RoundWindows.valid) for text in ("0", "9-8", "1-", "-3", "1-2-3", "x", "1" * 16)),
        (Seconds(), "x", "a number of seconds, greater than 0"),
        (Seconds(), "0", "a number of seconds, greater than 0"),
        (Seconds(0.01), "0.001", "a number of seconds, at least 0.01"),
        (Seconds(0), "inf", "a number of seconds, at least 0"),
        (Seconds(0), "nan", "a number of seconds, at least 0"),
        (OneOf(("tcp", "zeromq")), "udp", "tcp, zeromq"),
        *(
            (ClassReferences(), text, ClassReferences.valid)
            for text in ("Lion", "a:", ":C", "a-b:C", "a:C()", "x y=a:C", "a:C;b:D", "a:C,b:C", "a:C b:D", "=a:C")
        ),
    ],
)
def test_an_error_says_what_was_given_and_what_is_valid(values: Any, text: str, valid: str) -> None:
    with pytest.raises(ConfigError) as caught:
        setting(values).read({"KVSTORE_X": text})
    assert str(caught.value) == f"KVSTORE_X={text!r} is not valid; valid: {valid}"
