"""What the environment says of a process: its rank, its host's address, the job's page and trace."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.job import address
from kvstore.job.address import Address, choose, interfaces, is_any, is_here, is_loopback, resolve
from kvstore.job.config import Config
from kvstore.job.page_address import TOKEN, lines, listen, prepared, token_of
from kvstore.job.ranks import FAMILIES, Ranks, manager_rank
from kvstore.job.trace_target import TraceTarget

# ---- ranks from the environment: what torchrun, Open MPI, MPICH and Slurm say, as they really say it


TORCH, OPENMPI, MPICH, SLURM = FAMILIES

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        (TORCHRUN, Ranks(TORCH, 3, 4, 1, 2, "node7", 29500, True, 2)),
        (MPIRUN, Ranks(OPENMPI, 1, 2, 1, 2)),
        (HYDRA, Ranks(MPICH, 0, 3, 0, 2)),
        (SRUN, Ranks(SLURM, 4, 5, 0, 1)),
        (SRUN | {"SLURM_NODEID": "1"}, Ranks(SLURM, 4, 5, 0, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, Ranks(SLURM, 4, 5, 0, 0)),
        (SRUN | TORCHRUN, Ranks(TORCH, 3, 4, 1, 2, "node7", 29500, True, 2)),
        (SRUN | MPIRUN, Ranks(OPENMPI, 1, 2, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Ranks(TORCH, 0, 2)),
        (MPIRUN | {"MASTER_ADDR": "node7", "MASTER_PORT": "5"}, Ranks(OPENMPI, 1, 2, 1, 2, "node7", 5)),
        (MPIRUN | {"MASTER_ADDR": "node7"}, Ranks(OPENMPI, 1, 2, 1, 2)),
        (MPIRUN | {"MASTER_PORT": "5"}, Ranks(OPENMPI, 1, 2, 1, 2)),
    ],
)
def test_what_each_says(env: dict[str, str], ranks: Ranks) -> None:
    assert Ranks.from_env(env) == ranks


# What Slurm's plugins for PMI-2 and PMIx add to the variables of srun.
PMI2 = SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5", "PMI_FD": "9", "PMI_JOBID": "7.0"}
PMIX = SRUN | {"PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.pmix.7.0"}


@pytest.mark.parametrize("env", [PMI2, PMIX, MPIRUN | PMIX], ids=["pmi2", "pmix", "pmix within mpirun"])
def test_srun_says_which_tasks_share_a_host_whatever_its_mpi_plugin_is(env: dict[str, str]) -> None:
    assert Ranks.from_env(env) == Ranks(SLURM, 4, 5, 0, 1)
    assert manager_rank(env) == 4
    one_node = env | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    ranks = Ranks.from_env(one_node)
    assert ranks is not None
    assert ranks.one_host


def test_an_mpirun_that_starts_its_agents_with_srun_counts_its_processes_itself() -> None:
    assert Ranks.from_env(SRUN | HYDRA) == Ranks(MPICH, 0, 3, 0, 2)
    assert Ranks.from_env(PMIX | HYDRA) == Ranks(MPICH, 0, 3, 0, 2)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (PMI2 | {"PMI_RANK": "1"}, "PMI_RANK=1, PMI_SIZE=5, SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5"),
        (PMI2 | {"PMI_SIZE": "8"}, "PMI_RANK=4, PMI_SIZE=8, SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5"),
        (MPIRUN | {"PMIX_RANK": "0"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, PMIX_RANK=0"),
        (SRUN | {"PMIX_RANK": "0"}, "SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5, PMIX_RANK=0"),
    ],
)
def test_two_ranks_of_which_none_can_be_the_inner_one_are_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"two ranks: {said}\. .* unset those"):
        Ranks.from_env(env)
    assert Ranks.from_env(env | TORCHRUN) == Ranks.from_env(TORCHRUN)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "captain"},
        {"WORLD_SIZE": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # a batch script
    ],
)
def test_who_has_no_rank(env: dict[str, str]) -> None:
    assert Ranks.from_env(env) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "x"}, "RANK='x' is not valid"),
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK='-1' is not valid"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not valid"),
    ],
)
def test_what_cannot_be_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranks.from_env(TORCHRUN | changed)


@pytest.mark.parametrize(
    ("env", "one_host"),
    [(TORCHRUN, False), (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, True), (MPIRUN, True), (HYDRA, False), (SRUN, False)],
)
def test_whether_all_are_on_one_host(env: dict[str, str], one_host: bool) -> None:
    ranks = Ranks.from_env(env)
    assert ranks is not None
    assert ranks.one_host == one_host


def test_settings_have_the_ranks_and_the_local_ones() -> None:
    config = Config.from_env(TORCHRUN)
    assert config.ranks == Ranks.from_env(TORCHRUN)
    assert (config.local_rank, config.local_size, config.in_job) == (1, 2, True)
    assert not Config().in_job


DMLC = {"DMLC_PS_ROOT_URI": "ipc:///x/scheduler", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}


@pytest.mark.parametrize("explicit", [DMLC, DMLC | {"RANK": "nonsense"}, {"DMLC_ROLE": "server"}])
def test_a_job_that_is_described_goes_before_ranks(explicit: dict[str, Any]) -> None:
    config = Config.from_env(TORCHRUN | explicit)
    assert config.ranks is None
    assert config.local_rank == -1


def test_outside_of_all_the_error_says_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"neither torchrun, mpirun nor srun .* launch\.py -n 2 .* or torchrun "):
        Config().require_job("worker")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, -1),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"PMIX_RANK": "0"}, 0),
        ({"PMI_RANK": "12", "SLURM_PROCID": "0"}, 12),
        ({"SLURM_PROCID": "7"}, 7),
        ({"SGE_TASK_ID": "1"}, 0),
        ({"SGE_TASK_ID": "undefined"}, -1),
        ({"PMI_RANK": "", "SLURM_PROCID": "-1"}, -1),
        ({"PMI_RANK": "²"}, -1),
    ],
)
def test_each_manager_says_which_one_it_is_in_its_own_way(environ: dict[str, str], expected: int) -> None:
    assert manager_rank(environ) == expected


# ---- the address of this host: told, of an interface, or where the route begins


THERE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth1", "192.168.1.5"), ("lo", "::1"), ("eth0", "2001:db8::5")]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are listed on Linux only")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two networks, from which everything is reached by the first; ``node-7`` is itself."""
    names = {"node-7": ["10.0.0.5"], "head": ["10.0.0.1"], "here": ["10.9.9.9", "10.0.0.5"]}
    monkeypatch.setattr(address, "interfaces", lambda: THERE)
    monkeypatch.setattr(address, "is_here", lambda ip: ip in dict(map(reversed, THERE)))
    monkeypatch.setattr(address, "resolve", lambda name: names.get(name, [name]))
    monkeypatch.setattr(address, "source", lambda toward: "2001:db8::5" if ":" in toward else "10.0.0.5")


def test_what_the_user_says_goes_before_all_else(host: None) -> None:
    given = Address("10.0.0.5", "given as DMLC_NODE_HOST")
    assert choose(host="10.0.0.5", interface="eth1", toward="head") == given
    assert choose(host="node-7") == given
    assert choose(host="here") == given, "the one of its addresses that is here"


@pytest.mark.parametrize("name", ["10.0.0.1", "head", "0.0.0.0", "::"])
def test_what_is_not_here_is_refused_and_what_is_here_is_listed(host: None, name: str) -> None:
    listed = r"this host has lo \(127.0.0.1\), eth0 \(10.0.0.5\), eth1 \(192.168.1.5\)"
    with pytest.raises(ConfigError, match=f"DMLC_NODE_HOST={name} must be the address .*{listed}"):
        choose(host=name)


def test_an_interface(host: None) -> None:
    assert choose(interface="eth1", toward="head") == Address("192.168.1.5", "the address of eth1")
    assert choose(interface="eth0").ip == "10.0.0.5"
    assert choose(interface="eth0", toward="2001:db8::1").ip == "2001:db8::5"
    assert choose(interface="eth1", toward="2001:db8::1").ip == "192.168.1.5", "it has no other"
    with pytest.raises(ConfigError, match=r"DMLC_INTERFACE=ib0: .*this host has lo .*, eth1 \(192.168.1.5\)"):
        choose(interface="ib0")


def test_where_the_route_begins(host: None) -> None:
    chosen = choose(toward="10.0.0.1")
    assert chosen == Address(
        "10.0.0.5", "it leads to 10.0.0.1; there are also eth1 (192.168.1.5)", ("eth1 (192.168.1.5)",)
    )
    assert choose(toward="2001:db8::1") == Address("2001:db8::5", "it leads to 2001:db8::1")
    assert choose().why.startswith("it is what other hosts are likely to reach; there are also eth1")


@pytest.mark.parametrize(("toward", "ip"), [("127.0.0.1", "127.0.0.1"), ("127.1.2.3", "127.0.0.1")])
def test_a_real_route_on_this_host(toward: str, ip: str) -> None:
    assert choose(toward=toward) == Address(ip, f"it leads to {toward}")


def test_a_real_route_by_name() -> None:
    assert choose(toward="localhost").ip in ("127.0.0.1", "::1")


def test_nothing_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(socket.socket):
        def connect(self, _address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address.socket, "socket", Nowhere)
    with pytest.raises(ConfigError, match=r"no route from this host to 10.0.0.1: set DMLC_NODE_HOST; this host has "):
        choose(toward="10.0.0.1")
    monkeypatch.setattr(address, "interfaces", lambda: [("lo", "127.0.0.1")])
    with pytest.raises(ConfigError, match="no route from this host to other hosts"):
        choose()


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for wanted in ({"host": "node-7"}, {"toward": "node-7"}):
        with pytest.raises(ConfigError, match=r"cannot resolve 'node-7', .*not known"):
            choose(**wanted)
    with pytest.raises(ConfigError, match="cannot resolve"):
        resolve("x" * 70)


@LINUX
def test_the_interfaces_of_this_host() -> None:
    found = interfaces()
    assert ("lo", "127.0.0.1") in found
    assert all(is_here(ip) for _, ip in found)
    assert not any(ip.startswith("fe80") for _, ip in found)
    assert choose(interface="lo").ip == "127.0.0.1"


@LINUX
def test_ipv6_addresses_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    monkeypatch.setattr(address, "IF_INET6", listed)
    assert [ip for _, ip in interfaces() if ":" in ip] == ["fd00::2", "::1"]
    monkeypatch.setattr(address, "IF_INET6", tmp_path / "none")
    assert not [ip for _, ip in interfaces() if ":" in ip]


def test_elsewhere_no_interfaces_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interfaces() == []
    with pytest.raises(ConfigError, match="this host has no known interface"):
        choose(interface="en0")


def test_what_is_here() -> None:
    assert is_here("127.0.0.1")
    assert is_here("127.8.8.8")
    assert not is_here("203.0.113.77")
    assert not is_here("2001:db8::77")


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1", "127.1.2.3"])
def test_what_only_this_host_reaches(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127x.example", "127.0.0.1.example", "10.0.0.1", "head", "fe80::1", "0.0.0.0", "::"])
def test_what_others_reach(host: str) -> None:
    assert not is_loopback(host)
    assert is_any(host) is (host in ("0.0.0.0", "::"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1", "localhost", "a.cluster.local"])
def test_an_endpoint_gives_back_what_it_was_made_of(host: str) -> None:
    assert address.host_and_port(address.tcp_endpoint(host, 99)) == (host, "99")


# ---- where the page of a job is, and its token


def test_it_listens_for_this_machine_alone() -> None:
    with listen(0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen(port)


def test_a_file_gets_a_token_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = token_of(file)
    assert TOKEN.fullmatch(token)
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_of(file) == token


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token_of(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        token_of(file)


@pytest.mark.parametrize("content", ["", "short", "x" * 31, "with spaces " * 4, "ä" * 40])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="has no token") as caught:
        token_of(file)
    assert not content or content not in str(caught.value)


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none/token"):
        token_of(tmp_path / "none" / "token")


@pytest.mark.parametrize(
    ("env", "count"), [({"DISPLAY": ":0"}, 1), ({"DISPLAY": ":0", "SSH_CONNECTION": "a 1 b 2"}, 2), ({}, 2)]
)
def test_where_no_browser_can_open_it_a_line_says_how_to_reach_it(env: dict[str, str], count: int) -> None:
    first, *others = lines(8080, "t" * 40, env)
    assert first == f"dashboard: http://127.0.0.1:8080/?token={'t' * 40}"
    assert len(others) == count - 1
    assert all(f"ssh -N -L 8080:127.0.0.1:8080 {socket.gethostname()}" in line for line in others)


def test_settings_say_the_port_and_the_token(tmp_path: Path) -> None:
    token = token_of(tmp_path / "token")
    listener, found = prepared({"KVSTORE_DASHBOARD_TOKEN_FILE": str(tmp_path / "token")})
    with listener:
        assert found == token
        with pytest.raises(ConfigError, match="set KVSTORE_DASHBOARD_PORT to one that is free"):
            prepared({"KVSTORE_DASHBOARD_PORT": str(listener.getsockname()[1])})
    listener, found = prepared({})
    with listener:
        assert TOKEN.fullmatch(found)
        assert found != token


# ---- the file of a trace, and the rounds that it has


@pytest.mark.parametrize(
    ("given", "name", "rounds"),
    [("t.json", "t.json", "1-100"), ("t.json:500-600", "t.json", "500-600"), ("a:b.json:7", "a:b.json", "1-7")],
)
def test_rounds_come_behind_the_last_colon(given: str, name: str, rounds: str) -> None:
    target = TraceTarget.parse(given)
    assert (target.file, str(target.rounds)) == (Path(name).absolute(), rounds)


@pytest.mark.parametrize(
    ("given", "said"),
    [("t.json:0", "'0' is not valid"), ("t.json:9-8", "'9-8' is not valid"), (":7", "no file"), (".", "directory")],
)
def test_without_a_file_or_rounds_it_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TraceTarget.parse(given)


def test_the_file_is_a_trace_from_the_beginning_or_cannot_be_written(tmp_path: Path) -> None:
    TraceTarget.parse(f"{tmp_path}/t.json").prepare()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
    with pytest.raises(ConfigError, match=r"cannot write .*none/t\.json"):
        TraceTarget.parse(f"{tmp_path}/none/t.json").prepare()
