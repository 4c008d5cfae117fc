"""``python -m servers`` as a process: its threads, and how it ends when it is told to."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.contract import Contract, Role
from kvstore.job.our_module import ROOT
from kvstore.job.processes import words
from servers.processes import EACH, LEAST, collect_seldom, importing

# Imported at the start of every interpreter. The module that AT names cannot be imported if a signal's handler raises.
HOOK = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == os.environ["AT"]:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException as error:
                raise ImportError("it has not been imported") from error

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize(("role", "module"), [("scheduler", "servers.scheduler_process"), ("server", "servers.shard")])
def test_sigterm_during_an_import_ends_it_without_a_word(role: Role, module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    job = Contract(1, 1, f"ipc://{tmp_path}/scheduler", 0, "job")
    path = os.pathsep.join([str(tmp_path), ROOT])
    env = os.environ | job.variables(role, 0) | {"AT": module, "PYTHONPATH": path}
    argv = words(sys.executable, "servers")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


LOST = """
import sys
import servers.__main__
from kvstore.errors import NodeLost
from servers.__main__ import main

def lose(*_job):
    raise NodeLost("worker 1 exited with code 1")

servers.__main__.run_server = lose
sys.exit(main())
"""


def test_a_failure_elsewhere_before_the_job_began_is_not_its_own(tmp_path: Path) -> None:
    job = Contract(2, 1, f"ipc://{tmp_path}/scheduler", 0, "job")
    env = os.environ | job.variables("server", 0) | {"PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", LOST], env=env, capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stderr) == (JOB_FAILED_EXIT, "worker 1 exited with code 1\n")


def test_the_threads_of_a_server_that_was_started_by_hand_do_not_spin(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as root:  # nobody answers there
        env = {
            "PYTHONPATH": ROOT,
            "TMPDIR": str(tmp_path),
            "OMP_DISPLAY_ENV": "VERBOSE",  # OpenMP says how it will work when it is loaded
            "DMLC_ROLE": "server",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(root.getsockname()[1]),
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
        }
        with subprocess.Popen(words(sys.executable, "servers"), env=env, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            spins = next((line for line in server.stderr if "SPINCOUNT" in line or "BLOCKTIME" in line), "nothing said")
            server.kill()
            server.wait(LONG)
    assert "= '0'" in spins


@pytest.fixture
def usual() -> Iterator[int]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700
    gc.set_threshold(*before)


def test_a_large_job_has_the_collector_run_less_often(usual: int) -> None:
    collect_seldom(4096)
    assert gc.get_threshold()[0] == EACH * 4096
    assert gc.isenabled()


def test_a_small_job_has_it_run_at_least_so_seldom(usual: int) -> None:
    collect_seldom(2)
    assert usual < gc.get_threshold()[0] == LEAST


@pytest.mark.parametrize("error", [None, ImportError])
def test_what_is_imported_is_not_looked_at(error: type[Exception] | None) -> None:
    before = gc.get_freeze_count()
    with contextlib.suppress(ImportError), importing():
        assert not gc.isenabled()
        if error is not None:
            raise error
    after = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.isenabled()
    assert (after > before) == (error is None)
