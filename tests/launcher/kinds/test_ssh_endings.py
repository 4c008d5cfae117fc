"""Whatever ends a job over ssh, nothing of it stays on any host, and what has failed is named."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from proc import parent
from sites import Running, Site
from waiting import LONG, PROMPT, until

LIMIT_S = 3.0
SILENCE_S = 2.5 * LIMIT_S  # of a connection, which a line that is back brings to life again

# It has a child in a session of its own, which minds no signal, and memory that it will not remove.
WORKER = """
import os, signal, subprocess, sys
stays = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()  # {token}"
subprocess.Popen([sys.executable, "-S", "-c", stays], start_new_session=True)
open(f"/dev/shm/kvstore-{{os.getuid()}}-{{os.environ['KVSTORE_JOB']}}-1-ab.0", "w").close()
print("here", flush=True)
signal.pause()  # {token}
"""


class Job:
    """A worker and a server on each host, which stay until they are ended."""

    def __init__(self, site: Site, hosts: Hosts, *, count: int = 2, worker: str = WORKER) -> None:
        self.hosts = hosts
        self.token = uuid.uuid4().hex
        self.began = 0.0
        hostfile = site.directory / "hosts"
        hostfile.write_text("".join(f"{hosts.addresses[i]}\n" for i in range(count)))
        code = worker.format(token=self.token)
        self.run: Running = site.launch(
            *("-H", str(hostfile), "-n", str(count), "-s", str(count), "python", "-S", "-c", code),
            server=f"import signal; signal.pause()  # {self.token}",
            env={"KVSTORE_HEARTBEAT_TIMEOUT_S": f"{LIMIT_S:g}"},
        )
        self._count = count
        self._site = site
        until(lambda: self.run.out.count("here") == count, "the workers to run", over=self.run.over)

    def agent(self, i: int) -> int:
        """The process of a host's agent."""
        (pid,) = (pid for pid, line in self.hosts.processes(i).items() if "launcher.agents.main" in line)
        return pid

    def worker(self, i: int) -> int:
        """The process of a host's worker."""
        mine = {pid: line for pid, line in self.hosts.processes(i).items() if self.token in line and "here" in line}
        (pid,) = mine
        return pid

    def ssh(self, i: int) -> int:
        """The process here of the connection to a host."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == self.run.process.pid:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if words[0].endswith("ssh") and self.hosts.addresses[i] in words:
                    return int(entry.name)
        raise AssertionError("no connection")

    def left(self, without: tuple[int, ...] = ()) -> list[str]:
        """What there is of it, on hosts that are not left out, and here."""
        left = self._site.left(self.token)
        left += [str(path) for path in Path("/tmp").glob(f"kvstore-*-{self.run.process.pid}-*")]
        for i in set(range(self._count)) - set(without):
            left += [line for line in self.hosts.processes(i).values() if "launcher" in line or "keeper" in line]
            left += self.hosts.shared_memory(i)
            left += self.hosts.run(i, ["sh", "-c", "ls -d /tmp/kvstore-* 2>/dev/null"]).stdout.split()
        return left

    def gone(self, without: tuple[int, ...] = ()) -> None:
        """Wait for nothing to be left of it."""
        until(lambda: not self.left(without), "nothing to be left of it", PROMPT, step=0.1)


def _parent(process: Path) -> int:
    try:
        return parent(process.name)
    except OSError:
        return 0


@pytest.fixture
def job(over_ssh: Site) -> Job:
    made = Job(over_ssh, over_ssh.hosts)
    assert made.left(), "the test would not see what is left"
    return made


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.release),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.release),
    ],
)
def test_a_signal_to_launch_py(job: Job, signum: int, code: int) -> None:
    job.run.send(signum)
    assert job.run.wait(PROMPT) == code
    job.gone()


def test_launch_py_is_killed(job: Job) -> None:
    job.run.process.kill()
    job.gone()


@pytest.mark.parametrize(
    ("whose", "signum", "code", "said"),
    [
        pytest.param("agent", signal.SIGKILL, None, "was lost: ssh to {0} ", marks=pytest.mark.release),
        pytest.param(
            "agent", signal.SIGTERM, 1, "was lost: its agent ended: it was sent SIGTERM", marks=pytest.mark.release
        ),
        pytest.param("ssh", signal.SIGKILL, 1, "was lost: ssh to {0} was killed by SIGKILL", marks=pytest.mark.release),
        ("worker", signal.SIGKILL, 137, "was killed by SIGKILL"),
    ],
)
def test_a_death_is_named_with_its_host(job: Job, whose: str, signum: int, code: int | None, said: str) -> None:
    os.kill(getattr(job, whose)(1), signum)
    ended, where = job.run.wait(PROMPT), job.hosts.addresses[1]
    assert ended == code if code is not None else ended
    assert f"1 on {where} {said.format(where)}" in job.run.err
    job.gone()


def test_a_host_is_cut_off(job: Job) -> None:
    job.hosts.cut(1)
    assert job.run.wait() == 1
    where = job.hosts.addresses[1]
    assert f"1 on {where} was lost: it was silent for {SILENCE_S:g} s" in job.run.err
    job.gone()


@pytest.mark.release
def test_a_host_crashes(over_ssh: Site) -> None:
    with Hosts.up(2, shared=[over_ssh.directory]) as others:
        over_ssh.env = others.launcher_env
        job = Job(over_ssh, others, count=2)
        others.crash(1)
        assert job.run.wait() == 1
        assert f"1 on {others.addresses[1]} was lost: it was silent for {SILENCE_S:g} s" in job.run.err
        job.gone(without=(1,))


def test_launch_py_is_stopped_for_too_long(job: Job) -> None:
    """As by Ctrl-Z: the agents cannot tell it from a dead one, and say so when it goes on."""
    os.kill(job.run.process.pid, signal.SIGSTOP)
    until(
        lambda: not any(job.hosts.run(i, ["pgrep", "-f", job.token]).stdout for i in range(2)), "them to end", step=0.1
    )
    os.kill(job.run.process.pid, signal.SIGCONT)
    assert job.run.wait(PROMPT) == 1
    assert f"was lost: its agent ended: launch.py had been silent for {SILENCE_S:g} s" in job.run.err
    job.gone()


@pytest.mark.release
def test_launch_py_is_stopped_for_a_moment(over_ssh: Site) -> None:
    worker = """
import os, time
print("here", flush=True)
while not os.path.exists("go"): time.sleep(0.02)  # {token}
"""
    job = Job(over_ssh, over_ssh.hosts, worker=worker)
    os.kill(job.run.process.pid, signal.SIGSTOP)
    time.sleep(LIMIT_S * 2 / 3)
    os.kill(job.run.process.pid, signal.SIGCONT)
    time.sleep(LIMIT_S / 3)
    (over_ssh.directory / "go").touch()
    assert job.run.wait() == 0, job.run.err


@pytest.mark.release  # one more is below, of which nobody reads what is written
def test_a_worker_fails_while_others_write_without_end(over_ssh: Site) -> None:
    worker = """
import os, time
print("here", flush=True)
if os.environ["DMLC_TASK_ID"] == "1": time.sleep(1); os._exit(7)
while True: print("x" * 1000)  # {token}
"""
    job = Job(over_ssh, over_ssh.hosts, worker=worker)
    assert job.run.wait(PROMPT) == 7
    assert f"worker 1 on {job.hosts.addresses[1]} exited with code 7" in job.run.err
    job.gone()


def test_ctrl_c_while_the_hosts_are_asked(over_ssh: Site) -> None:
    hosts = over_ssh.hosts
    hostfile = over_ssh.directory / "hosts"
    hostfile.write_text(f"{hosts.addresses[0]}\n{hosts.silent}\n")
    run = over_ssh.launch("-H", str(hostfile), "-n", "2", "-s", "1", "true")
    until(lambda: "launcher.agents.main" in " ".join(hosts.processes(0).values()), "the agent", over=run.over)
    run.send(signal.SIGINT)
    assert run.wait(PROMPT) == 130
    assert run.err == "launch.py: Ctrl-C: nothing was started\n"
    until(lambda: not any("python" in line for line in hosts.processes(0).values()), "the agent to go")


def hostfile(site: Site, *lines: str) -> str:
    path = site.directory / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.release
def test_a_flood_of_output_and_a_slow_reader(over_ssh: Site, hosts: Hosts) -> None:
    """Fifty megabytes, of which nothing is taken for longer than the limit: no line is lost, nor is any agent."""
    lines, length, limit = 500_000, 100, 2.0
    code = (
        "import sys\n"
        f"for at in range(0, {lines}, 1000):\n"
        f"    sys.stdout.write(''.join(str(n).zfill({length}) + '\\n' for n in range(at, at + 1000)))\n"
    )
    read, write = os.pipe()
    over_ssh.enter = lambda argv, cwd: ["sh", "-c", f'exec "$@" >/proc/{os.getpid()}/fd/{write}', "sh", *argv]
    run = over_ssh.launch(
        *("-H", hostfile(over_ssh, hosts.addresses[0]), "-n", "1", "-s", "1", "python", "-S", "-c", code),
        env={"KVSTORE_HEARTBEAT_TIMEOUT_S": f"{limit:g}"},
    )
    chunks = [os.read(read, 1000)]  # it has begun
    time.sleep(2 * limit)
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 100_000, "launch.py holds it all"
    os.close(write)
    while data := os.read(read, 1 << 20):
        chunks.append(data)
    os.close(read)
    assert run.wait() == 0, run.err
    found = b"".join(chunks).splitlines()
    assert len(found) == lines
    assert all(line == b"[worker 0] %0*d" % (length, n) for n, line in enumerate(found))


def test_a_failure_is_noticed_while_nobody_reads_the_output(over_ssh: Site, hosts: Hosts) -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['DMLC_TASK_ID'] == '1':\n"
        "    while not os.path.exists('go'): time.sleep(0.02)\n"
        "    os._exit(7)\n"
        "while True: print('x' * 1000)\n"
    )
    read, write = os.pipe()
    over_ssh.enter = lambda argv, cwd: ["sh", "-c", f'exec "$@" >/proc/{os.getpid()}/fd/{write}', "sh", *argv]
    words = ("-H", hostfile(over_ssh, *hosts.addresses[:2]), "-n", "2", "-s", "1")
    run = over_ssh.launch(*words, "python", "-S", "-c", code)
    os.read(read, 1000)
    time.sleep(1.0)  # for all that holds something to be full
    (over_ssh.directory / "go").touch()
    until(lambda: not any("python" in line for i in range(2) for line in hosts.processes(i).values()), "the end")
    os.close(write)
    while os.read(read, 1 << 20):
        pass
    os.close(read)
    assert run.wait() == 7
    assert f"worker 1 on {hosts.addresses[1]} exited with code 7" in run.err


OUTAGE_S = 6.7

# Each worker's share of a round is its rank + 1. After the first round that has taken long, worker 0 ends the training.
TRAINING = """
import sys, time
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=1.0)
store.init(["w", "end"], [np.zeros(300_000, np.float32), np.zeros(1, np.float32)])
weight, end = np.zeros(300_000, np.float32), np.zeros(1, np.float32)
rounds, longest, left = 0, 0.0, 10
while not end[0]:
    if rounds == 5:
        print("training", flush=True)
    began = time.monotonic()
    left -= longest > 3.0
    last = store.rank == 0 and left == 0
    gradients = [np.full_like(weight, store.rank + 1.0), np.full_like(end, float(last))]
    store.pushpull(["w", "end"], gradients, [weight, end])
    rounds += 1
    longest = max(longest, time.monotonic() - began)
    assert (weight == -3.0 * rounds).all(), (rounds, weight)
    time.sleep(0.01)
print(f"worker {store.rank}: the longest of the rounds took {longest:.2f} s", flush=True)
"""


@pytest.mark.release
@pytest.mark.parametrize("encryption", ["keys", "plain"])
def test_a_job_outlives_an_outage_and_goes_on_when_the_line_is_back(over_ssh: Site, encryption: str) -> None:
    hosts = over_ssh.hosts
    hostfile = over_ssh.directory / "hosts"
    hostfile.write_text(f"{hosts.addresses[0]}\n{hosts.addresses[1]}\n")
    script = over_ssh.directory / "train.py"
    script.write_text(TRAINING)
    words = ["-H", str(hostfile), "-n", "2", "-s", "2", "--env=KVSTORE_HEARTBEAT_TIMEOUT_S"]
    run = over_ssh.launch(
        *words,
        *(["--no-encryption"] if encryption == "plain" else []),
        "python",
        str(script),
        real=True,
        env={"KVSTORE_HEARTBEAT_TIMEOUT_S": "10"},
    )
    until(lambda: run.out.count("training") == 2, "training", over=run.over)
    hosts.cut(1)
    time.sleep(OUTAGE_S)
    hosts.mend(1)
    assert run.wait(LONG + PROMPT) == 0, run.err
    longest = [float(found) for found in re.findall(r"took ([\d.]+) s", run.out)]
    assert len(longest) == 2, run.out
    assert min(longest) > OUTAGE_S / 2, "nothing was cut"
    print(f"an outage of {OUTAGE_S} s ({encryption}): the longest round took {max(longest):.2f} s")
