"""Output over ssh when there is more of it than anybody reads."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster.hosts import Hosts
from sites import Site
from waiting import until


def hostfile(site: Site, *lines: str) -> str:
    path = site.directory / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


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
