"""ssh to hosts that are namespaces, and a job over it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.missing import need
from places import HOSTS

from benchmarks.contenders import Work
from benchmarks.hosts import hosts, sent
from benchmarks.jobs import ROOT
from benchmarks.remote import Launched
from benchmarks.ssh import client_config, logins, sshd_config

# A worker of a tiny job: it leaves a file in /dev/shm, and says what it finds there.
SEES = """
import json, os, socket, sys, kvstore as kv
keys = "KVSTORE_MEMBER_KEYS" in os.environ
store = kv.create("dist_sync")
mine = f"/dev/shm/mark-{store.rank}"
open(mine, "w").close()
value = store.empty((250_000,))
value.fill_(1.0)
store.init("w", value)
store.pushpull("w", value, out=value)
store.barrier()
marks = sorted(name for name in os.listdir("/dev/shm") if name.startswith("mark-"))
seen = {"host": socket.gethostname(), "marks": marks, "sum": float(value.min()), "keys": keys}
with open(f"{sys.argv[1]}/{store.rank}", "w") as out:
    json.dump(seen, out)
store.barrier()
os.unlink(mine)
store.close()
"""


def test_no_password_opens_a_host_and_clients_know_its_key(tmp_path):
    server = sshd_config(tmp_path, HOSTS[1])
    assert "ListenAddress 10.77.0.2\n" in server
    assert "PasswordAuthentication no\n" in server
    assert f"SetEnv PYTHONPATH={ROOT}\n" in server
    assert "StrictHostKeyChecking yes\n" in client_config(tmp_path)


@pytest.mark.release
def test_a_job_over_ssh_whose_hosts_share_no_memory(tmp_path):
    need("ip", "tc", "unshare", "ssh", "sshd", "ssh-keygen")
    script = tmp_path / "sees.py"
    script.write_text(SEES)
    with hosts(2, "200mbit") as places, logins(places) as ssh:
        assert stat.S_IMODE(ssh.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((ssh.folder / "id").stat().st_mode) == 0o600
        command = Launched(Work("1MB", workers=3, servers=2), ssh).command([sys.executable, str(script), str(tmp_path)])
        before = sent(places[0])
        done = subprocess.run(
            places[0].wrap(command), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert sent(places[0]) - before > 1e6
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    first, second = places[0].namespace, places[1].namespace
    assert [one["host"] for one in seen] == [first, first, second]
    assert [one["marks"] for one in seen] == [["mark-0", "mark-1"]] * 2 + [["mark-2"]]
    assert all(one["keys"] for one in seen)
    assert {one["sum"] for one in seen} == {3.0}
    assert not ssh.folder.exists()
    assert not [*Path("/dev/shm").glob("mark-*"), *Path("/dev/shm").glob(f"{first}*")]
    assert not Path(f"/run/netns/{first}").exists()
