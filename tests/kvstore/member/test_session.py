"""Whole jobs inside this process: joining, leaving, silence, and errors that reach the worker."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inproc import InprocNetwork
from threaded import ThreadedJob
from waiting import LONG, until

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import JOB_FAILED_EXIT, DeadlineExceeded, KVStoreError, Mismatch, NodeLost, ServerError, UsageError
from kvstore.job.config import Config
from kvstore.member import client
from kvstore.member import session as sessions
from kvstore.member.activity import StoreActivity, WorkerActivity
from kvstore.member.mutual_waits import BlockedTime
from kvstore.member.outstanding import Question
from kvstore.member.session import Session
from kvstore.ticket import Operation
from kvstore.transport import Transport
from kvstore.transport.sockets.socket_transport import TcpTransport
from kvstore.wire.guests import MOST_VALUES
from servers.processes import run_member
from servers.scheduler_process import run_scheduler


class Tapped(ThreadedJob):
    """A cluster that can silence a member: its links are cut, without a word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(heartbeat_s=0.05, heartbeat_timeout_s=2.0, **options)
        self._made: dict[str, list[Transport]] = {}

    def ends(self, config: Config) -> Callable[[], Transport]:
        make = super().ends(config)
        name = config.role if config.role == "scheduler" else f"{config.role} {config.rank_hint}"

        def tapped() -> Transport:
            made = make()
            self._made.setdefault(name, []).append(made)
            return made

        return tapped

    def silence(self, name: str) -> None:
        for transport in self._made[name]:
            transport.close()


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except KVStoreError as exc:
        return exc


def test_a_workers_pushes_and_pulls_go_to_its_aggregator():
    network = InprocNetwork()
    job = Config(root="inproc://scheduler", num_workers=2, num_servers=2, num_aggregators=1, heartbeat_timeout_s=LONG)
    scheduler = threading.Thread(
        target=run_scheduler, args=(dataclasses.replace(job, role="scheduler"), network.transport())
    )
    scheduler.start()

    def joined(role: str, rank: int, aggregator: int = -1) -> Session:
        config = dataclasses.replace(job, role=role, rank_hint=rank, aggregator=aggregator)
        address = "" if role == "worker" else network.transport().bind(f"inproc://{role}-{rank}")
        return Session(config, network.transport, address).join()

    members = [("worker", 0, 0), ("worker", 1, -1), ("server", 0, -1), ("server", 1, -1), ("aggregator", 0, -1)]
    with ThreadPoolExecutor(len(members)) as pool:
        first, second, *servers, aggregator = sessions = list(pool.map(lambda member: joined(*member), members))
    assert first.carrier(0) == first.carrier(1) == first.aggregator != b""
    assert first.aggregator not in first.servers, "which hear of all that is not for the aggregator"
    assert (second.aggregator, second.carrier(1)) == (None, second.servers[1])
    assert len(aggregator.addresses) == 2
    assert [session.aggregated for session in sessions] == [[], [], [[0]], [[0]], [[0]]]
    assert (servers[0].servers, aggregator.aggregator) == ([], None)
    for session in sessions:
        session.leave()
    scheduler.join(LONG)
    assert not scheduler.is_alive()


# ---- endings


def test_everybody_ends_with_0_when_the_workers_are_done():
    with ThreadedJob(2, 2) as cluster:
        assert cluster.run(lambda store: store.rank) == [0, 1]
    assert cluster.exit_codes == {"scheduler": 0, "server 0": 0, "server 1": 0}


def test_a_worker_that_fails_ends_the_job_for_all_with_its_words():
    with ThreadedJob(2, 1) as cluster:
        barrier = threading.Barrier(2)

        def work(session: Session) -> Any:
            store = DistStore(session)
            store.init("w", torch.zeros(3))
            barrier.wait(LONG)
            if session.rank == 1:
                session.leave("ValueError: bad data")
                return None
            return outcome(lambda: store.pushpull("w", torch.zeros(3)))

        error = cluster.run_sessions(work)[0]
    assert isinstance(error, NodeLost)
    assert str(error) == "worker 1 failed: ValueError: bad data"
    assert set(cluster.exit_codes.values()) == {JOB_FAILED_EXIT}


def test_after_leaving_the_session_says_so():
    with ThreadedJob(1, 1) as cluster:

        def work(session: Session) -> None:
            store = DistStore(session)
            store.init("w", torch.zeros(1))
            session.leave()
            session.leave()
            with pytest.raises(UsageError, match="this process has left the job"):
                store.push("w", torch.zeros(1))

        cluster.run_sessions(work)
    assert set(cluster.exit_codes.values()) == {0}


# ---- silence


@pytest.mark.parametrize("silent", ["worker 1", "server 1"])
def test_who_falls_silent_is_named_to_all_survivors(silent: str):
    with Tapped(workers=3, servers=2) as cluster:
        barrier = threading.Barrier(3)

        def work(session: Session) -> Any:
            store = DistStore(session)
            store.init("w", torch.zeros(10))
            barrier.wait(LONG)
            if session.rank == 0:
                cluster.silence(silent)
            if silent == f"worker {session.rank}":
                return outcome(lambda: session.heartbeat_ended(LONG) and session.check(0))
            return outcome(store.barrier if session.rank else lambda: store.pushpull("w", torch.zeros(10)).wait())

        results = cluster.run_sessions(work)
    for rank, error in enumerate(results):
        if silent == f"worker {rank}":
            assert isinstance(error, NodeLost)
            assert str(error).startswith("the scheduler at inproc://scheduler has been silent for")
        else:
            assert isinstance(error, NodeLost), error
            assert str(error).startswith(f"{silent} is lost: it has been silent for")
    assert set(cluster.exit_codes.values()) == {JOB_FAILED_EXIT}


def test_a_silent_scheduler_is_lost_for_all():
    with Tapped(workers=2, servers=2) as cluster:

        def work(session: Session) -> Any:
            store = DistStore(session)
            store.init("w", torch.zeros(10))
            store.barrier()
            if session.rank == 0:
                cluster.silence("scheduler")
            return outcome(store.barrier)

        results = cluster.run_sessions(work)
    for error in results:
        assert isinstance(error, NodeLost)
        assert str(error).startswith("the scheduler at inproc://scheduler has been silent for")
    assert cluster.exit_codes["server 0"] == cluster.exit_codes["server 1"] == JOB_FAILED_EXIT


# ---- errors that reach the worker


def test_an_optimizer_that_cannot_be_made_raises_in_every_worker_with_the_servers_message():
    with ThreadedJob(2, 2) as cluster:
        results = cluster.run(lambda store: outcome(lambda: store.set_optimizer("sgd", learning_rate=-1.0)))
    for error in results:
        assert isinstance(error, ServerError)
        assert str(error) == "ValueError: Invalid learning rate: -1.0"


# ---- what only a broken scheduler does


def test_who_has_been_replaced_goes_without_a_word() -> None:
    with Tapped(workers=2, servers=1) as job:
        job.sessions[1].abandon()
        assert job.sessions[1].heartbeat_ended(LONG)
        with pytest.raises(UsageError, match="this process has left the job"):
            job.sessions[1].num_dead_nodes()
        until(lambda: "worker 1 is lost" in str(job.sessions[0].client.failure))  # to the scheduler it is dead


def test_leaving_without_the_schedulers_answer_says_so_and_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sessions, "LEAVE_S", 0.05)
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.05)
    network = InprocNetwork()
    far = network.transport()
    far.bind("inproc://scheduler")
    stop = threading.Event()

    def welcome_and_nothing_else() -> None:
        while not stop.is_set():
            received = far.recv(0.05)
            if received is not None:
                message = wire.decode(received[1])
                reply = wire.Welcome(message.seq, 0, 1, 1, []) if isinstance(message, wire.Join) else wire.Alive()
                far.send(received[0], wire.encode(reply))

    thread = threading.Thread(target=welcome_and_nothing_else)
    thread.start()
    try:
        session = Session(Config("worker", "inproc://scheduler", 1, 1), network.transport).join()
        session.leave()
    finally:
        stop.set()
        thread.join()
    assert "left the job without the scheduler's answer: leaving the job is not done after 0.05 s" in caplog.text
    assert session.heartbeat_ended(0)


class Far:
    """The scheduler and the servers of a session, played by the test, whose one thread lets all of them speak."""

    def __init__(self, role: str = "worker") -> None:
        network = InprocNetwork()
        self.ends = {name: network.transport() for name in ("scheduler", "old", "new")}
        for name, end in self.ends.items():
            end.bind(f"inproc://{name}")
        self.notices: list[wire.Message] = []
        config = Config(role, "inproc://scheduler", 1, 1, heartbeat_s=LONG / 10, heartbeat_timeout_s=LONG, start=4)
        self.session = Session(config, network.transport, on_notice=self.notices.append)
        self.joined: list[Any] = []
        self.beating = b""

    def __enter__(self) -> Far:
        joining = threading.Thread(target=self.session.join)
        joining.start()
        peer, join = self.hear("scheduler")
        self.joined.append(join)
        self.ends["scheduler"].send(peer, wire.encode(wire.Welcome(join.seq, 0, 1, 1, ["inproc://old"])))
        joining.join(LONG)
        self.beating, beat = self.hear("scheduler")
        assert isinstance(beat, wire.Beat)
        return self

    def __exit__(self, *_: object) -> None:
        self.session.give_up("over")

    def hear(self, name: str) -> tuple[bytes, Any]:
        received = self.ends[name].recv(LONG)
        assert received is not None
        return received[0], wire.decode(received[1])

    def tell(self, *notices: wire.Message) -> None:
        """Let notices come, and return when they have been taken."""
        for notice in notices:
            self.ends["scheduler"].send(self.beating, wire.encode(notice))
        self.ends["scheduler"].send(self.beating, wire.encode(wire.Roster(1, [])))
        until(lambda: bool(self.notices) and isinstance(self.notices[-1], wire.Roster))
        self.notices.pop()


def test_a_worker_asks_a_server_where_it_is_now_and_counts_takeovers():
    with Far() as far:
        assert far.joined[0].start == 4
        operation = Operation("x", (), far.session.client)
        question = Question(far.session.servers[0], operation, wire.Census, {}, operation.take)
        far.session.client.ask(operation, question)
        assert [type(far.hear("old")[1]) for _ in range(2)] == [wire.Here, wire.Census]
        answering = threading.Thread(target=operation.wait)  # the wait is where the links are used
        answering.start()
        far.tell(
            wire.Moved(0, 3, "inproc://new"),
            wire.Moved(0, 3, "inproc://new"),
            wire.Moved(0, 2, "inproc://old"),
            wire.Moved(9, 1, "x"),
        )
        assert far.notices == [wire.Moved(0, 3, "inproc://new")], "the others are old, or of no server"
        (_, here), (peer, asked) = far.hear("new"), far.hear("new")
        assert (type(here), type(asked)) == (wire.Here, wire.Census)
        far.ends["new"].send(peer, wire.encode(wire.Counted(asked.seq, 5)))
        answering.join(LONG)
        assert operation.wait() == wire.Counted(asked.seq, 5)
        assert (far.session.takeovers, far.session.addresses) == (1, ["inproc://new"])


def test_a_fault_that_is_told_again_is_raised_once():
    """A scheduler that was started again tells all faults again."""
    with Far() as far:
        faults = [wire.Fault(0, "Mismatch", f"key {number}", number) for number in (1, 2)]
        far.tell(*faults, *faults)
        for number in (1, 2):
            with pytest.raises(Mismatch, match=f"key {number}"):
                far.session.check(0)
        far.session.check(0)


def test_a_server_reports_over_the_link_of_its_beats_and_is_told_of_views():
    with Far("server") as far:
        standing = wire.Standing(far.session.client.node, 1, 12, synced=True)
        far.session.report(standing)
        assert far.hear("scheduler") == (far.beating, standing)
        view = wire.View(wire.Node("server", 0, 1), 2)
        far.tell(view)
        assert far.notices == [view]


def test_threads_of_one_worker_get_their_own_answers():
    rounds, count = 30, 4
    with ThreadedJob(2, 2, bigarray_bound=50) as cluster:

        def work(session: Session) -> list[Any]:
            store = DistStore(session)
            keys = [f"k{n}" for n in range(count)]
            store.init(keys, [torch.zeros(60 + n) for n in range(count)])
            results: list[Any] = [None] * count

            def use(n: int) -> None:
                out, total = torch.zeros(60 + n), 0.0
                for turn in range(rounds):
                    if turn % 2:
                        store.pushpull(f"k{n}", torch.full((60 + n,), float(turn + n)), out)
                    else:
                        store.push(f"k{n}", torch.full((60 + n,), float(turn + n)))
                        store.pull(f"k{n}", out)
                    assert set(out.tolist()) == {2.0 * (turn + n)}
                    total += out[0].item()
                results[n] = total

            def run(n: int) -> None:
                try:
                    use(n)
                except BaseException as exc:
                    results[n] = exc

            threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            store.close()
            return results

        expected = [float(sum(2 * (turn + n) for turn in range(rounds))) for n in range(count)]
        assert cluster.run_sessions(work) == [expected, expected]


def test_two_threads_push_the_same_key_and_every_push_is_a_round_of_its_own():
    with ThreadedJob(2, 2) as cluster:

        def work(store: DistStore) -> float:
            store.set_optimizer("sgd", learning_rate=1.0)
            store.init("w", torch.zeros(1))
            threads = [
                threading.Thread(target=lambda: [store.push("w", torch.ones(1)) for _ in range(50)]) for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            out = torch.zeros(1)
            store.pull("w", out)
            return out.item()

        assert cluster.run(work) == [-200.0, -200.0]


@pytest.mark.parametrize("aggregators", [0, 1])
def test_a_late_pull_names_the_worker_the_push_and_the_key_and_where_it_is(aggregators: int):
    with ThreadedJob(2, 2, aggregators=aggregators) as cluster:

        def work(store: DistStore) -> Any:
            store.init(["w", "x"], [torch.zeros(4), torch.zeros(4)])
            error = None
            if store.rank == 0:
                store.push("w", torch.ones(4))
                ticket = store.pull("w", torch.zeros(4), wait=False)
                error = outcome(lambda: ticket.wait(0.05))
            store.barrier()
            if store.rank == 1:
                store.push("w", torch.ones(4))
            return error

        error = cluster.run(work)[0]
    assert isinstance(error, DeadlineExceeded)
    asked = "aggregator 0" if aggregators else "server "
    assert str(error).startswith(f"pull of 'w' is not done after 0.05 s: {asked}")
    reason, _, place = str(error).rpartition("; worker 1 is at ")
    assert reason.endswith(" worker 1, whose push 1 of 'w' is missing")
    assert " in " in place
    assert error.silent == ()


def test_late_calls_to_the_scheduler_name_whom_they_wait_for():
    with ThreadedJob(2, 1) as cluster:

        def work(session: Session) -> list[str]:
            impatient = DistStore(session, timeout=0.05)
            if session.rank == 0:
                return [str(outcome(impatient.barrier))]
            errors = [str(outcome(lambda: impatient.init("w", torch.zeros(1))))]
            return [*errors, str(outcome(lambda: impatient.set_optimizer("sgd")))]

        results = cluster.run_sessions(work)
    assert {result.partition("; worker ")[0] for result in results[0]} <= {
        f"barrier is not done after 0.05 s: the scheduler waits at the barrier for worker 1 ({where})"
        for where in ("has not come yet", "is in init()")
    }
    assert all("; worker 0 is at " in result for result in results[1])
    assert [result.partition("; worker ")[0] for result in results[1]] == [
        "init of 'w' is not done after 0.05 s: the scheduler waits for worker 0 to init 'w'",
        "set_optimizer is not done after 0.05 s: server 0 waits for worker 0, which has not called set_optimizer",
    ]


def test_joining_in_vain_names_the_absent():
    network = InprocNetwork()
    scheduler = network.transport()
    scheduler.bind("inproc://scheduler")
    from servers.scheduler import Scheduler
    from servers.service import Service

    core = Scheduler(2, 1, 10.0)
    service = Service(scheduler)
    thread = threading.Thread(target=service.run, args=(lambda peer, message: core.handle(peer, message, 0.0),))
    thread.start()
    try:
        config = Config("worker", "inproc://scheduler", 2, 1, rank_hint=1, timeout_s=0.05, patience_s=0.05)
        with pytest.raises(DeadlineExceeded) as info:
            Session(config, network.transport).join()
        assert str(info.value) == (
            "joining the job at inproc://scheduler is not done after 0.05 s: "
            "the scheduler waits for worker 0 and server 0 to join"
        )
    finally:
        service.stop()
        thread.join()


def test_a_worker_that_gave_up_joining_may_come_back():
    """The scheduler would count it as there for ever, and refuse its next attempt."""

    class Hasty(ThreadedJob):
        def join(self, rank: int) -> None:
            if rank == 0:
                hasty = dataclasses.replace(self.config("worker", 0), timeout_s=0.05, patience_s=0.05)
                with pytest.raises(DeadlineExceeded, match=r"waits for .*worker 1"):
                    Session(hasty, self.ends(hasty)).join()
                given_up.set()
            else:
                assert given_up.wait(LONG)
            super().join(rank)

    given_up = threading.Event()
    with Hasty(2, 1) as cluster:
        assert cluster.run(lambda store: store.rank) == [0, 1]
    assert set(cluster.exit_codes.values()) == {0}


@pytest.mark.parametrize("role", ["worker", "server"])
def test_joining_without_a_scheduler_ends_at_the_deadline(role: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.05)
    network = InprocNetwork()
    config = Config(role, "inproc://scheduler", 1, 1, timeout_s=0.05)
    joins: dict[str, Callable[[], Any]] = {
        "worker": lambda: Session(config, network.transport).join(),
        "server": lambda: run_member(config, network.transport, "inproc://server-0"),
    }
    with pytest.raises(DeadlineExceeded, match="the scheduler does not answer") as info:
        joins[role]()
    assert info.value.silent == ("the scheduler",)
    network.transport().bind("inproc://server-0")  # which is free again


def test_a_server_waits_on_while_the_scheduler_lives(caplog: pytest.LogCaptureFixture):
    """It may be there long before the workers; only a scheduler that does not answer ends its patience."""
    waited = threading.Event()

    class Patient(ThreadedJob):
        def config(self, role: str, rank: int = -1) -> Config:
            return dataclasses.replace(super().config(role, rank), timeout_s=0.05 if role == "server" else LONG)

        def join(self, rank: int) -> None:
            assert waited.wait(LONG)
            super().join(rank)

    cluster = Patient(1, 1)
    warn = client.log.warning
    client.log.warning = lambda *args: (waited.set(), warn(*args))  # type: ignore[assignment,method-assign]
    try:
        with cluster:
            assert cluster.run_sessions(lambda session: session.rank) == [0]
    finally:
        client.log.warning = warn  # type: ignore[method-assign]
    assert "the scheduler waits for worker 0 to join" in caplog.text
    assert cluster.exit_codes == {"scheduler": 0, "server 0": 0}


def test_who_is_not_wanted_is_told():
    with ThreadedJob(1, 1) as cluster:
        config = cluster.config("worker")
        with pytest.raises(UsageError, match="the job has its 1 workers already"):
            Session(config, cluster.ends(config)).join()


def test_a_scheduler_whose_name_nobody_knows_is_not_only_silent(monkeypatch: pytest.MonkeyPatch):
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.05)
    config = Config("worker", "tcp://nosuch.invalid:9091", 1, 1, join_timeout_s=0.05)
    with pytest.raises(
        DeadlineExceeded, match=r"does not answer: cannot resolve .nosuch\.invalid., .*not known"
    ) as caught:
        Session(config, TcpTransport).join()
    assert caught.value.silent == ("the scheduler",)


PEERS = [b"server 0", b"server 1"]


class Worker:
    """A worker whose requests are played."""

    def __init__(self) -> None:
        self.now = 50.0
        links = SimpleNamespace(
            outstanding=[1, 2, 3], sent={PEERS[0]: 10, b"the scheduler": 99}, received={PEERS[1]: 7}
        )
        self.blocked = BlockedTime()
        client: Any = SimpleNamespace(node=wire.Node("worker", 4, 1), links=links, blocked=self.blocked)
        self.activity = WorkerActivity(client, lambda: self.now, lambda: PEERS)


def test_a_report_says_what_has_been_counted():
    worker = Worker()
    worker.activity.stores += [lambda: StoreActivity(12, 2), lambda: StoreActivity(30)]
    worker.blocked.here().since = 49.5
    report = worker.activity.report()
    assert (report.at, report.node, report.rounds, report.ahead) == (50.0, wire.Node("worker", 4, 1), 30, 2)
    assert (report.blocked_us, report.input_us, report.outstanding) == (500_000, -1, 3)
    assert (report.sent, report.received) == ([10, 0], [0, 7])
    assert report.memory > 1 << 20
    assert wire.decode(wire.encode(report)) == report


def test_rounds_stay_when_the_store_is_closed():
    worker = Worker()
    worker.activity.stores.append(lambda: StoreActivity(12))
    worker.activity.report()
    worker.activity.stores.clear()
    assert worker.activity.report().rounds == 12


def test_input_is_unknown_until_the_program_says_it():
    activity = Worker().activity
    activity.read_input(0.25)
    activity.read_input(0.5)
    assert activity.report().input_us == 750_000


def test_the_latest_values_are_reported_as_far_as_they_are_numbers_and_few():
    activity = Worker().activity
    activity.log({"epoch": 1, "loss": 2.5})
    activity.log({"loss": float("nan"), "accuracy": 0.5})
    assert activity.report().values == [["epoch", 1.0], ["loss", 2.5], ["accuracy", 0.5]]
    activity.log({f"value {number}": number for number in range(100)})
    report = activity.report()
    assert len(report.values) == MOST_VALUES
    assert wire.decode(wire.encode(report)) == report
