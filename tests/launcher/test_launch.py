"""The three ways to call it, which are one."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import NoReturn

import pytest
from waiting import LONG

import kvstore
import launcher
from launcher import launch
from launcher.errors import CANNOT_EXECUTE, NOT_FOUND, USAGE, LaunchError, WorkerFailed
from launcher.job.description import Job

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(sys.executable).parent / "launch.py"

WAYS = {
    "clone": [sys.executable, str(ROOT / "launcher" / "launch.py")],
    "module": [sys.executable, "-m", "launcher"],
    "installed": [str(INSTALLED)],
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "installed" and not INSTALLED.exists():
        pytest.skip("the package is not installed beside this interpreter")
    return WAYS[request.param]


def call(way: list[str], *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin"} | ({"PYTHONPATH": str(ROOT)} if "-m" in way else {})
    return subprocess.run([*way, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=LONG)


def test_help(way: list[str], tmp_path: Path) -> None:
    done = call(way, "-h", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: launch.py [-h] [--version] -n NUM_WORKERS")


def test_version(way: list[str], tmp_path: Path) -> None:
    done = call(way, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"launch.py of torch-kvstore {kvstore.__version__}\n", "")


def test_dir_lists_the_public_names_alone() -> None:
    code = "import launcher; print(*dir(launcher)); launcher.run; print(*dir(launcher))"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed == "LaunchError WorkerFailed run\n" * 2
    assert all(hasattr(launcher, name) for name in dir(launcher))
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        launcher.runs  # noqa: B018


def test_errors(way: list[str], tmp_path: Path) -> None:
    done = call(way, "-n", "1", "--launcher", "local", "-H", "hosts", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--launcher local does not take --hostfile" in done.stderr


def test_a_command_that_does_not_exist(way: list[str], tmp_path: Path) -> None:
    done = call(way, "-n", "1", "no-such-command", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (127, "")


def test_too_many_open_files_are_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(kind: str, job: Job) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(launch, "find", find)
    assert launch.main(["-n", "1", "true"]) == 1
    assert capsys.readouterr().err == "launch.py: Too many open files: raise the limit with ulimit -n\n"


def test_files_in_the_package_do_not_shadow_modules() -> None:
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(ROOT / 'launcher')!r}); sys.argv[1:] = ['-h']\n"
        f"try: runpy.run_path({str(ROOT / 'launcher' / 'launch.py')!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        f"assert sys.path[0] == {str(ROOT)!r} and {str(ROOT / 'launcher')!r} not in sys.path, sys.path\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_console_script_is_declared() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "launch.py = launcher.launch:main" in config["options.entry_points"]["console_scripts"].splitlines()


def test_the_oldest_libraries_that_are_allowed_are_those_that_are_tested_with() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    allowed = [line.replace(">=", "==") for line in config["options"]["install_requires"].split()]
    assert [line for line in (ROOT / "oldest.txt").read_text().split("\n") if line and line[0] != "#"] == allowed


def test_modules_that_hide_ours_are_named(tmp_path: Path) -> None:
    """A warning, for they may be meant; and servers start all the same."""
    for name in ("workers", "servers"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "__init__.py").write_text("print('theirs')")
    (tmp_path / "jobs" / "ok.py").write_text("import workers")
    done = call(WAYS["clone"], "-n", "1", "python jobs/ok.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[worker 0] theirs\n")
    assert done.stderr.splitlines()[0] == (
        "launch.py: warning: in the command, `import workers` takes "
        f"{tmp_path}/jobs/workers/__init__.py, which hides the package {ROOT}/workers; "
        "rename the file, unless that is meant"
    )


@pytest.mark.parametrize("package", ["launcher", "servers", "workers"])
def test_a_users_kvstore_module_is_named(package: str, tmp_path: Path) -> None:
    (tmp_path / "kvstore.py").touch()
    program = [sys.executable, "-c", f"import {package}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONG)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {package} needs the package kvstore, but `import kvstore` gives "
        f"<module 'kvstore' from '{tmp_path}/kvstore.py'>; rename that file"
    )


def test_status_is_kvstore_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["status", "no such job"]) == 1
    assert "kvstore-status: no job here is 'no such job'" in capsys.readouterr().err


def test_a_job_that_cannot_be_started_has_the_exit_code_of_a_shell() -> None:
    assert LaunchError("no hosts").exit_code == USAGE == 2
    assert LaunchError("no such command", NOT_FOUND).exit_code == 127
    assert (str(LaunchError("no hosts", CANNOT_EXECUTE)), CANNOT_EXECUTE) == ("no hosts", 126)


def test_a_failure_says_which_process_and_how() -> None:
    assert str(WorkerFailed("server 0", "was killed by SIGKILL")) == "server 0 was killed by SIGKILL"
    failure = WorkerFailed("worker 1", "raised ValueError: no data", "Traceback ...")
    assert str(failure) == "worker 1 raised ValueError: no data\n\nTraceback ..."
    assert (failure.process, failure.how, failure.details) == failure.args


def test_a_failure_can_be_handed_on_to_another_process() -> None:
    failure = pickle.loads(pickle.dumps(WorkerFailed("worker 1", "exited with code 7", "details")))
    assert str(failure) == "worker 1 exited with code 7\n\ndetails"
