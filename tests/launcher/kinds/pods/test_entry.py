from __future__ import annotations

import configparser
import os
import stat
import sys
from pathlib import Path

import pytest

from kvstore.job.contract import members
from kvstore.job.curve_keys import ROOT, CurveKeys, Keyring, split_key
from kvstore.job.place import FILE, ObservingPlace, running_jobs
from launcher.kinds.pods.entry import INDEX, KEY, TIMEOUT_S, VARIABLES, compose, main, observers_variables

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


def test_it_is_a_command_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[4] / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"].split("\n")
    assert f"kvstore-pod = {main.__module__}:{main.__name__}" in scripts


def test_without_a_command_it_is_a_server_or_the_scheduler(tmp_path: Path) -> None:
    task = compose([], {"DMLC_ROLE": "scheduler", INDEX: "0"}, tmp_path)
    assert (task.role, task.argv[0], *task.argv[-2:]) == ("scheduler", sys.executable, "servers", "scheduler")
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


SECRET = {"KVSTORE_JOB_SECRET": "s" * 32, "KVSTORE_JOB": "train", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "2"}
SECRET |= {"DMLC_PS_ROOT_URI": "train-scheduler-0-0.train", "DMLC_PS_ROOT_PORT": "9091"}


def test_keys_are_made_from_the_secret_that_all_pods_have(tmp_path: Path) -> None:
    tasks = [compose([], {"DMLC_ROLE": "server", INDEX: str(rank), **SECRET}, tmp_path) for rank in (0, 1)]
    keyring = Keyring.derived("s" * 32, "train", members(4, 2))
    for rank, task in enumerate(tasks):
        assert keyring.variables("server", rank).items() <= task.env.items()
        assert "KVSTORE_JOB_SECRET" not in task.env


def test_a_key_of_its_own_comes_before_the_secret(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("own")
    env = compose([], {"DMLC_ROLE": "server", INDEX: "0", **SECRET}, tmp_path).env
    assert env["KVSTORE_SECRET_KEY"] == "own"
    assert "KVSTORE_MEMBER_KEYS" not in env


def test_no_keys_are_made_where_links_are_plain(tmp_path: Path) -> None:
    environ = {"DMLC_ROLE": "server", INDEX: "0", **SECRET, "KVSTORE_ENCRYPTION": "0"}
    assert "KVSTORE_SECRET_KEY" not in compose([], environ, tmp_path).env


def test_the_scheduler_listens_at_its_own_address(tmp_path: Path) -> None:
    environ = {INDEX: "0", **SECRET, "DMLC_NODE_HOST": "10.0.0.1"}
    uris = [
        compose([], {**environ, "DMLC_ROLE": role}, tmp_path).env["DMLC_PS_ROOT_URI"]
        for role in ("scheduler", "server")
    ]
    assert uris == ["10.0.0.1", "train-scheduler-0-0.train"]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({INDEX: "0"}, "DMLC_ROLE is not set"),
        ({"DMLC_ROLE": "server"}, "JOB_COMPLETION_INDEX is not set; .* an Indexed Job the number"),
        (
            {"DMLC_ROLE": "server", INDEX: "2", **SECRET},
            r"number 2 of the servers, counted from 0, .* DMLC_NUM_SERVER is 2",
        ),
        (
            {"DMLC_ROLE": "server", INDEX: "0", **SECRET, "KVSTORE_JOB_SECRET": "short"},
            "KVSTORE_JOB_SECRET is too short",
        ),
        ({"DMLC_ROLE": "server", INDEX: "0", **SECRET, "DMLC_NUM_WORKER": "many"}, "kvstore-pod: DMLC_NUM_WORKER"),
    ],
)
def test_what_a_manifest_may_lack_is_said(environ: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        compose([], environ, tmp_path)


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


PLAIN = {
    "DMLC_ROLE": "scheduler",
    "DMLC_PS_ROOT_URI": "10.0.0.7",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def test_observers_in_the_pod_find_the_job(tmp_path: Path) -> None:
    assert observers_variables(PLAIN, tmp_path) == {}
    [(directory, place)] = running_jobs([tmp_path])
    assert isinstance(place, ObservingPlace)
    assert (place.address, place.key, place.workers, place.servers) == ("tcp://10.0.0.7:9091", "", 2, 1)
    assert stat.S_IMODE((directory / FILE).stat().st_mode) == 0o600


def test_they_have_a_key_of_their_own_which_the_scheduler_knows(tmp_path: Path) -> None:
    keyring = Keyring.random(members(2, 1))
    env = PLAIN | keyring.variables(*ROOT)
    told = observers_variables(env, tmp_path)
    [(_, place)] = running_jobs([tmp_path])
    assert isinstance(place, ObservingPlace)
    assert split_key(place.address)[1] == keyring.pairs[ROOT][0]
    keys = CurveKeys.from_env(env | told)
    observer = place.config({}).keys
    assert keys is not None
    assert observer is not None
    assert keys.observer == observer.public
    assert place.key not in "".join(told.values())


@pytest.mark.parametrize("env", [PLAIN | {"DMLC_PS_ROOT_PORT": "x"}, {"DMLC_ROLE": "scheduler"}], ids=["bad", "none"])
def test_settings_that_are_wrong_are_the_schedulers_to_tell(env: dict[str, str], tmp_path: Path) -> None:
    assert observers_variables(env, tmp_path) == {}
    assert list(running_jobs([tmp_path])) == []


def test_where_nothing_is_writable_there_are_no_observers(tmp_path: Path) -> None:
    assert observers_variables(PLAIN, tmp_path / "none") == {}
