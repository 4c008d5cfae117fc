from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import screen
from waiting import LONG

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.description import Injection
from launcher.job.tasks import Task
from launcher.output.outlet import Outlet
from launcher.supervision import supervisor as module
from launcher.supervision.crew import CHILD, SignalQueue, Sink, turn
from launcher.supervision.ending import EndingLimits, Lose
from launcher.supervision.restarts import Restarts
from launcher.supervision.supervisor import Drill, Supervisor, prepare, report, report_loss

TASKS = [Task("scheduler", 0, ("x",), {}), Task("server", 0, ("x",), {}), Task("worker", 0, ("x",), {})]
HASTE = EndingLimits(window=0.01, linger=0.01, grace=0.01, short_grace=0.01, kill=0.01)
Step = Callable[["Played"], None]


class Played:
    """A crew that takes one step of a script whenever it is looked after; a signal ends what still runs."""

    def __init__(self, *steps: Step, dies_of: int = signal.SIGTERM) -> None:
        self.steps, self._dies_of = list(steps), dies_of
        self.running = set(range(len(TASKS)))
        self.signals: list[int] = []
        self.closed = 0
        self.restarts = True
        self.hits: list[tuple[int, int]] = []
        self.restarted: list[tuple[int, dict[str, str]]] = []

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        self.sink = sink

    def end(self, index: int, how: Exit) -> None:
        self.running.discard(index)
        self.sink.exited(index, how)

    def can_restart(self, index: int) -> bool:
        return self.restarts

    def restart(self, index: int, variables: Mapping[str, str], host: str = "") -> None:
        self.restarted.append((index, dict(variables)))
        self.running.add(index)

    def signal_task(self, index: int, signum: int) -> bool:
        self.hits.append((index, signum))
        return index in self.running

    def collect(self) -> None:
        if self.steps:
            self.steps.pop(0)(self)

    def reading(self, wanted: bool) -> None:
        """Nothing is read."""

    def signal(self, signum: int) -> None:
        self.signals.append(signum)
        if signum in (self._dies_of, signal.SIGKILL):
            for index in list(self.running):
                self.end(index, Exit(signum=signum))

    def leftovers(self) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1


def ends(index: int, code: int = 0) -> Step:
    return lambda crew: crew.end(index, Exit(code=code))


def says(index: int, number: int, data: bytes) -> Step:
    return lambda crew: crew.sink.output(index, number, data)


def reports(index: int, report: ExitReport) -> Step:
    return lambda crew: crew.sink.reported(index, report)


def waits_for_a_restart(crew: Played) -> None:
    if not crew.restarted:
        crew.steps.insert(0, waits_for_a_restart)


def waits_until_heard(told: Told) -> Step:
    def wait(crew: Played) -> None:
        if len(told.losses) <= told.deaf:
            crew.steps.insert(0, wait)

    return wait


class Told:
    """Files for the output, and who was told of a failure."""

    def __init__(self, directory: Path) -> None:
        self._paths = directory / "out", directory / "err"
        self._fds = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in self._paths]
        self.outlet = Outlet(*self._fds)
        self.failures: list[tuple[str, str]] = []
        self.losses: list[tuple[str, Lose]] = []
        self.deaf = 0  # how many reports of losses are not heard

    def on_failure(self, task: Task, how: str) -> None:
        self.failures.append((task.name, how))

    def on_loss(self, task: Task, loss: Lose) -> bool:
        self.losses.append((task.name, loss))
        return len(self.losses) > self.deaf

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.close()


def run(
    crew: Played,
    told: Told,
    on_failure: Callable[[Task, str], None] | None = None,
    limits: EndingLimits = HASTE,
    where: str | None = None,
    roles: frozenset[str] = frozenset(),
    faults: Sequence[str] = (),
    attached: int | None = None,
) -> int:
    with SignalQueue() as signals:
        supervisor = Supervisor(
            TASKS,
            [crew],
            signals,
            on_failure or told.on_failure,
            environ={},
            limits=limits,
            outlet=told.outlet,
            name="the test",
            where=where,
            restarts=Restarts(TASKS, roles, 5),
            on_loss=told.on_loss,
            drill=Drill(TASKS, map(Injection.parse, faults)),
            attached=attached,
        )
        try:
            supervisor.start()
            return supervisor.run()
        finally:
            supervisor.close()


def test_a_job_that_goes_well(told: Told) -> None:
    crew = Played(ends(2), ends(0), ends(1))
    assert run(crew, told, limits=EndingLimits(linger=LONG)) == 0
    assert (told.failures, told.out, told.err, crew.signals, crew.closed) == ([], "", "", [], 1)


def test_whole_lines_come_out_with_the_name_of_their_process(told: Told) -> None:
    crew = Played(
        says(2, 1, b"one\ntw"),
        says(1, 2, b"oops\n"),
        says(2, 1, b"o\nhalf"),
        says(2, 1, b""),
        ends(2),
        ends(0),
        ends(1),
    )
    assert run(crew, told) == 0
    assert told.out == "[worker 0] one\n[worker 0] two\n[worker 0] half\n"
    assert told.err == "[server 0] oops\n"


def test_on_a_terminal_a_bar_stays_below_the_lines(told: Told) -> None:
    with screen.terminal() as (ours, theirs):
        told.outlet = Outlet(theirs, theirs)
        crew = Played(
            says(2, 2, b"bar 1%\r"),
            says(1, 1, b"a line of the server\n"),
            says(2, 2, b"bar 2%\r"),
            says(2, 1, b"a line\n"),
            *(says(2, 2, b"the end\n"), ends(0), ends(1), ends(2)),
        )
        assert run(crew, told) == 0
        output = os.read(ours, 1 << 16).decode()
    steps = ["m bar 1%", "of the server\r\n", "m bar 1%", "m bar 2%", "a line\r\n", "m bar 2%"]
    at = 0
    for step in steps:
        assert step in output[at:], output
        at = output.index(step, at) + len(step)
    lines = ["[server 0] a line of the server", "[worker 0] a line", "[worker 0] the end", ""]
    assert screen.seen(output) == lines


def test_the_first_failure_is_told_once_and_ends_the_others(told: Told) -> None:
    crew = Played(ends(2, 7), ends(1, 3))
    assert run(crew, told) == 7
    assert told.failures == [("worker 0", "exited with code 7")]
    assert told.err == "the test: worker 0 exited with code 7\n"
    assert crew.running == set()


def test_who_does_not_end_is_killed(told: Told) -> None:
    crew = Played(ends(2), dies_of=signal.SIGKILL)
    assert run(crew, told) == 0
    assert crew.signals == [signal.SIGTERM, signal.SIGKILL]


def test_a_signal_ends_the_job(told: Told) -> None:
    crew = Played(lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert run(crew, told) == 143
    assert crew.signals == [signal.SIGTERM]
    assert told.failures == []


def test_after_a_signal_it_says_what_has_been_ended(told: Told) -> None:
    crew = Played(ends(1), lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert run(crew, told) == 130
    assert told.err == "the test: Ctrl-C: ended 1 worker, the scheduler; no process of the job is left\n"


def interrupt(_: Played) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_for_the_worker_that_has_the_terminal_and_twice_for_the_job(told: Told) -> None:
    crew = Played(interrupt, interrupt)
    assert run(crew, told, attached=2) == 130
    assert (crew.hits, crew.signals) == ([(2, signal.SIGINT)], [signal.SIGTERM])
    assert told.err.splitlines()[0] == (
        "the test: worker 0 has this terminal; Ctrl-C is for it, and twice ends the job"
    )
    assert "the test: Ctrl-C: ended 1 worker" in told.err


def test_ctrl_c_ends_the_job_if_the_worker_that_has_the_terminal_has_ended(told: Told) -> None:
    crew = Played(ends(2), interrupt)
    assert run(crew, told, attached=2, limits=EndingLimits(linger=LONG)) == 130
    assert (crew.hits, crew.signals) == ([], [signal.SIGTERM])


def test_it_does_not_say_that_nothing_is_left_if_it_cannot_know(told: Told) -> None:
    crew = Played(lambda _: os.kill(os.getpid(), signal.SIGINT))
    crew.leftovers = lambda: True  # type: ignore[method-assign]
    assert run(crew, told) == 130
    assert told.err.splitlines()[-1] == (
        "the test: Ctrl-C: ended 1 worker, 1 server, the scheduler; some of its processes may be left"
    )


def test_it_says_what_it_starts(told: Told) -> None:
    assert run(Played(ends(2), ends(0), ends(1)), told, where="on 2 hosts") == 0
    assert told.err == "the test: starting 1 worker, 1 server on 2 hosts\n"


def test_the_reason_is_the_last_that_one_reads(told: Told) -> None:
    crew = Played(
        reports(2, ExitReport("ValueError: no", "train.py:3", "Traceback\nValueError: no\n")),
        says(2, 2, b"at exit\n"),
        ends(2, 1),
        says(1, 2, b"oops\n"),
    )
    assert run(crew, told, limits=EndingLimits(window=0.5, grace=0.01)) == 1
    assert told.err == (
        "[worker 0] at exit\n[server 0] oops\nthe test: worker 0 exited with code 1:\n"
        "[worker 0] Traceback\n[worker 0] ValueError: no\n"
    )


def test_without_a_report_the_last_line_of_the_failed_process_is_repeated(told: Told) -> None:
    crew = Played(says(2, 2, b"one\nImportError: x\n"), ends(2, 1), says(1, 2, b"oops\n"))
    assert run(crew, told, limits=EndingLimits(window=0.5, grace=0.01)) == 1
    assert (
        told.err.splitlines()[-1] == "the test: worker 0 exited with code 1; the last that it printed: ImportError: x"
    )


def test_a_server_that_may_die_is_started_again_and_says_why_it_died(told: Told) -> None:
    crew = Played(
        reports(1, ExitReport("MemoryError", "", "Traceback\nMemoryError\n")),
        ends(1, 1),
        waits_for_a_restart,
        *(ends(2), ends(0), ends(1)),
    )
    assert run(crew, told, roles=frozenset({"server"})) == 0
    assert told.losses == [("server 0", Lose(1, "exited with code 1", 1, False))]
    ((index, variables),) = crew.restarted
    assert (told.failures, index, variables["KVSTORE_START"]) == ([], 1, "2")
    assert variables["KVSTORE_LOST"].startswith("exited with code 1 ")
    assert told.err == ("the test: server 0 exited with code 1:\n[server 0] Traceback\n[server 0] MemoryError\n")


def test_faults_are_injected_by_the_time(told: Told) -> None:
    def waits(crew: Played) -> None:
        if len(crew.hits) < 2:
            crew.steps.insert(0, waits)

    crew = Played(ends(0), waits, ends(2), ends(1))
    faults = ("stop:server:0@0.01s", "kill:scheduler@0.02s", "kill:server:0@600s")
    assert run(crew, told, faults=faults, limits=EndingLimits(linger=0.01)) == 0
    assert crew.hits == [(1, signal.SIGSTOP), (0, signal.SIGKILL)]
    assert told.err == (
        "the test: --inject: SIGSTOP for server 0, 0.01 s after the start\n"
        "the test: --inject: not SIGKILL for scheduler, 0.02 s after the start: it does not run\n"
    )


def test_a_server_that_nobody_can_start_again_is_given_up(told: Told) -> None:
    crew = Played(ends(1, 1), ends(2), ends(0))
    crew.restarts = False
    assert run(crew, told, roles=frozenset({"server"})) == 0
    assert told.losses == [("server 0", Lose(1, "exited with code 1", 1, True))]
    assert "server 0 exited with code 1; it cannot be started again; server 0 has no standby from now on" in told.err


def test_that_nobody_can_be_told_does_not_matter(told: Told) -> None:
    def fail(task: Task, how: str) -> None:
        raise OSError("nobody home")

    assert run(Played(ends(1, 7)), told, fail) == 7
    assert "the test: could not tell the others that server 0 exited with code 7: nobody home\n" in told.err


def test_nobody_reads_the_output_any_more(told: Told) -> None:
    read, write = os.pipe()
    os.close(read)
    told.outlet = Outlet(write, told.outlet.stderr)
    assert run(Played(says(2, 1, b"x\n")), told) == 128 + signal.SIGPIPE
    os.close(write)


def test_a_disk_that_is_full_costs_the_output_alone(told: Told) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    told.outlet = Outlet(full, told.outlet.stderr)
    assert run(Played(says(2, 1, b"x\n"), ends(2), ends(0), ends(1)), told) == 0
    assert (
        told.err == "the test: cannot write to standard output: No space left on device; the job goes on without it\n"
    )
    os.close(full)


def test_a_scheduler_that_does_not_hear_of_a_loss_is_told_again(told: Told) -> None:
    told.deaf = 1
    crew = Played(ends(1, 1), waits_for_a_restart, waits_until_heard(told), *(ends(2), ends(0), ends(1)))
    assert run(crew, told, roles=frozenset({"server"})) == 0
    assert told.losses == [("server 0", Lose(1, "exited with code 1", 1, False))] * 2


ENV = {"DMLC_PS_ROOT_URI": "ipc:///nowhere/scheduler"}


def test_the_scheduler_is_told_who_has_ended_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "tell", lambda *words, final: told.append((*words, final)))
    for role in ("server", "worker"):
        report(Task(role, 1, ("x",), ENV), "exited with code 7")
    assert told == [
        (ENV, "server", 1, "exited with code 7", False),
        (ENV, "worker", 1, "exited with code 7", True),
    ], "the job fails without this worker, though others may come back"


def test_or_who_has_died_while_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "tell", lambda *words: told.append(words))
    for env in (ENV, {}):
        prepare(Task("standby", 1, ("x",), env))
    assert not report_loss(Task("standby", 1, ("x",), ENV), Lose(7, "was killed by SIGKILL", 3, False))
    assert told == [(ENV, "standby", 1, "was killed by SIGKILL", 3, False)]


def test_when_the_scheduler_itself_has_ended_nobody_is_told() -> None:
    report(Task("scheduler", 0, ("x",), {}), "was killed by SIGKILL")  # an environment that nobody could be told by
    assert report_loss(Task("scheduler", 0, ("x",), {}), Lose(0, "was killed by SIGKILL", 1, False))


DRILL_TASKS = [Task("scheduler", 0, ("x",), {}), Task("server", 0, ("x",), {}), Task("standby", 0, ("x",), {})]


def test_faults_come_in_the_order_of_their_times_after_the_start() -> None:
    texts = ("stop:standby:0@3s", "kill:server:0@round:2", "cont:standby:0@4s", "kill:scheduler@3s")
    stop, _, cont, kill = injections = [Injection.parse(text) for text in texts]
    drill = Drill(DRILL_TASKS, injections)
    assert drill.wake is None
    assert drill.due(50.0) == []
    assert drill.wake == 53.0
    assert drill.due(52.9) == []
    assert drill.due(53.0) == [(2, stop), (0, kill)]
    assert drill.wake == 54.0
    assert drill.due(99.0) == [(2, cont)]
    assert (drill.due(100.0), drill.wake) == ([], None)


def test_without_faults_there_is_nothing_to_wait_for() -> None:
    drill = Drill(DRILL_TASKS, [Injection.parse("kill:server:0@round:2")])
    assert (drill.due(50.0), drill.wake) == ([], None)


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe() for _ in range(3)]
    yield made
    for read, write in made:
        os.close(read)
        os.close(write)


def test_what_is_ready_is_called_and_nothing_else(pipes: list[tuple[int, int]]) -> None:
    called: list[int] = []
    with selectors.DefaultSelector() as selector:
        for number, (read, _) in enumerate(pipes):
            selector.register(read, selectors.EVENT_READ, lambda number=number: called.append(number))
        assert not turn(selector, 0)
        for number in (0, 2):
            os.write(pipes[number][1], b"x")
        assert turn(selector, 60)
        assert sorted(called) == [0, 2]


def test_what_has_no_callable_is_only_waited_for(pipes: list[tuple[int, int]]) -> None:
    read, write = pipes[0]
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        os.write(write, b"x")
        assert turn(selector, 60)
    assert os.read(read, 9) == b"x"


@pytest.fixture
def signals() -> Iterator[SignalQueue]:
    with SignalQueue() as entered:
        yield entered


def raised(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


def test_signals_are_taken_in_their_order_once() -> None:
    with SignalQueue() as signals:
        assert signals.take() == []
        raised(signal.SIGTERM, CHILD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        assert signals.take() == [signal.SIGTERM, CHILD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
        assert signals.take() == []


def test_a_selector_wakes_up(signals: SignalQueue) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        assert selector.select(0) == []
        raised(signal.SIGTERM)
        assert len(selector.select(60)) == 1
        signals.take()
        assert selector.select(0) == []


def test_afterwards_all_is_as_it_was() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, CHILD)}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with SignalQueue():
        assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
    assert {signum: signal.getsignal(signum) for signum in before} == before
    assert signal.set_wakeup_fd(wakeup) == wakeup


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_at_the_start_stays_ignored(ignored: signal.Signals) -> None:
    before = signal.signal(ignored, signal.SIG_IGN)  # `nohup launch.py ...`, and `launch.py ... &` in a script
    try:
        with SignalQueue() as signals:
            raised(ignored, signal.SIGTERM)
            assert signals.take() == [signal.SIGTERM]
            assert signal.getsignal(ignored) is signal.SIG_IGN
    finally:
        signal.signal(ignored, before)


# ---- workers that are added


class Caller:
    """Somebody who has given an order, and how it has ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []

    def end(self, code: int, text: str) -> None:
        self.ends.append((code, text))


def test_workers_are_added_up_to_the_most_and_dead_ones_are_started_again(told: Told) -> None:
    class Growing(Played):
        def more(self, index: int, rank: int, host: str = "") -> Task | None:
            return Task("worker", rank, ("x",), {})

        def take(self, index: int, task: Task) -> None:
            self.running.add(index)

        def hosts(self) -> list[str]:
            return []

    tasks, caller, crew = list(TASKS), Caller(), Growing()
    restarts = Restarts(tasks, frozenset(), 0, min_workers=1, max_workers=2)

    def order(**words: str) -> tuple[int, str]:
        supervisor.take_order(words, caller)  # type: ignore[arg-type]
        return caller.ends[-1]

    with SignalQueue() as signals:
        how: dict[str, Any] = {"environ": {}, "limits": HASTE, "outlet": told.outlet, "on_loss": told.on_loss}
        supervisor = Supervisor(tasks, [crew], signals, told.on_failure, restarts=restarts, **how)  # type: ignore[list-item]
        supervisor.start()
        assert order(add="worker") == (0, "worker 1 has been started; one of the others lets it in")
        assert (len(tasks), crew.running) == (4, {0, 1, 2, 3})
        assert order(add="worker") == (1, "the job has had 2 workers, and --max-workers is 2")
        assert order(add="server")[0] == 2
        assert order(add="worker", to="node9") == (
            2,
            "the job has no host 'node9' to start processes on; all of its processes run on one machine",
        )
        crew.end(2, Exit(signum=signal.SIGKILL))
        assert told.losses == [("worker 0", Lose(2, "was killed by SIGKILL", 1, True))]
        assert order(add="worker") == (0, "worker 0 has been started; one of the others lets it in")
        assert [index for index, _ in crew.restarted] == [2]
        for index in (2, 3, 0, 1):
            crew.end(index, Exit())
        assert supervisor.run() == 0
        assert order(add="worker") == (1, "the job is ending")
        supervisor.close()
