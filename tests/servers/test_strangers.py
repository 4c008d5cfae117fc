"""Strangers throw nonsense at cores, at processes, and at a job that trains."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Desk, floats, sent, values_in
from asking_rows import init_tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobkeys import variables
from malformed import anything, flood
from rendezvous import Job
from secured import SecuredJob, Training
from strangers import BYTES, attempt, throw
from waiting import LONG, until

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, WireError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, pair, split_key
from kvstore.member.session import Session
from kvstore.spec import Spec
from kvstore.table import Table
from kvstore.transport.choose import links
from kvstore.transport.shm.shared_memory import sharing
from kvstore.transport.sockets.socket_transport import UnixTransport
from kvstore.transport.sockets.stream import GREETING, packed
from kvstore.transport.zeromq import ZmqTransport

# ---- whatever is thrown at a shard or a scheduler: no exception gets out, and good requests go on working


SPARE = 9  # a store that the good worker alone uses
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def messages_in(thrown: list[Any]) -> Iterator[wire.Message]:
    """Those that decode, but for what the good worker could have said itself."""
    for frames in thrown:
        with contextlib.suppress(WireError):
            message = wire.decode(frames)
            mine = isinstance(message, wire.Request) and message.node[:2] == ("worker", 2)
            if not mine and getattr(message, "store", 0) != SPARE:
                yield message


@EXAMPLES
@given(st.lists(anything, min_size=12, max_size=40))
def test_a_shard_survives_anything(thrown: list[Any]):
    desk, a, _, good = Desk(3, values={1: floats(0, 0), 2: floats(0)}, aggregated=[[0, 1]]).and_workers()
    a.seq = good.seq = 1000
    for worker, message in (
        (a, a.open("async", store=SPARE)),
        (a, a.init({1: floats(0)}, store=SPARE)),
        (a, a.set_optimizer("sgd", 1.0, store=SPARE)),
        (a, init_tables(a, {4: Table(shape=(3, 2))})),
        (a, a.open("async", store=1)),
        (a, a.init({1: floats(0, 0)}, store=1)),
        (a, a.set_optimizer("sgd", 1.0, store=1, momentum=0.5)),
        (good, good.open("async", store=SPARE)),
    ):
        assert desk.reply(worker, message) == wire.Ack(message.seq)
    for message in messages_in(thrown):
        for _, reply in desk.shard.handle(b"stranger", message):
            assert sent(reply) is not None
    push = good.push({1: floats(1)}, want=True, store=SPARE)
    assert values_in(desk.reply(good, push), [Spec((1,), "float32")])[0].tolist() == [-1]
    desk.shard.depart([0, 1])


@pytest.mark.long
@settings(EXAMPLES, max_examples=100)
@given(st.lists(anything, min_size=12, max_size=40), st.booleans())
def test_a_scheduler_survives_anything(thrown: list[Any], started: bool):
    job, w0, _, good = Job(3, 2, start=started).and_workers()
    scheduler = job.scheduler
    if started:
        job.say(w0, w0.declare("k", store=SPARE))
        job.say(w0, wire.Ready(w0.me(), store=SPARE, keys=["k"]))
    for message in messages_in(thrown):
        obeyed = isinstance(message, wire.Lost) or (isinstance(message, wire.Leave) and message.node.incarnation == 1)
        if not obeyed:
            for _, reply in scheduler.handle(b"stranger", message, job.now):
                assert sent(reply) is not None
            scheduler.tick(job.now)
    assert scheduler.failure is None
    if started:
        declare = good.declare("k", store=SPARE)
        assert job.reply(good, declare) == wire.Placed(declare.seq, [1], [0], [0], [0], [1])
        census = wire.Census(good.me())
        assert job.reply(good, census) == wire.Counted(census.seq, 0)


def test_nothing_of_the_flood_is_a_message():
    for frames in flood(3000):
        with contextlib.suppress(WireError):
            raise AssertionError(f"{wire.decode(frames)} is one")


def test_good_messages_decode_so_that_mutations_are_near_misses():
    from asking import Worker
    from malformed import good

    assert [wire.decode(wire.encode(message)) for message in good(Worker(0))]


# ---- a server and a scheduler as real processes, trained through real sockets, while strangers throw nonsense at them


FRAMES = 300  # more would take long: strangers get little of the time
GROWTH = 4 << 20  # bytes
ENV = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_TASK_ID": "0", "OMP_NUM_THREADS": "1"}


class Process:
    """``python -m servers`` in some role."""

    def __init__(self, role: str, directory: Path) -> None:
        self.log = directory / f"{role}.log"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "servers"],
                env=os.environ | ENV | {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": f"ipc://{directory}/scheduler"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def rss(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def wait(self) -> int:
        return self._process.wait(LONG)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Stranger:
    """Someone who can reach the sockets and is no member: each thing that they say costs them the connection."""

    def __init__(self, directory: Path) -> None:
        self._paths = [directory / "scheduler", directory / "server-0"]

    def throw(self, count: int, seed: int) -> None:
        for frames in flood(count, seed):
            self._say(GREETING + b"".join(map(bytes, packed(frames))))

    def throw_bytes(self, count: int) -> None:
        """Streams of something else, or that announce what never comes."""
        dice = random.Random(1)
        announced = [struct.pack("<IQ", 1, size) + b"x" * 100 for size in (1 << 20, 1 << 35, 1 << 40, (1 << 63) + 1)]
        announced += [struct.pack("<I", count) + b"x" * 100 for count in (0, 1 << 16, 1 << 18, (1 << 32) - 1)]
        for number in range(count):
            self._say(GREETING + announced[number // 2 % len(announced)] if number % 2 else dice.randbytes(200))

    def _say(self, said: bytes) -> None:
        for path in self._paths:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(LONG)
                sock.connect(str(path))
                try:
                    sock.sendall(said)
                    while sock.recv(4096):
                        pass
                except (BrokenPipeError, ConnectionResetError):
                    pass


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.release
def test_hundreds_of_malformed_frames_cost_nobody_anything(directory: Path):
    processes = [Process(role, directory) for role in ("scheduler", "server")]
    stranger = Stranger(directory)
    stop = threading.Event()
    steps: list[Any] = [0]

    def train(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(1000))
        out = torch.zeros(1000)
        while not stop.is_set():
            steps[0] += 1
            store.pushpull("w", torch.ones(1000), out)
            assert set(out.tolist()) == {-float(steps[0])}

    def run() -> None:
        try:
            train(DistStore(session))
        except BaseException as exc:
            steps.append(exc)

    try:
        session = Session(Config("worker", f"ipc://{directory}/scheduler", 1, 1, timeout_s=LONG), UnixTransport).join()
        thread = threading.Thread(target=run)
        thread.start()
        stranger.throw(300, seed=1)  # whatever is allocated once is there after this
        stranger.throw_bytes(20)
        before, steps_before = [process.rss() for process in processes], steps[0]
        stranger.throw(FRAMES, seed=2)
        stranger.throw_bytes(100)
        grown = [process.rss() - rss for process, rss in zip(processes, before, strict=True)]
        steps_after = steps[0]
        stop.set()
        thread.join(LONG)
        assert len(steps) == 1, steps[1]
        assert steps_after > steps_before + 10, "training went on"
        session.leave()
        assert [process.wait() for process in processes] == [0, 0]
        assert max(grown) < GROWTH, grown
        assert all(process.log.stat().st_size < 4000 for process in processes), "a flood does not fill the log"
    finally:
        stop.set()
        for process in processes:
            process.end()


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_process_outside_a_job_says_so_and_exits(role: str, directory: Path):
    process = subprocess.run(
        [sys.executable, "-m", "servers"],
        env=os.environ | {"DMLC_ROLE": role},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("ConfigError: this process is not part of a distributed job")


# ---- a job over TCP with keys trains on, and trains right, while strangers do what they can


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


def test_a_stranger_does_not_get_into_the_job(job: SecuredJob, monkeypatch: pytest.MonkeyPatch):
    """With the code and the scheduler's public key, and a key of its own that it has put on its own list."""
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.3)
    public, secret = pair()
    keys = CurveKeys(secret, job.keys["scheduler"].root, job.keys["scheduler"].members | {public})
    config = Config("worker", job.config("worker").root, 2, 2, timeout_s=0.5, keys=keys)
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


@pytest.mark.parametrize(
    ("env", "keyed"), [({}, True), pytest.param({"KVSTORE_ENCRYPTION": "0"}, False, marks=pytest.mark.release)]
)
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
