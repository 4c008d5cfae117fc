"""Before a job over ssh starts: every host is asked, and one report tells all that is wrong with them."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from launched import ROOT
from sites import Running, Site
from waiting import until

STARTED = "import sys; print('STARTED', flush=True)"


def hostfile(site: Site, *lines: str) -> tuple[str, str]:
    path = site.directory / f"hosts-{len(list(site.directory.iterdir()))}"
    path.write_text("\n".join(lines) + "\n")
    return "-H", str(path)


def interpreter(path: Path, *lines: str) -> Path:
    """Something that passes for a Python, after some lines of shell."""
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"']) + "\n")
    path.chmod(0o755)
    return path


def nothing_runs(site: Site) -> None:
    def left() -> list[str]:
        return [line for i in range(len(site.hosts)) for line in site.hosts.processes(i).values() if "python" in line]

    until(lambda: not left(), "the agents to go", step=0.1)


@pytest.fixture(params=["silent", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("refusing", "nobody"))])
def unreachable(request: pytest.FixtureRequest, hosts: Hosts) -> str:
    return str(getattr(hosts, request.param))


def refused(run: Running) -> str:
    """It has started nothing, and says why."""
    assert run.wait() == 1, run.err
    assert "STARTED" not in run.out
    assert "nothing was started" in run.err
    assert "Traceback" not in run.err
    return run.err


def test_one_of_eight_is_unreachable(over_ssh: Site, hosts: Hosts, unreachable: str) -> None:
    seven = [*hosts.addresses, *hosts.names[:3]]
    mark = over_ssh.directory / "begun"
    words = hostfile(over_ssh, *seven, unreachable)
    said = refused(over_ssh.launch(*words, "-n", "8", "-s", "8", f"touch {mark}", server=STARTED))
    assert "1 of 8 hosts cannot take part" in said
    assert f"\n  {unreachable}: ssh to {unreachable} exited with code 255: ssh: connect to host {unreachable}" in said
    assert not mark.exists()
    nothing_runs(over_ssh)


def test_all_failures_are_in_one_report(over_ssh: Site, hosts: Hosts) -> None:
    """Each host has its own: its interpreter there is a script that looks at who it is."""
    fake = over_ssh.directory / "fake" / "kvstore"
    fake.mkdir(parents=True)
    real = ROOT / "kvstore"
    (fake / "__init__.py").write_text(
        f'__path__ = [{str(real)!r}]\n__version__ = "0.0.1"\ncreate = None\nimport kvstore.store.base\n'
    )
    python = interpreter(
        over_ssh.directory / "python",
        'case "$(hostname)" in',
        f"{hosts.names[0]}) export PYTHONPATH={ROOT}",
        f'  set -- "$1" "$(printf %s "$2" | sed "s#{ROOT}#{fake.parent}#")" ;;',  # as if the clone there were older
        f"{hosts.names[1]}) echo 'exec: /opt/python: not found' >&2; exit 127 ;;",
        f"{hosts.names[2]}) cd /; exec {sys.executable} -I -S -c 'import kvstore' ;;",
        "esac",
    )
    lines = (*hosts.addresses, hosts.refusing, hosts.silent, "no-such-host.invalid")
    run = over_ssh.launch(*hostfile(over_ssh, *lines), "--python", str(python), "-n", "7", "-s", "1", "true")
    said = refused(run)
    assert "6 of 7 hosts cannot take part" in said
    assert f"{hosts.addresses[0]}: has torch-kvstore 0.0.1 (Python 3." in said
    assert (
        f"{hosts.addresses[1]}: ssh to {hosts.addresses[1]} exited with code 127: exec: /opt/python: not found" in said
    )
    assert "name one with --python" in said
    assert f"{hosts.addresses[2]}: ssh to {hosts.addresses[2]} exited with code 1: " in said
    assert "No module named 'kvstore'" in said
    assert "the package is not installed for that interpreter" in said
    assert f"{hosts.addresses[3]}: " not in said
    assert "Connection refused\n    (no sshd listens there" in said
    assert "timed out\n    (it is down, or a firewall is between)" in said
    assert "Could not resolve hostname no-such-host.invalid" in said
    nothing_runs(over_ssh)


def test_what_is_wrong_there_and_what_cannot_be_reached_are_in_one_report(over_ssh: Site, hosts: Hosts) -> None:
    """A directory of this machine's own /tmp is on no host."""
    over_ssh.directory = Path("/tmp") / f"kvtest-{time.time_ns()}"
    over_ssh.directory.mkdir()
    try:
        there = over_ssh.directory
        hosts.run(0, ["mkdir", str(there)])
        run = over_ssh.launch(*hostfile(over_ssh, *hosts.addresses[:2], hosts.refusing), "-n", "3", "-s", "1", "true")
        said = refused(run)
        assert "2 of 3 hosts" in said
        assert f"{hosts.addresses[1]}: there is no directory {there}; --sync-dst-dir copies" in said
        assert f"{hosts.refusing}: " in said
        assert f"{hosts.addresses[0]}: " not in said
    finally:
        shutil.rmtree(over_ssh.directory)


@contextlib.contextmanager
def own_network(hosts: Hosts, i: int, address: str) -> Iterator[str]:
    """A host has another network, in which it is alone."""
    for words in ("link add own0 type veth peer own1", f"addr add {address}/24 dev own0", "link set own0 up"):
        assert hosts.run(i, ["ip", *words.split()]).stderr == ""
    hosts.run(i, ["ip", "link", "set", "own1", "up"])
    try:
        yield address
    finally:
        hosts.run(i, ["ip", "link", "del", "own0"])


@pytest.fixture
def walled(hosts: Hosts) -> Iterator[str]:
    with own_network(hosts, 1, "203.0.113.7") as address:
        yield address


def test_an_address_that_others_do_not_reach(over_ssh: Site, hosts: Hosts, walled: str) -> None:
    with own_network(hosts, 0, "203.0.113.8"):
        words = hostfile(over_ssh, *hosts.addresses[:2], hosts.refusing)
        options = ("--interface", "own0", "--host-ip", hosts.outside)
        said = refused(over_ssh.launch(*words, *options, "-n", "3", "-s", "3", "true"))
    for mine, other in ((0, 1), (1, 0)):
        assert f"{hosts.addresses[mine]}: cannot reach {hosts.addresses[other]} (" in said
    assert "name the network that all share with --interface" in said
    assert f"{hosts.refusing}: " in said, "the report was to tell all"
    assert "3 of 3 hosts" in said


def test_which_address_was_chosen_is_told(over_ssh: Site, hosts: Hosts, walled: str) -> None:
    code = "import os; print(os.environ['DMLC_NODE_HOST'], os.environ['DMLC_PS_ROOT_URI'])"
    words = hostfile(over_ssh, *hosts.addresses[:2])
    run = over_ssh.launch(*words, "-n", "2", "-s", "1", "python", "-S", "-c", code)
    assert run.wait() == 0
    assert run.lines == [f"[worker {i}] {hosts.addresses[i]} {hosts.outside}" for i in range(2)]
    where = hosts.addresses[1]
    why = f"it leads to {hosts.outside}; there are also own0 ({walled})"
    assert f"launch.py: {where} is reached at {where}: {why}\n" in run.err
    assert f"{hosts.addresses[0]} is reached" not in run.err, "it has one network alone"


def test_interface_and_host_ip(over_ssh: Site, hosts: Hosts) -> None:
    code = "import os; print(os.environ['DMLC_NODE_HOST'], os.environ['DMLC_PS_ROOT_URI'])"
    words = hostfile(over_ssh, *hosts.addresses[:2])
    options = ("--interface", "eth0", "--host-ip", hosts.outside)
    run = over_ssh.launch(*words, *options, "-n", "2", "-s", "1", "python", "-S", "-c", code)
    assert run.wait() == 0, run.err
    assert run.lines == [f"[worker {i}] {hosts.addresses[i]} {hosts.outside}" for i in range(2)]
    assert run.err == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--host-ip", "192.0.2.99"), "--host-ip 192.0.2.99 must be the address by which the other hosts reach"),
        (("--interface", "none0"), "--interface none0: no interface with that name has an address; this host has "),
    ],
)
def test_an_address_that_this_machine_has_not(
    over_ssh: Site, hosts: Hosts, options: tuple[str, ...], text: str
) -> None:
    run = over_ssh.launch(*hostfile(over_ssh, hosts.addresses[0]), *options, "-n", "1", "-s", "1", "true")
    assert run.wait() == 2
    assert text in run.err
    nothing_runs(over_ssh)


def test_an_interface_that_a_host_has_not(over_ssh: Site, hosts: Hosts, walled: str) -> None:
    options = ("--interface", "own0", "--host-ip", hosts.outside)
    run = over_ssh.launch(*hostfile(over_ssh, *hosts.addresses[:2]), *options, "-n", "2", "-s", "1", "true")
    said = refused(run)
    why = "cannot choose an address for this host: --interface own0: no interface with that name"
    assert f"{hosts.addresses[0]}: {why}" in said


def test_a_changed_host_key_is_refused(over_ssh: Site, hosts: Hosts) -> None:
    known = over_ssh.directory / "known"
    text = (hosts.directory / "known_hosts").read_text()
    text = text.replace(f"{hosts.addresses[1]} ", "other ").replace(f"{hosts.addresses[0]} ", f"{hosts.addresses[1]} ")
    known.write_text(text)
    words = hostfile(over_ssh, hosts.addresses[1])
    option = ("--ssh-option", f"UserKnownHostsFile={known}")
    said = refused(over_ssh.launch(*words, *option, "-n", "1", "-s", "1", "true"))
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in said
    assert "(its key is not the one that ssh knows" in said


def test_an_unknown_host_is_refused_and_can_be_accepted(over_ssh: Site, hosts: Hosts) -> None:
    known = over_ssh.directory / "known"
    words = (*hostfile(over_ssh, hosts.addresses[1]), "--ssh-option", f"UserKnownHostsFile={known}", "-n1", "-s1")
    said = refused(over_ssh.launch(*words, "true"))
    assert "Host key verification failed" in said
    assert "--ssh-option StrictHostKeyChecking=accept-new" in said
    run = over_ssh.launch(*words, "--ssh-option", "StrictHostKeyChecking=accept-new", "true")
    assert run.wait() == 0, run.err
    assert hosts.addresses[1] in known.read_text()


def test_ssh_configurations_are_honoured(over_ssh: Site, hosts: Hosts, tmp_path: Path) -> None:
    """Also what would be in our way: a terminal, a command, forwarded ports, and connections that stay."""
    over_ssh.env = {name: value for name, value in over_ssh.env.items() if name != "PATH"} | {"PATH": "/usr/bin:/bin"}
    config = tmp_path / "config"
    config.write_text(
        f"Host mine\n  HostName {hosts.addresses[2]}\n"
        "Host *\n  RequestTTY force\n  RemoteCommand cat\n  LocalForward 127.0.0.1:22 127.0.0.1:22\n"
        f"  ControlMaster auto\n  ControlPath /tmp/kvt-%C\n  ControlPersist 600\n"
        f"Include {hosts.ssh_config}\n"
    )
    code = "import socket; print(socket.gethostname())"
    words = (*hostfile(over_ssh, "mine"), "--ssh-config", str(config), "-n", "1", "-s", "1")
    run = over_ssh.launch(*words, "python", "-S", "-c", code)
    assert run.wait() == 0, run.err
    assert run.lines == [f"[worker 0] {hosts.names[2]}"]
    assert not list(tmp_path.glob("c*=*")) + [p for p in tmp_path.iterdir() if p.is_socket()], "a connection stays"


def test_an_ssh_configuration_that_is_not_there(over_ssh: Site, hosts: Hosts) -> None:
    run = over_ssh.launch(*hostfile(over_ssh, "a"), "--ssh-config", "/none", "-n", "1", "-s", "1", "true")
    assert run.wait() == 2
    assert run.err == "launch.py: cannot read --ssh-config /none\n"


def test_something_else_than_an_agent_answers(over_ssh: Site, hosts: Hosts) -> None:
    python = interpreter(over_ssh.directory / "python", "echo Welcome; echo to this; exit 0")
    words = (*hostfile(over_ssh, hosts.addresses[0]), "--python", str(python), "-n", "1", "-s", "1")
    said = refused(over_ssh.launch(*words, "true"))
    assert "exited with code 0: Welcome\n    to this" in said


def test_too_few_files(over_ssh: Site, hosts: Hosts) -> None:
    lines = [f"host{i}" for i in range(100)]
    over_ssh.enter = lambda argv, cwd: ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *argv]
    run = over_ssh.launch(*hostfile(over_ssh, *lines), "-n", "100", "-s", "1", "true")
    assert run.wait() == 2
    assert "open files, but 128 are allowed; raise that: ulimit -n " in run.err


def test_a_command_that_is_not_there(over_ssh: Site, hosts: Hosts) -> None:
    said = refused(over_ssh.launch(*hostfile(over_ssh, *hosts.addresses[:2]), "-n", "2", "-s", "1", "no-such-program"))
    assert f"{hosts.addresses[1]}: cannot start the command: there is no command no-such-program" in said
    assert "2 of 2 hosts" in said


def test_a_command_on_a_path_that_workers_get(over_ssh: Site, hosts: Hosts) -> None:
    program = over_ssh.directory / "bin" / "mine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    words = (*hostfile(over_ssh, hosts.addresses[0]), "-n", "1", "-s", "1", "--env-worker")
    run = over_ssh.launch(*words, f"PATH:{program.parent}:/usr/bin:/bin", "mine")
    assert run.wait() == 0, run.err
    assert run.lines == ["[worker 0] found"]
