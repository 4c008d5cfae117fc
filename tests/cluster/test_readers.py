"""A reader and an observer on another host than the job's, over encrypted links, with the files of launch.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.hosts import ROOT, Hosts
from waiting import LONG, until

from kvstore.job.directory import launcher_of, private_directories, temporary_root
from kvstore.job.place import FILE

# The array is one segment: only then are all of its values of one round.
TRAIN = """
from pathlib import Path
import torch, kvstore as kv
store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=1.0)
store.init("w", torch.zeros(30_000))
while not Path("stop").exists():
    store.pushpull("w", -torch.ones(30_000), out=torch.empty(30_000))
"""

READ = """
import sys, kvstore as kv
with kv.connect(sys.argv[1], timeout=30) as reader:
    reader.wait_for("w")
    while (value := reader.pull("w")).min() < 5:
        pass
    assert value.tolist() == [value[0]] * 30_000
print("read")
"""


@pytest.mark.release
def test_a_reader_and_an_observer_on_another_host(hosts: Hosts, tmp_path: Path) -> None:
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
            status = [sys.executable, "-m", "kvstore.observing.status_command"]
            here = subprocess.run(
                [*status, str(process.pid), "--json"], env=env, capture_output=True, text=True, check=True
            )
            assert json.loads(here.stdout)["status"]["expected"]["server"] == 2
            (place,) = (
                each / FILE for each in private_directories(temporary_root()) if launcher_of(each).pid == process.pid
            )
            copy = shutil.copy(place, tmp_path)
            there = hosts.run(3, [*status, copy], env={"PYTHONPATH": str(ROOT)})
            assert "1 of 1 worker, 2 of 2 servers" in there.stdout, there.stderr
            assert json.loads(Path(copy).read_text())["key"] not in here.stdout + there.stdout
            (tmp_path / "stop").touch()
            assert process.wait(LONG) == 0, (tmp_path / "log").read_text()
        finally:
            process.terminate()
            process.wait()
