"""Jobs on YARN: what the distributed shell is told, and what its containers run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import goldens
import pytest

from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job
from launcher.kinds import yarn

HOSTILE = "tcp://10.0.0.1:9 a'b\"c $(id) `x` $HOME \\ \U0001f600"
FULL = {
    "job_name": "mnist",
    "queue": "gpu queue",
    "worker_cores": 4,
    "server_cores": 2,
    "worker_memory": "500m",
    "server_memory": "4g",
    "gpus_per_worker": 1,
    "time": "2:00:00",
}


def job(env_worker: dict[str, str] | None = None, **cluster: Any) -> Job:
    return Job(
        num_workers=2,
        num_servers=1,
        command=("python train.py",),
        env_worker=env_worker or {},
        cluster=Cluster(**cluster),
    )


def golden(name: str, text: str) -> None:
    text = text.replace(sys.executable, "/usr/bin/python3")
    goldens.same(name, text)


@pytest.mark.parametrize(("name", "options"), [("yarn", FULL), ("yarn-plain", {})])
def test_the_dry_run_is_as_it_was(name: str, options: dict[str, Any]) -> None:
    text = yarn.dry_run(job({"W": "a-secret"}, **options))
    assert "a-secret" not in text
    golden(f"{name}.sh", text + "\n")


def test_the_words_for_the_distributed_shell() -> None:
    words = yarn.render(job(**FULL), 4, "/tmp/x/agents.sh", "/hadoop/ds.jar", "mnist-0a1b2c")
    assert words[:5] == ["yarn", "jar", "/hadoop/ds.jar", yarn.CLIENT, "-jar"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options == {
        "-jar": "/hadoop/ds.jar",
        "-appname": "mnist-0a1b2c",
        "-num_containers": "4",
        "-shell_script": "/tmp/x/agents.sh",
        "-container_memory": "4096",
        "-container_vcores": "4",
        "-container_resources": "yarn.io/gpu=1",
        "-queue": "gpu queue",
        "-timeout": "7200000",
    }


def test_a_job_without_a_time_may_take_longer_than_ten_minutes() -> None:
    words = yarn.render(job(), 4, "s", "j")
    assert int(words[words.index("-timeout") + 1]) == 2**31 - 1
    assert "-container_memory" not in words
    with pytest.raises(LaunchError, match="2:00:00"):
        yarn.render(job(time="soon"), 4, "s", "j")


def test_the_script_hands_its_ticket_over_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s" "$KVSTORE_ENLIST" >ticket\nprintf "%s\\n" "$@" >words\n')
    python.chmod(0o755)
    monkeypatch.setattr("launcher.kinds.kind.source_root", lambda: "/a clone's")
    (tmp_path / "ExecScript.sh").write_text(yarn.script(job(python=str(python)), HOSTILE))
    subprocess.run(["bash", "ExecScript.sh"], cwd=tmp_path, check=True)  # as the distributed shell does
    assert (tmp_path / "ticket").read_text() == HOSTILE
    words = (tmp_path / "words").read_text()
    assert words.startswith("-c\n")
    assert repr("/a clone's") in words
    monkeypatch.setattr("launcher.kinds.kind.source_root", lambda: None)
    golden("yarn-script.sh", yarn.script(job(python="/usr/bin/python3"), "tcp://10.0.0.1:9 a b c"))


def test_the_script_is_for_nobody_else_to_read_and_goes_at_the_end() -> None:
    assert [words[2:] for words in yarn.prepare("n")] == [["-mkdir", "-p", "n"], ["-chmod", "700", "n"]]
    assert [words[2:] for words in yarn.clean("n")] == [["-rm", "-r", "-f", "-skipTrash", "n"]]


def test_the_jar_is_where_hadoop_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "share/hadoop/yarn"
    folder.mkdir(parents=True)
    for version in ("3.3.6", "3.3.6-sources", "3.3.6-tests"):
        (folder / f"hadoop-yarn-applications-distributedshell-{version}.jar").touch()
    jar = str(folder / "hadoop-yarn-applications-distributedshell-3.3.6.jar")
    assert yarn.find_jar("", {"HADOOP_HOME": str(tmp_path)}) == jar
    assert yarn.find_jar(jar, {}) == jar

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/yarn").write_text(f"#!/bin/sh\necho /etc/hadoop:/opt/other.jar:{folder}/*\n")
    (tmp_path / "bin/yarn").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        assert yarn.find_jar("", {"PATH": os.environ["PATH"]}) == jar


def test_a_jar_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--yarn-jar"):
        yarn.find_jar("", {"HADOOP_HOME": str(tmp_path), "PATH": "/nowhere"})
    with pytest.raises(LaunchError, match="no such file"):
        yarn.find_jar(str(tmp_path / "x.jar"), {})
