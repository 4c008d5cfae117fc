"""A reader on another host than the job's, over encrypted links, with the file of ``launch.py --readers``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.hosts import ROOT, Hosts
from waiting import LONG, until

TRAIN = """
from pathlib import Path
import torch, kvstore as kv
store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=1.0)
store.init("w", torch.zeros(100_000))
while not Path("stop").exists():
    store.pushpull("w", -torch.ones(100_000), out=torch.empty(100_000))
"""

READ = """
import sys, kvstore as kv
with kv.connect(sys.argv[1], timeout=30) as reader:
    reader.wait_for("w")
    while (value := reader.pull("w")).min() < 5:
        pass
    assert value.tolist() == [value[0]] * 100_000
print("read")
"""


def test_a_reader_on_another_host(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("".join(f"{name}\n" for name in hosts.names[:2]))
    file = tmp_path / "readers.json"
    words = ["-n", "1", "-s", "2", "-H", "hosts", "--ssh-config", str(hosts.ssh_config), "--readers", str(file)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words, "python", "train.py"],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
        )
        try:
            until(file.exists, "the file for readers", over=lambda: process.poll() and (tmp_path / "log").read_text())
            assert json.loads(file.read_text())["key"]
            done = hosts.run(3, [sys.executable, "-c", READ, str(file)], env={"PYTHONPATH": str(ROOT)})
            assert done.stdout == "read\n", done.stderr
            (tmp_path / "stop").touch()
            assert process.wait(LONG) == 0, (tmp_path / "log").read_text()
        finally:
            process.terminate()
            process.wait()
