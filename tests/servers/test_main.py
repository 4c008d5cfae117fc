"""A member's process: its threads, its loop, its name, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from threaded import ThreadedJob
from waiting import LONG

from kvstore import wire
from kvstore.checkpoint.folders import begin
from kvstore.errors import JOB_FAILED_EXIT, NodeLost, UsageError
from kvstore.job.config import Config
from kvstore.job.contract import Contract, Role
from kvstore.job.our_module import ROOT
from kvstore.job.processes import words
from kvstore.member.session import Session
from kvstore.transport import Transport
from kvstore.values import to_buffer
from servers.member import ServingMember, Surroundings
from servers.names import MOST, have, name, workers
from servers.processes import EACH, LEAST, collect_seldom, importing, run_member
from servers.requests.replies import Outbox
from servers.server import Server, injecting

# ---- ``python -m servers`` as a process: its threads, and how it ends when it is told to


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

servers.__main__.run_member = lose
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


# ---- a member with a shard: what its thread has written is reported in the loop, as an answer


class Noting(Server):
    """Notes the answers that no message has asked for at that moment."""

    noted: list[Outbox]

    def _answer(self, outbox: Outbox) -> Outbox:
        self.noted.append(outbox)
        return super()._answer(outbox)


def test_a_file_is_written_beside_the_loop_and_reported_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Noting.noted = []

    def run(config: Config, make_transport: Callable[[], Transport], endpoint: str) -> int:
        config = dataclasses.replace(config, checkpoint_dir=str(tmp_path))
        return Noting(Surroundings(config, make_transport, endpoint, time.monotonic, threading.Thread)).run()

    def save(session: Session) -> wire.Captured:
        (server,) = session.servers
        value = to_buffer(torch.arange(4.0))
        session.client.call(server, "opening", wire.Open, store=0, mode="sync", staleness=None)
        first = {"ids": [3], "keys": ["w"], "kinds": [0], "shapes": [[4]], "dtype": "float32"}
        session.client.call(server, "init", wire.Init, store=0, buffers=wire.pack_arrays([value]), **first)
        session.client.call(server, "capture", wire.Capture, store=0, number=5, ids=[3], clocks=[0])
        reply = session.client.call(server, "waiting", wire.AwaitCapture, store=0, number=5)
        assert isinstance(reply, wire.Captured)
        return reply

    monkeypatch.setattr("threaded.run_member", run)
    folder = begin(tmp_path, 5)
    with ThreadedJob(1, 1) as job:
        (reply,) = job.run_sessions(save)
    assert Path(reply.path) == folder / "store-0.server-0.safetensors"
    assert Path(reply.path).stat().st_size == reply.nbytes
    assert len(Noting.noted) == 1


def test_without_faults_nothing_is_looked_for() -> None:
    def handle(peer: bytes, message: wire.Message) -> Outbox:
        return []

    assert injecting(handle, [], lambda: 0) is handle


def test_a_fault_comes_once_after_its_round_and_before_its_answers_leave() -> None:
    rounds = 0
    sent: list[int] = []

    def handle(peer: bytes, message: wire.Message) -> Outbox:
        nonlocal rounds
        rounds += 1
        return [(peer, message)]

    faulty = injecting(handle, [("stop", 2), ("kill", 4)], lambda: rounds, sent.append)
    seen = []
    for _ in range(5):
        assert faulty(b"p", wire.Alive()) == [(b"p", wire.Alive())]
        seen.append(list(sent))
    assert seen == [[], [signal.SIGSTOP], [signal.SIGSTOP], *[[signal.SIGSTOP, signal.SIGKILL]] * 2]


def test_rounds_may_have_been_missed() -> None:
    sent: list[int] = []
    faulty = injecting(lambda peer, message: [], [("stop", 2), ("kill", 4)], lambda: 9, sent.append)
    faulty(b"p", wire.Alive())
    assert sent == [signal.SIGSTOP, signal.SIGKILL]


def test_a_fault_that_has_not_come_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedJob(1, 1, inject=(("kill", 999_999),)) as job:
        job.run(lambda store: store.init("w", torch.zeros(3)))
    assert "--inject: no kill at round 999999: there were 0 rounds in this job" in caplog.text


def test_of_a_job_that_ends_in_order_both_return_0() -> None:
    with ThreadedJob(1, 1) as job:
        pass
    assert job.exit_codes == {"scheduler": 0, "server 0": 0}


def test_of_a_job_that_fails_both_return_the_code_for_that(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedJob(1, 1) as job:
        job.run_sessions(lambda session: session.leave("it diverged"))
    assert job.exit_codes == {"scheduler": JOB_FAILED_EXIT, "server 0": JOB_FAILED_EXIT}
    assert "server 0 ends: worker 0 failed: it diverged" in caplog.messages


class Failing(ServingMember):
    def _serve(self) -> None:
        raise ZeroDivisionError("by itself")

    def _notice(self, notice: wire.Message) -> Outbox:
        return []


def test_one_that_may_not_join_frees_its_endpoint() -> None:
    with ThreadedJob(1, 1) as job:
        with pytest.raises(UsageError, match="the job has its 1 servers already"):
            run_member(job.config("server", 1), job.network.transport, "inproc://server-1")
        again: Transport = job.network.transport()
        again.bind("inproc://server-1")  # an endpoint that is in use is refused
        again.close()


def test_the_error_that_ends_one_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, make_transport: Callable[[], Transport], endpoint: str) -> int:
        with pytest.raises(ZeroDivisionError):
            Failing(Surroundings(config, make_transport, endpoint, time.monotonic, threading.Thread)).run()
        return 1

    monkeypatch.setattr("threaded.run_member", run)
    with ThreadedJob(1, 1) as job:
        with pytest.raises(NodeLost, match=r"server 0 failed: it ended with ZeroDivisionError\('by itself'\)"):
            job.run(lambda store: store.init("w", [1.0]))
        job.sessions[0].client.failure = None


# ---- how members are named in messages to people


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "worker 3"),
        ({4, 1}, "worker 1, worker 4"),
        (range(MOST), ", ".join(f"worker {rank}" for rank in range(MOST))),
        (range(MOST + 3), ", ".join(f"worker {rank}" for rank in range(MOST)) + " and 3 more"),
    ],
)
def test_the_lowest_ranks_are_named_and_the_others_counted(ranks: list[int], text: str) -> None:
    assert name("worker", ranks) == text


def test_a_standby_is_named_by_its_server() -> None:
    assert name("standby", [1, 0]) == "standby of server 0, standby of server 1"
    assert str(wire.Node("standby", 1, 2)) == "the standby of server 1"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "worker 3"),
        ([3, 4], "workers 3, 4"),
        ([4, 5, 6, 7], "workers 4 to 7"),
        ([0, 2, 3], "workers 0, 2, 3"),
        ([0, *range(2, MOST + 3)], "workers 0, 2, 3, 4, 5, 6, 7, 8 and 2 more"),
    ],
)
def test_workers_who_have_contributed_together_are_named_in_short(ranks: list[int], text: str) -> None:
    assert workers(ranks) == text


def test_the_verb_agrees() -> None:
    assert (have([0]), have([0, 1]), have(range(100))) == ("has", "have", "have")
