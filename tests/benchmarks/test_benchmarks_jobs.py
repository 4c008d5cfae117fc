from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.missing import need

from benchmarks import hosts as hosts_module
from benchmarks import peers as peers_module
from benchmarks.contenders import Limit, ranks
from benchmarks.dmlc import Layout, members
from benchmarks.figures import Result, Row
from benchmarks.hosts import INTERFACE, hosts, require
from benchmarks.jobs import HERE, JobFailed, Member, Place, Unavailable, run, scratch
from benchmarks.peers import Peers, default_cache
from benchmarks.suites import network as network_module
from benchmarks.suites.network import Counted, add_limit, network, wire_ms

HOSTS = [Place(f"10.77.0.{number}", f"host{number}", f"/dev/shm/host{number}") for number in (1, 2)]


def python(script: str, name: str = "it", **env: str) -> Member:
    return Member(name, [sys.executable, "-c", script], env)


def test_the_report_comes_back():
    with scratch() as folder:
        path = folder / "report"
        script = f"import json, os; open({str(path)!r}, 'w').write(json.dumps(os.environ['GREETING']))"
        assert run([python(script, GREETING="hello")], path) == "hello"
    assert not folder.exists()


def test_one_that_fails_ends_the_others_and_is_quoted(tmp_path):
    path, draft = str(tmp_path / "pid"), str(tmp_path / "draft")
    script = (
        f"import os, time; open({draft!r}, 'w').write(str(os.getpid())); os.rename({draft!r}, {path!r}); time.sleep(60)"
    )
    failing = f"import os, sys, time\nwhile not os.path.exists({path!r}): time.sleep(.01)\nsys.exit('Boom')"
    start = time.monotonic()
    with pytest.raises(JobFailed, match="worker 1 exited with 1:\n    Boom"):
        run([python(script, "worker 0"), python(failing, "worker 1")], tmp_path / "report")
    assert time.monotonic() - start < 50
    pid = int(Path(path).read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_does_not_end_is_named(tmp_path):
    with pytest.raises(JobFailed, match=r"it had not ended after 0\.3 s"):
        run([python("import time; time.sleep(60)")], tmp_path / "report", timeout_s=0.3)


def test_no_report_is_a_failure(tmp_path):
    with pytest.raises(JobFailed, match="none left a report"):
        run([python("pass")], tmp_path / "report")


def test_members_are_in_no_job_but_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "server")
    path = tmp_path / "report"
    assert run([python(f"import os; open({str(path)!r}, 'w').write(str(int('DMLC_ROLE' in os.environ)))")], path) == 0


def test_a_jobs_members_have_the_environment_of_mxnets_launchers():
    made = members(Layout(HOSTS, HOSTS[1:]), servers=["serve"], workers=["work"], env={"A": "b"})
    assert [member.name for member in made] == ["scheduler 0", "server 0", "worker 0", "worker 1"]
    assert [member.argv for member in made] == [["serve"], ["serve"], ["work"], ["work"]]
    assert made[3].env | {"DMLC_PS_ROOT_PORT": "any"} == {
        "A": "b",
        "DMLC_NODE_HOST": "10.77.0.2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_PS_ROOT_PORT": "any",
        "DMLC_PS_ROOT_URI": "10.77.0.1",
        "DMLC_ROLE": "worker",
        "DMLC_TASK_ID": "1",
    }
    assert len({member.env["DMLC_PS_ROOT_PORT"] for member in made}) == 1
    assert made[1].place.wrap(["serve"])[:4] == ["ip", "netns", "exec", "host2"]
    assert made[1].place.wrap(["serve"])[-2:] == ["/dev/shm/host2", "serve"]
    assert HERE.wrap(["serve"]) == ["serve"]


def test_ranks_of_gloo_know_their_interface_where_they_are_in_a_host():
    made = ranks(["sum"], [HERE, HOSTS[0]])
    assert made[0].env == {"RANK": "0", "WORLD_SIZE": "2"}
    assert made[1].env == {"RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}


def test_hosts_need_root_and_say_so(monkeypatch, session):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"), hosts(2):
        pass
    made = session("network")
    network(made)
    assert "network: skipped: hosts are network namespaces, which need root" in made.console.file.getvalue()
    assert not made.results
    assert not made.failures


def test_hosts_need_iproute2_and_say_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: None)
    with pytest.raises(Unavailable, match="ip and tc and mount; on Debian and Ubuntu: apt-get install iproute2"):
        require()


def test_hosts_are_removed_when_making_them_fails(monkeypatch):
    said = []

    def pretend(*words):
        said.append(words)
        if words[0] == "tc":
            raise Unavailable("no tbf")
        return ""

    monkeypatch.setattr(hosts_module, "require", lambda: None)
    monkeypatch.setattr(hosts_module, "_run", pretend)
    with pytest.raises(Unavailable, match="no tbf"), hosts(2):
        pass
    added = {words[3] for words in said if words[:3] == ("ip", "netns", "add")}
    removed = {words[3] for words in said if words[:3] == ("ip", "netns", "del")}
    assert len(added) == 2
    assert added <= removed


def test_what_the_wire_allows():
    assert wire_ms(102_228_128, 4, servers_apart=False) == pytest.approx(1227, abs=1)
    assert wire_ms(102_228_128, 4, servers_apart=True) == pytest.approx(818, abs=1)


def test_the_limit_of_a_step_across_hosts():
    rows = [Row("kvstore", [500.0]), Row("alone", [300.0]), Row("alone, forward only", [100.0]), Row("wire", [400.0])]
    result = Result("hosts-train", "", rows)
    add_limit(result)
    assert result.row("limit").median == pytest.approx(1.1 * 400 + 100)
    assert Limit("wire", 818.0).run() == {"wire": [818.0]}


def test_environments_of_peers_are_made_once_in_a_cache(tmp_path, monkeypatch):
    ran = []

    def pretend(argv):
        ran.append(argv[1:3])
        if argv[1] == "-c" or "pip" in argv:
            raise Unavailable("no network")

    monkeypatch.setattr(peers_module, "_run", pretend)
    monkeypatch.setattr(peers_module, "_old_python", lambda: "python3")
    with pytest.raises(Unavailable, match="no network"):
        Peers(("mxnet",), tmp_path).mxnet()
    assert ran == [["-c", "import mxnet"], ["-m", "venv"], ["-m", "pip"]]
    monkeypatch.setattr(peers_module, "_run", lambda argv: None)
    assert Peers(("mxnet",), tmp_path / "made").mxnet() == str(tmp_path / "made" / "mxnet" / "bin" / "python")


def test_the_cache_is_the_users_or_the_one_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "kvstore-bench"
    monkeypatch.setenv("KVSTORE_BENCH_PEERS", "/elsewhere")
    assert str(default_cache()) == "/elsewhere"


@pytest.mark.parametrize(("megabytes", "crossed"), [(3, False), (154 * 7, True)])
def test_what_did_not_cross_the_wire_is_no_measurement(monkeypatch, fake, megabytes, crossed):
    """Shared memory between hosts that are one machine once gave a fifth of what the wire allows."""
    counters = iter([1000, 1000 + megabytes * 10**6])
    monkeypatch.setattr(network_module, "sent", lambda host: next(counters))
    counted = Counted(fake("kvstore", [245.0]), HOSTS[0], rounds=4, nbytes=153e6)
    if crossed:
        assert counted.run() == {"kvstore": [245.0]}
        assert counted.note == "a worker's host sent 154 MB a round, what goes before the first included"
    else:
        with pytest.raises(JobFailed, match="sent 3 MB, and must have sent 536 at the very least"):
            counted.run()


def test_hosts_are_as_they_should_be_share_no_memory_and_leave_nothing_behind():
    need("ip", "tc")
    try:
        with hosts(2, mtu=9000) as (one, other):
            for host in (one, other):
                words = host.wrap(["cat", f"/sys/class/net/{INTERFACE}/mtu"])
                assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "9000\n"
            subprocess.run(one.wrap(["touch", "/dev/shm/mine"]), check=True)
            assert subprocess.run(one.wrap(["test", "-e", "/dev/shm/mine"]), check=False).returncode == 0
            assert subprocess.run(other.wrap(["test", "-e", "/dev/shm/mine"]), check=False).returncode == 1
            assert not Path("/dev/shm/mine").exists()
    except Unavailable as error:
        pytest.skip(str(error))
    assert not Path(one.shm).exists()
    assert (
        one.namespace not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )
