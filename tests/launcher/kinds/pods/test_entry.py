from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launcher.kinds.pods.entry import INDEX, KEY, TIMEOUT_S, VARIABLES, compose, main

RAW = os.fsdecode(b"\xff\xfe\n")


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """As the kubelet mounts a Secret: the files are links into a directory that begins with two dots."""
    data = tmp_path / VARIABLES / "..data"
    data.mkdir(parents=True)
    (data / "TOKEN").write_bytes(os.fsencode(RAW))
    (data / "KVSTORE_ROOT_KEY").write_text("root")
    for name in ("TOKEN", "KVSTORE_ROOT_KEY"):
        (tmp_path / VARIABLES / name).symlink_to(data / name)
    return tmp_path


def test_a_worker_is_its_command_with_its_own_number_and_variables(mount: Path) -> None:
    (mount / KEY).write_text("own")
    environ = {"DMLC_ROLE": "worker", INDEX: "3", "HOME": "/root"}
    task = compose(["python", "train.py", "a b"], environ, mount)
    assert (task.role, task.rank, task.argv) == ("worker", 3, (sys.executable, "train.py", "a b"))
    assert {name: task.env[name] for name in ("DMLC_TASK_ID", "TOKEN", "HOME")} == {
        "DMLC_TASK_ID": "3",
        "TOKEN": RAW,
        "HOME": "/root",
    }
    assert (task.env["KVSTORE_SECRET_KEY"], task.env["KVSTORE_ROOT_KEY"]) == ("own", "root")
    assert "..data" not in task.env


def test_without_a_command_it_is_a_server_or_the_scheduler(tmp_path: Path) -> None:
    task = compose([], {"DMLC_ROLE": "scheduler", INDEX: "0"}, tmp_path)
    assert (task.role, task.argv[0], task.argv[-1]) == ("scheduler", sys.executable, "servers")
    assert "KVSTORE_SECRET_KEY" not in task.env


def test_threads_of_servers_do_not_spin_and_are_as_many_as_the_manifest_says(tmp_path: Path) -> None:
    env = compose([], {"DMLC_ROLE": "server", INDEX: "0", "OMP_NUM_THREADS": "3"}, tmp_path).env
    assert (env["OMP_WAIT_POLICY"], env["OMP_NUM_THREADS"]) == ("passive", "3")


def test_members_wait_for_images_unless_somebody_says_how_long(mount: Path) -> None:
    environ = {"DMLC_ROLE": "server", INDEX: "0"}
    assert compose([], environ, mount).env["KVSTORE_JOIN_TIMEOUT_S"] == str(TIMEOUT_S)
    assert compose([], {**environ, "KVSTORE_JOIN_TIMEOUT_S": "7"}, mount).env["KVSTORE_JOIN_TIMEOUT_S"] == "7"
    (mount / VARIABLES / "KVSTORE_JOIN_TIMEOUT_S").write_text("8")
    assert compose([], {**environ, "KVSTORE_JOIN_TIMEOUT_S": "7"}, mount).env["KVSTORE_JOIN_TIMEOUT_S"] == "8"


def test_a_command_that_is_badly_quoted_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="quotes"):
        compose(["python 'x"], {"DMLC_ROLE": "worker", INDEX: "0"}, tmp_path)


def test_a_command_that_is_not_there_has_the_exit_code_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv(INDEX, "1")
    assert main(["/no/such/program"], str(tmp_path)) == 127
    assert capsys.readouterr().err == "cannot start worker 1: there is no command /no/such/program\n"
