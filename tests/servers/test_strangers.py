"""A job over TCP with keys trains on, and trains right, while strangers do what they can."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobkeys import variables
from secured import SecuredJob, Training
from strangers import BYTES, HELLO_BYTES, Tap, attempt, idle, throw
from waiting import LONG, until

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, pair, split_key
from kvstore.member.session import Session
from kvstore.transport.choose import links
from kvstore.transport.shm.shared_memory import sharing
from kvstore.transport.zeromq import ZmqTransport


@pytest.fixture
def job() -> Iterator[SecuredJob]:
    with SecuredJob() as made:
        assert sorted(made.places) == ["scheduler", "server 0", "server 1"]
        yield made
    assert set(made.exit_codes.values()) == {0}


def test_strangers_without_keys_change_nothing(job: SecuredJob):
    with Training(job):
        for place in job.places.values():
            attempt(place)
            for data in BYTES.values():
                if data[:1] != b"\xff":  # the others' connections end with the handshake's deadline: see the transport
                    throw(place, data)


def test_strangers_with_other_keys_change_nothing(job: SecuredJob):
    public, secret = pair()
    root = job.keys["scheduler"].root
    with Training(job):
        for place in job.places.values():
            attempt(place, split_key(place)[1], public, secret)
            attempt(place, public, public, secret)
            attempt(place, split_key(place)[1], root, secret)


def test_what_was_recorded_changes_nothing(job: SecuredJob):
    """A member's whole conversation with a server, by somebody on the path, and again."""
    tap = Tap(job.places["server 0"])
    member = ZmqTransport(keys=job.keys["worker 0"])
    try:
        with Training(job):
            link = member.connect(tap.endpoint)
            member.send(link, [b"no message, but a member's"])
            member.send(link, [b"x" * 1000])
            member.close(linger=1.0)
            assert tap.ended.wait(LONG)
            recorded = bytes(tap.recorded)
            assert len(recorded) > HELLO_BYTES + 1000
            for _ in range(3):
                throw(job.places["server 0"], recorded)
                throw(job.places["scheduler"], recorded)
    finally:
        member.close()
        tap.close()


def test_a_thousand_idle_connections_change_nothing(job: SecuredJob):
    with idle(job.places["scheduler"], 500), idle(job.places["server 1"], 500), Training(job):
        pass


def test_a_stranger_does_not_get_into_the_job(job: SecuredJob, monkeypatch: pytest.MonkeyPatch):
    """With the code and the scheduler's public key, and a key of its own that it has put on its own list."""
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 1.0)
    public, secret = pair()
    keys = CurveKeys(secret, job.keys["scheduler"].root, job.keys["scheduler"].members | {public})
    config = Config("worker", job.config("worker").root, 2, 2, timeout_s=1.0, keys=keys)
    with (
        Training(job),
        pytest.raises(DeadlineExceeded, match=r"joining the job at tcp://127.0.0.1:\d+ is not done") as e,
    ):
        Session(config, lambda: ZmqTransport(keys=keys)).join()
    assert e.value.silent == ("the scheduler",)


def test_members_on_one_host_share_memory_and_train_right():
    with SecuredJob(shm=True) as made, Training(made):
        pass
    assert set(made.exit_codes.values()) == {0}


# ---- processes, as a launcher starts them


def test_a_server_may_have_as_many_connections_as_its_limit_allows(tmp_path: Path):
    """What a shell gives a process is little: each stranger's connection is a file until it is refused."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    env = os.environ | variables(1)[0] | {"DMLC_ROLE": "scheduler", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
    env |= {"DMLC_PS_ROOT_URI": f"ipc://{tmp_path}/scheduler"}
    tmp_path.chmod(0o700)
    argv = ["sh", "-c", 'ulimit -S -n 100 && exec "$0" -m servers', sys.executable]
    with subprocess.Popen(argv, env=env) as process:
        try:
            until((tmp_path / "scheduler").exists, "the scheduler's socket")
            limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        finally:
            process.kill()
    (files,) = (line for line in limits if line.startswith("Max open files"))
    assert int(files.split()[3]) == min(hard, 1 << 16)


class Processes:
    def __init__(self, directory: Path, **env: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "OMP_NUM_THREADS": "1"}
        job |= {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_TASK_ID": "0"}
        self.variables = [os.environ | job | keys | env for keys in variables(3)]
        self.logs = [directory / "scheduler.log", directory / "server.log"]
        self._running = []
        for role, log, its in zip(("scheduler", "server"), self.logs, self.variables, strict=False):
            with log.open("wb") as out:
                argv = [sys.executable, "-m", "servers"]
                self._running.append(subprocess.Popen(argv, env=its | {"DMLC_ROLE": role}, stdout=out, stderr=out))

    def wait(self) -> list[int]:
        return [process.wait(LONG) for process in self._running]

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("env", "keyed"), [({}, True), ({"KVSTORE_ENCRYPTION": "0"}, False)])
def test_processes_take_their_keys_from_the_environment(tmp_path: Path, env: dict[str, str], keyed: bool):
    processes = Processes(tmp_path, **env)
    try:
        config = Config.from_env(processes.variables[2] | {"KVSTORE_TIMEOUT_S": f"{LONG:g}"})
        session = Session(config, sharing(links(config), config)).join()
        store = DistStore(session)
        store.init("w", torch.zeros(100_000))
        out = torch.zeros(100_000)
        store.pushpull("w", torch.ones(100_000), out)
        assert out.eq(1).all()
        assert ("?key=" in config.root) is keyed
        if keyed:
            attempt(config.root)
        store.close()
        session.leave()
        assert processes.wait() == [0, 0]
        said = "".join(log.read_text() for log in processes.logs)
        assert said == "", "loopback is nothing to warn of"
    finally:
        processes.end()
