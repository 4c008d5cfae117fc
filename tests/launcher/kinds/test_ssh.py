"""Jobs over ssh on real hosts: what is asked before one starts, who runs where, and what reaches it unharmed."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from any_host import HOSTS
from cluster.hosts import Hosts
from cluster.missing import need
from cluster.watch import watch_ps
from hypothesis import given
from launched import ROOT, SPOKEN, when_spoken
from sites import Running, Site
from waiting import until

from launcher.hosts.hostfile import Host
from launcher.job.description import Cluster
from launcher.kinds.ssh import remote_command, rsync

# ---- jobs over ssh on real hosts: who runs where, and what reaches it unharmed


WHO = (
    "import os, socket; print(socket.gethostname(), *map(os.environ.get, ('KVSTORE_LOCAL_RANK', 'KVSTORE_LOCAL_SIZE')))"
)
SERVER = (
    "import os, signal, socket; print(socket.gethostname(), flush=True) if os.environ['DMLC_ROLE'] == 'server' else 0; "
    f"{SPOKEN}; signal.pause()"
)

# Everything that shells, ssh, rsync and msgpack like to spoil.
AWKWARD = [
    "",
    " ",
    "a b",
    "'",
    '"',
    'it\'s "so"',
    "$(touch spoilt)",
    "`touch spoilt`",
    "$HOME",
    "${HOME}",
    "two\nlines\n",
    "back\\slash\\",
    "!history!",
    "*",
    "~",
    "#no comment",
    "a;b|c&d>e<f",
    "-n",
    "--",
    "%s%n",
    "\t\r\x01\x1b[31m",
    "größe ☃ 猫",
    os.fsdecode(b"\xff\xfe\x80"),
    "x" * 100_000,
]


def hostfile(site: Site, *lines: str, name: str = "hosts") -> str:
    path = site.directory / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def done(run: Running) -> list[str]:
    assert run.wait() == 0, run.err
    return run.lines


@pytest.mark.parametrize(
    ("options", "order", "servers"),
    [
        ((), [0, 0, 1, 1, 1], [2, 2, 3]),
        pytest.param(("--placement", "round-robin"), [0, 1, 0, 1, 1], [2, 3, 2], marks=pytest.mark.release),
    ],
)
def test_slots_are_filled_and_servers_are_on_hosts_of_their_own(
    over_ssh: Site, hosts: Hosts, options: tuple[str, ...], order: list[int], servers: list[int]
) -> None:
    lines = ["# two hosts", "", f"{hosts.names[0]} slots=2", f"root@{hosts.names[1]}:22 slots=3  # with more", ""]
    own = hostfile(over_ssh, f"{hosts.names[2]} slots=2", hosts.names[3], name="servers")
    words = ("-H", hostfile(over_ssh, *lines), "--server-hosts", own, *options, "-n", "5", "-s", "3")
    code = (
        when_spoken("server0", "server1", "server2")
        + WHO
        + "; print(*map(os.environ.get, ('DMLC_NODE_HOST', 'DMLC_PS_ROOT_URI')))"
    )
    words += ("--interface", "eth0", "--host-ip", hosts.outside)
    run = over_ssh.launch(*words, "python", "-S", "-c", code, server=SERVER)
    lines = done(run)
    assert run.err == ""
    placed = [line for line in lines if line.endswith(hosts.outside)]
    assert [line.split()[2] for line in placed] == [hosts.addresses[i] for i in order]
    workers = [line.split() for line in lines if "worker" in line and line not in placed]
    assert [words[2] for words in workers] == [hosts.names[i] for i in order]
    for i, count in ((0, 2), (1, 3)):
        there = [words[3:] for words in workers if words[2] == hosts.names[i]]
        assert there == [[str(n), str(count)] for n in range(count)]
    assert [line.split()[2] for line in lines if "server" in line] == [hosts.names[i] for i in servers]


def test_this_machine_and_another(over_ssh: Site, hosts: Hosts) -> None:
    """SINGA's `localhost:4` is four slots; this machine needs no ssh, and has an address that the others reach."""
    code = "import os, socket; print(socket.gethostname(), os.environ['DMLC_NODE_HOST'])"
    words = ("-H", hostfile(over_ssh, "localhost:2", hosts.names[0]), "-n", "3", "-s", "2")
    run = over_ssh.launch(*words, "python", "-S", "-c", code)
    me = os.uname().nodename
    assert [line.split()[2:] for line in done(run)] == [
        [me, hosts.outside],
        [me, hosts.outside],
        [hosts.names[0], hosts.addresses[0]],
    ]


def test_this_machine_alone_needs_no_network(over_ssh: Site) -> None:
    code = "import os; print(os.environ['DMLC_NODE_HOST'])"
    run = over_ssh.launch("-H", hostfile(over_ssh, "localhost:4"), "-n", "4", "-s", "1", "python", "-S", "-c", code)
    assert done(run) == [f"[worker {i}] 127.0.0.1" for i in range(4)]
    assert run.err == ""


def test_awkward_values_and_arguments_arrive(over_ssh: Site, hosts: Hosts) -> None:
    """And an awkward working directory."""
    over_ssh.directory = Path(os.fsdecode(os.fsencode(over_ssh.directory) + b"/a b'$(touch spoilt)\"\xc3\xa9\xff\n"))
    over_ssh.directory.mkdir()
    code = (
        "import os, sys\n"
        "names = sorted(n for n in os.environb if n.startswith(b'AWK_'))\n"
        "print('DIR', os.getcwdb().hex())\n"
        "for n in names: print(n.decode(), os.environb[n].hex())\n"
        "for a in sys.argv[1:]: print('ARG', os.fsencode(a).hex())\n"
    )
    plain = [value for value in AWKWARD if value != "--"]
    words = [f"--env=AWK_E_{i:02}" for i in range(len(AWKWARD))]
    words += [f"--env-worker=AWK_W_{i:02}:{value}" for i, value in enumerate(AWKWARD)]
    run = over_ssh.launch(
        *("-H", hostfile(over_ssh, hosts.addresses[0])),
        *("-n", "1", "-s", "1", *words, "python", "-S", "-c", code, *plain),
        env={f"AWK_E_{i:02}": value for i, value in enumerate(AWKWARD)},
    )
    assert run.wait() == 0, run.err
    said = [line.partition("] ")[2].split() for line in run.out.splitlines()]
    found = [(words[0], bytes.fromhex("".join(words[1:]))) for words in said]
    wanted = [("DIR", os.fsencode(over_ssh.directory))]
    for letter in "EW":
        wanted += [(f"AWK_{letter}_{i:02}", os.fsencode(value)) for i, value in enumerate(AWKWARD)]
    wanted += [("ARG", os.fsencode(value)) for value in plain]
    assert found == wanted
    assert not list(over_ssh.directory.rglob("spoilt"))


def test_other_ports(over_ssh: Site) -> None:
    with Hosts.up(2, ports=[2201], shared=[over_ssh.directory]) as others:
        lines = [f"{others.addresses[0]}:2201", others.addresses[1]]
        config = ("--ssh-config", str(others.portless_ssh_config))
        over_ssh.env = dict(os.environ)
        words = ("-H", hostfile(over_ssh, *lines), *config, "-n", "2", "-s", "1")
        assert [line.split()[2] for line in done(over_ssh.launch(*words, "hostname"))] == list(others.names)


def test_the_working_directory_is_copied(over_ssh: Site, hosts: Hosts) -> None:
    """To a place with an awkward name, without what is left out; on each host's own disk."""
    need("rsync")
    over_ssh.directory = over_ssh.directory / "work 'it'"
    over_ssh.directory.mkdir()
    words = ("-H", hostfile(over_ssh, hosts.addresses[0], f"root@[{hosts.addresses6[1]}]:22"), "-n", "2", "-s", "1")
    for name in ("train.py", "big.ckpt", "ignored.log", "-dash", ".gitignore", "sub/data", "sub/ignored.log"):
        path = over_ssh.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("*.log\n" if name == ".gitignore" else "print('trained')\n")
    (over_ssh.directory / ".git").mkdir()
    (over_ssh.directory / ".git" / "HEAD").touch()
    there = "/tmp/a 'b' $(touch spoilt)\"/é/job"
    words += ("--sync-dst-dir", there, "--sync-exclude", "*.ckpt", "--sync-gitignore", "--sync-exclude", "/launch-*")
    run = over_ssh.launch(*words, "python train.py && find . -type f | sort && pwd")
    assert run.wait() == 0, run.err
    for rank in range(2):
        mine = [line.partition("] ")[2] for line in run.out.splitlines() if line.startswith(f"[worker {rank}]")]
        assert mine == ["trained", "./-dash", "./.gitignore", "./hosts", "./sub/data", "./train.py", there]
    assert not list(over_ssh.directory.rglob("spoilt"))


def test_a_copy_that_fails_names_the_host(over_ssh: Site, hosts: Hosts) -> None:
    need("rsync")
    hosts.run(1, ["mkdir", "-p", "/tmp/full"])
    assert hosts.run(1, ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/tmp/full"]).returncode == 0
    try:
        (over_ssh.directory / "big").write_bytes(os.urandom(300_000))
        words = ("-H", hostfile(over_ssh, *hosts.addresses[:2]), "--sync-dst-dir", "/tmp/full/job")
        run = over_ssh.launch(*words, "-n", "2", "-s", "1", "echo", "STARTED")
        assert run.wait() == 1
        assert "1 of 2 hosts" in run.err
        assert f"\n  {hosts.addresses[1]}: rsync exited with code " in run.err
        assert "No space left on device" in run.err or "is there space left on the device?" in run.err
        assert "STARTED" not in run.out
    finally:
        hosts.run(1, ["umount", "/tmp/full"])


def test_a_directory_that_cannot_be_made_names_the_host(over_ssh: Site, hosts: Hosts) -> None:
    hosts.run(0, ["touch", "/tmp/taken"])
    words = ("-H", hostfile(over_ssh, *hosts.addresses[:2]), "--sync-dst-dir", "/tmp/taken/job", "-n", "2", "-s", "1")
    run = over_ssh.launch(*words, "true")
    assert run.wait() == 1
    assert f"{hosts.addresses[0]}: cannot make the directory /tmp/taken/job: Not a directory" in run.err


def test_secrets_are_seen_nowhere(over_ssh: Site, hosts: Hosts) -> None:
    """Of three kinds: passed on, for workers, and the keys that the processes themselves find in their environment."""
    whispers = [uuid.uuid4().hex for _ in range(3)]
    asked = [f"--env-worker=W:{whispers[1]}", f"--env-server=S:{whispers[2]}"]
    code = (
        "import os, pathlib; here = pathlib.Path('keys-' + os.environ['DMLC_TASK_ID']); "
        "assert os.environ['P'] == open('whisper').read(); "
        "here.write_text(os.environ['KVSTORE_SECRET_KEY'] + ' ' + os.environ['W'] + '\\n')\n"
        "import time\nwhile not os.path.exists('go'): time.sleep(0.02)\nos._exit(3)"
    )
    # What the user types is for the user to hide: here launch.py finds its options in a file.
    (over_ssh.directory / "whisper").write_text(whispers[0])
    (over_ssh.directory / "options").write_text("\n".join(asked))
    reads = "import sys; sys.argv[1:1] = open('options').read().split('\\n')\n"
    over_ssh.enter = lambda argv, cwd: [*argv[:2], reads + argv[2], *argv[3:]]
    words = ("-H", hostfile(over_ssh, *hosts.addresses[:2]), "--env=P", "-n", "2", "-s", "2")
    with watch_ps(whispers) as seen:
        run = over_ssh.launch(*words, "python", "-S", "-c", code, env={"P": whispers[0]})
        files = [over_ssh.directory / f"keys-{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), "keys", over=run.over)
        keys = [path.read_text().split() for path in files]
        # A key is known only when the job runs; then nobody may have been told it by its command line.
        with watch_ps([key for key, _ in keys]) as seen_then:
            assert over_ssh.left("launcher.agents.main")
        (over_ssh.directory / "go").touch()
        assert run.wait() == 3, run.err
        dry = over_ssh.launch(*words, "--dry-run", "python", "-S", "-c", code, env={"P": whispers[0]})
        assert dry.wait() == 0
    assert seen == seen_then == []
    assert len({key for key, _ in keys}) == 2
    assert all(len(key) == 40 and whisper == whispers[1] for key, whisper in keys)
    for text in (run.out, run.err, dry.out, dry.err):
        assert not any(secret in text for secret in [*whispers, *(key for key, _ in keys)])
    assert "P=... " in dry.out


def test_no_encryption_needs_no_keys_and_a_command_may_be_for_the_shell(over_ssh: Site, hosts: Hosts) -> None:
    words = ("-H", hostfile(over_ssh, hosts.addresses[0]), "--no-encryption", "-n", "1", "-s", "1")
    words += ("--env-worker", 'TWO:for "workers"')
    run = over_ssh.launch(*words, 'echo "$KVSTORE_ENCRYPTION ${KVSTORE_SECRET_KEY-none}|$TWO" && cd / && pwd')
    assert done(run) == ["[worker 0] /", '[worker 0] 0 none|for "workers"']


@pytest.mark.release
def test_many_agents(over_ssh: Site, hosts: Hosts) -> None:
    """Thirty-two connections, to four hosts under eight names each."""
    lines = []
    for i in range(4):
        name, address, address6 = hosts.names[i], hosts.addresses[i], hosts.addresses6[i]
        lines += [name, address, address6, f"root@{name}", f"root@{address}", f"root@[{address6}]:22"]
        lines += [f"{name}:22", f"{address}:22"]
    over_ssh.enter = lambda argv, cwd: ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *argv]
    run = over_ssh.launch("-H", hostfile(over_ssh, *lines), "-n", "32", "-s", "32", "hostname")
    assert run.wait() == 0, run.err
    assert sorted(line.split()[-1] for line in run.lines) == sorted(name for name in hosts.names for _ in range(8))


def test_dry_run_is_what_runs(over_ssh: Site, hosts: Hosts) -> None:
    """Its ssh command line can be executed, and brings an agent, which greets."""
    words = ("-H", hostfile(over_ssh, hosts.addresses[0]), "-n", "1", "-s", "1", "--dry-run", "true")
    lines = done(over_ssh.launch(*words))
    (line,) = (line for line in lines if line.startswith("ssh "))
    said = subprocess.run(shlex.split(line), env=dict(over_ssh.env), input=b"", capture_output=True, check=False)
    assert said.stdout.startswith(b"\0kvstore agent 1\n")


@given(HOSTS)
def test_nothing_of_a_hostfile_is_an_option_of_ssh_or_rsync(host: Host) -> None:
    cluster = Cluster(sync_exclude=("*.pt",), sync_gitignore=True, ssh_config="cfg", ssh_option=("Port=1",))
    words = remote_command(cluster, host, ["py thon", "-c", "it's"])
    end = words.index("--")
    assert words[end + 1 :] == [host.name, "exec 'py thon' -c 'it'\"'\"'s'"]
    assert words[:9] == ["ssh", "-T", "-x", "-F", "cfg", "-o", "Port=1", "-o", "BatchMode=yes"]
    assert ("-p" in words[:end], "-l" in words[:end]) == (bool(host.port), bool(host.user))
    copied = rsync(cluster, host, "/from/", "/to")
    assert copied[copied.index("--") + 1] == "/from/"
    assert copied[-1].endswith("/to/")
    assert len(copied) == copied.index("--") + 3
    assert ("-e" in copied) != host.here


# ---- before a job over ssh starts: every host is asked, and one report tells all that is wrong with them


STARTED = "import sys; print('STARTED', flush=True)"


def written(site: Site, *lines: str) -> tuple[str, str]:
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


def test_one_of_three_is_unreachable(over_ssh: Site, hosts: Hosts, unreachable: str) -> None:
    mark = over_ssh.directory / "begun"
    words = written(over_ssh, hosts.addresses[0], hosts.names[1], unreachable)
    said = refused(over_ssh.launch(*words, "-n", "3", "-s", "3", f"touch {mark}", server=STARTED))
    assert "1 of 3 hosts cannot take part" in said
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
    run = over_ssh.launch(*written(over_ssh, *lines), "--python", str(python), "-n", "7", "-s", "1", "true")
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
        run = over_ssh.launch(*written(over_ssh, *hosts.addresses[:2], hosts.refusing), "-n", "3", "-s", "1", "true")
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
        words = written(over_ssh, *hosts.addresses[:2], hosts.refusing)
        options = ("--interface", "own0", "--host-ip", hosts.outside)
        said = refused(over_ssh.launch(*words, *options, "-n", "3", "-s", "3", "true"))
    for mine, other in ((0, 1), (1, 0)):
        assert f"{hosts.addresses[mine]}: cannot reach {hosts.addresses[other]} (" in said
    assert "name the network that all share with --interface" in said
    assert f"{hosts.refusing}: " in said, "the report was to tell all"
    assert "3 of 3 hosts" in said


def test_which_address_was_chosen_is_told(over_ssh: Site, hosts: Hosts, walled: str) -> None:
    code = "import os; print(os.environ['DMLC_NODE_HOST'], os.environ['DMLC_PS_ROOT_URI'])"
    words = written(over_ssh, *hosts.addresses[:2])
    run = over_ssh.launch(*words, "-n", "2", "-s", "1", "python", "-S", "-c", code)
    assert run.wait() == 0
    assert run.lines == [f"[worker {i}] {hosts.addresses[i]} {hosts.outside}" for i in range(2)]
    where = hosts.addresses[1]
    why = f"it leads to {hosts.outside}; there are also own0 ({walled})"
    assert f"launch.py: {where} is reached at {where}: {why}\n" in run.err
    assert f"{hosts.addresses[0]} is reached" not in run.err, "it has one network alone"


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
    run = over_ssh.launch(*written(over_ssh, hosts.addresses[0]), *options, "-n", "1", "-s", "1", "true")
    assert run.wait() == 2
    assert text in run.err
    nothing_runs(over_ssh)


def test_an_interface_that_a_host_has_not(over_ssh: Site, hosts: Hosts, walled: str) -> None:
    options = ("--interface", "own0", "--host-ip", hosts.outside)
    run = over_ssh.launch(*written(over_ssh, *hosts.addresses[:2]), *options, "-n", "2", "-s", "1", "true")
    said = refused(run)
    why = "cannot choose an address for this host: --interface own0: no interface with that name"
    assert f"{hosts.addresses[0]}: {why}" in said


def test_a_changed_host_key_is_refused(over_ssh: Site, hosts: Hosts) -> None:
    known = over_ssh.directory / "known"
    text = (hosts.directory / "known_hosts").read_text()
    text = text.replace(f"{hosts.addresses[1]} ", "other ").replace(f"{hosts.addresses[0]} ", f"{hosts.addresses[1]} ")
    known.write_text(text)
    words = written(over_ssh, hosts.addresses[1])
    option = ("--ssh-option", f"UserKnownHostsFile={known}")
    said = refused(over_ssh.launch(*words, *option, "-n", "1", "-s", "1", "true"))
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in said
    assert "(its key is not the one that ssh knows" in said


def test_an_unknown_host_is_refused_and_can_be_accepted(over_ssh: Site, hosts: Hosts) -> None:
    known = over_ssh.directory / "known"
    words = (*written(over_ssh, hosts.addresses[1]), "--ssh-option", f"UserKnownHostsFile={known}", "-n1", "-s1")
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
    words = (*written(over_ssh, "mine"), "--ssh-config", str(config), "-n", "1", "-s", "1")
    run = over_ssh.launch(*words, "python", "-S", "-c", code)
    assert run.wait() == 0, run.err
    assert run.lines == [f"[worker 0] {hosts.names[2]}"]
    assert not list(tmp_path.glob("c*=*")) + [p for p in tmp_path.iterdir() if p.is_socket()], "a connection stays"


def test_an_ssh_configuration_that_is_not_there(over_ssh: Site, hosts: Hosts) -> None:
    run = over_ssh.launch(*written(over_ssh, "a"), "--ssh-config", "/none", "-n", "1", "-s", "1", "true")
    assert run.wait() == 2
    assert run.err == "launch.py: cannot read --ssh-config /none\n"


def test_something_else_than_an_agent_answers(over_ssh: Site, hosts: Hosts) -> None:
    python = interpreter(over_ssh.directory / "python", "echo Welcome; echo to this; exit 0")
    words = (*written(over_ssh, hosts.addresses[0]), "--python", str(python), "-n", "1", "-s", "1")
    said = refused(over_ssh.launch(*words, "true"))
    assert "exited with code 0: Welcome\n    to this" in said


def test_too_few_files(over_ssh: Site, hosts: Hosts) -> None:
    lines = [f"host{i}" for i in range(100)]
    over_ssh.enter = lambda argv, cwd: ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *argv]
    run = over_ssh.launch(*written(over_ssh, *lines), "-n", "100", "-s", "1", "true")
    assert run.wait() == 2
    assert "open files, but 128 are allowed; raise that: ulimit -n " in run.err


def test_a_command_that_is_not_there(over_ssh: Site, hosts: Hosts) -> None:
    said = refused(over_ssh.launch(*written(over_ssh, *hosts.addresses[:2]), "-n", "2", "-s", "1", "no-such-program"))
    assert f"{hosts.addresses[1]}: cannot start the command: there is no command no-such-program" in said
    assert "2 of 2 hosts" in said


def test_a_command_on_a_path_that_workers_get(over_ssh: Site, hosts: Hosts) -> None:
    program = over_ssh.directory / "bin" / "mine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    words = (*written(over_ssh, hosts.addresses[0]), "-n", "1", "-s", "1", "--env-worker")
    run = over_ssh.launch(*words, f"PATH:{program.parent}:/usr/bin:/bin", "mine")
    assert run.wait() == 0, run.err
    assert run.lines == ["[worker 0] found"]
