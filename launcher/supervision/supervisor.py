"""The loop of a job: it starts the tasks, relays their output, and ends them as `Ending` decides.

It injects the faults of `--inject` that come by the time. A fault by rounds is injected by the server that has them.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.bootstrap.report import say, tell
from kvstore.errors import ConfigError
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.description import Injection, OutputOptions
from launcher.job.tasks import Task, again
from launcher.output.display import Display
from launcher.output.outlet import Outlet
from launcher.supervision.control import DONE, REFUSED, USAGE, Control, Orderer
from launcher.supervision.crew import CHILD, ENDING, Crew, SignalQueue, called, turn
from launcher.supervision.ending import Action, Ending, EndingLimits, Kill, Lose, Phase, Restart, Say, Tell
from launcher.supervision.moves import Moves, OrderRefused
from launcher.supervision.postmortem import Line, Postmortem
from launcher.supervision.restarts import Restarts

# Called with the first process that fails, and how ("exited with code 7"), while the others still run.
OnFailure = Callable[[Task, str], None]
# Called with each process that dies while its job goes on.
OnLoss = Callable[[Task, Lose], bool]

_HIGH_WATER = 4 << 20
_POLL_S = 0.02
_CHECK_S = 0.25
_FLUSH_S = 1.0
_RETIRE_S = 2.0  # between two orders to the scheduler, which may not have heard the first
_TWICE_S = 2.0  # between two Ctrl-C that are one wish


class Drill:
    """The faults of one job that come by the time. `injections`: its faults; those by rounds are left out."""

    def __init__(self, tasks: Sequence[Task], injections: Iterable[Injection]) -> None:
        self._indices = {(task.role, task.rank): index for index, task in enumerate(tasks)}
        timed = [(injection.after_s, injection) for injection in injections if injection.after_s is not None]
        self._left = sorted(timed, key=lambda fault: fault[0])
        self._began: float | None = None

    def due(self, now: float) -> list[tuple[int, Injection]]:
        """The faults whose time has come, each with the index of its task. The first call is the start of the job."""
        if not self._left:
            return []
        if self._began is None:
            self._began = now
        due = []
        while self._left and now >= self._began + self._left[0][0]:
            injection = self._left.pop(0)[1]
            due.append((self._indices[injection.member], injection))
        return due

    @property
    def wake(self) -> float | None:
        """When the next one is due; None for no such time."""
        return None if self._began is None or not self._left else self._began + self._left[0][0]


def report(task: Task, how: str) -> None:
    """Tell the scheduler of a job that a process has ended; see `kvstore.bootstrap.report.tell`.

    `how`: what happened to it: "exited with code 7".
    """
    tell(task.env, task.role, task.rank, how, final=task.role == "worker")


def report_loss(task: Task, loss: Lose) -> bool:
    """Tell the scheduler of a job that goes on that a process has died.

    Returns whether the scheduler has heard it, or need not: of itself. If not, say it again later.
    """
    return task.role == "scheduler" or tell(task.env, task.role, task.rank, loss.how, loss.start, loss.final)


def retire(task: Task, start: int) -> bool:
    """Tell the scheduler that a process of a server is to end as soon as the other one of its rank can serve alone."""
    from kvstore import wire

    return say(task.env, wire.Retire(task.role, task.rank, start))


def prepare(task: Task) -> None:
    """Import what `report` and `report_loss` need. Imports take longer than all else that is done after a death.

    `task`: any of the job. If its environment says no address, nothing is imported.
    """
    from kvstore.job.config import Config
    from kvstore.transport.choose import links

    with suppress(ConfigError):
        links(Config.from_env(task.env))


class Supervisor:
    """Runs the tasks of one job.

    Args:
        crews: the crews that run them, in the order in which to start. Workers that are added go to the end of `tasks`.
        signals: the signals, already entered.
        on_failure: called once with the first failure. It is called in the loop, so it must return soon.
        selector: a selector that the crews use already; None for a new one.
        where: where the tasks run, for the line that says what starts; None for no such line.
        on_loss: called in the loop with each task that `restarts` lets die, again and again until it returns True.
        attached: the task that has this process's terminal; None for none.
        directory: where orders to the job come in; None takes none. See `Control`.
        on_retire: called in the loop with a task that is to be moved and the start of its process.
    """

    def __init__(
        self,
        tasks: list[Task],
        crews: Sequence[Crew],
        signals: SignalQueue,
        on_failure: OnFailure,
        *,
        environ: Mapping[str, str],
        limits: EndingLimits | None = None,
        selector: selectors.BaseSelector | None = None,
        outlet: Outlet | None = None,
        output: OutputOptions | None = None,
        name: str = "launch.py",
        where: str | None = None,
        restarts: Restarts | None = None,
        on_loss: OnLoss = report_loss,
        drill: Drill | None = None,
        attached: int | None = None,
        directory: Path | None = None,
        on_retire: Callable[[Task, int], bool] = retire,
    ) -> None:
        self._tasks = tasks
        self._crews = crews
        self._signals = signals
        self._on_failure = on_failure
        self._on_loss = on_loss
        self._drill = Drill(tasks, ()) if drill is None else drill
        self._restarts = restarts
        self._unheard: list[Lose] = []  # of which the scheduler does not know yet
        self._say_again_at = 0.0
        self._ending = Ending(tasks, limits, restarts)
        self._outlet = Outlet() if outlet is None else outlet
        self._display = Display(
            tasks,
            self._outlet,
            environ=environ,
            options=output or OutputOptions(),
            name=name,
            attached=attached,
        )
        self._attached = attached
        self._interrupted = -math.inf  # when the attached task was
        self._where = where
        self._postmortem = Postmortem(tasks)
        self._on_retire = on_retire
        self._moves = Moves(tasks, self._hosts, self._why_not_moved, self._ending.runs, self._retire)
        self._retire_again_at = 0.0
        self._directory = directory
        self._control: Control | None = None
        self._own_selector = selector is None
        self._selector = selectors.DefaultSelector() if selector is None else selector
        self._selector.register(signals, selectors.EVENT_READ)
        self._reading = True
        self._waiting_for: int | None = None
        self._collected = time.monotonic()
        self._hurry = False  # after a signal: output that nobody reads is dropped soon
        self._muted = False  # standard output has failed
        self._closed = False

    def start(self) -> None:
        if self._where is not None:
            self.say(f"starting {self._counted(range(1, len(self._tasks)))} {self._where}")
        if self._attached is not None:
            self.say(f"{self._tasks[self._attached].name} has this terminal; Ctrl-C is for it, and twice ends the job")
        for index in range(len(self._tasks)):
            self._display.begins(index)
        for crew in self._crews:
            crew.start(self._selector, self)
        if self._directory is not None:
            self._control = Control(self._directory, self._selector, self.take_order)
        prepare(self._tasks[0])

    def run(self) -> int:
        """Follow the job to its end. Returns the exit code for launch.py."""
        while True:
            self._perform(self._ending.tick(time.monotonic(), self._leftovers))
            if self._ending.phase is Phase.RUNNING:
                self._inject()
                self._print(self._postmortem.overdue(time.monotonic()))
            self._say_again()
            if self._moves.current is not None and time.monotonic() >= self._retire_again_at:
                self._moves.go_on()
            self._display.tick()
            self._outlet.pump()  # after all that may say something: the last turn has no next one to write it in
            if self._ending.over:
                return self._ending.exit_code
            self._balance()
            self._wait()

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        for crew in self._crews:
            crew.close()  # before the conclusion: it reports the last output, which belongs above
        if not self._closed:
            self._closed = True
            self._conclude()
        self._display.close()
        self._flush()
        if self._own_selector:
            self._selector.close()

    def output(self, index: int, number: int, data: bytes) -> None:
        self._display.output(index, number, data)

    def reported(self, index: int, report: ExitReport) -> None:
        self._display.reported(index, report)
        self._postmortem.reported(index, report, time.monotonic())
        self._ending.reported(index, report)

    def exited(self, index: int, how: Exit) -> None:
        self._display.exited(index, how)
        self._postmortem.exited(index, how)
        possible = self._crew_of(index) is not None
        actions = self._ending.exited(index, how, time.monotonic(), possible)
        self._perform(actions)
        self._moves.ended(index, str(how), any(isinstance(action, Restart) for action in actions))

    def say(self, text: str, *, secret: bool = False) -> None:
        self._display.say(text, secret=secret)

    def _conclude(self) -> None:
        failure, interruption = self._ending.failure, self._ending.interruption
        self._display.conclude()
        if failure is not None:
            last = self._display.last_line(failure.index)
            for index in dict.fromkeys([failure.index, self._postmortem.root(failure.index)]):
                self._display.show_hidden(index)
            self._print(self._postmortem.lines(failure.index, failure.how, last))
            return
        self._print(self._postmortem.leftover())
        if interruption is not None and interruption.signum in ENDING:
            ended = self._counted(interruption.ended)
            left = "some of its processes may be left" if self._leftovers() else "no process of the job is left"
            self.say(f"{called(interruption.signum)}: ended {ended}; {left}")

    def _print(self, lines: Sequence[Line]) -> None:
        for index, text in lines:
            if index is None:
                self.say(text)
            else:
                self._display.show(index, text)

    def _counted(self, indices: Iterable[int]) -> str:
        """How many tasks of each role these are: `2 workers, 1 server`; the scheduler, if it is among them."""
        counts: Counter[str] = Counter(self._tasks[index].role for index in indices)
        words = [
            f"{counts[role]} {role}{'s' if counts[role] > 1 else ''}"
            for role in ("worker", "server", "standby", "aggregator")
            if counts[role]
        ]
        return ", ".join([*words, *(["the scheduler"] if counts["scheduler"] else [])])

    def _leftovers(self) -> bool:
        return any(crew.leftovers() for crew in self._crews)

    def _wait(self) -> None:
        ready = turn(self._selector, self._timeout())
        received = self._signals.take()
        for signum in received:
            if signum != CHILD and not (signum == signal.SIGINT and self._interrupt()):
                self._hurry = True
                if self._attached is not None:
                    self._outlet.put(self._outlet.stderr, b"\n")  # behind the prompt, or what was typed
                self._perform(self._ending.signalled(signum, time.monotonic()))
        # Also without a signal: one may be lost, and crews on other hosts have deadlines.
        if CHILD in received or time.monotonic() >= self._collected + _CHECK_S or not ready:
            self._collected = time.monotonic()
            for crew in self._crews:
                crew.collect()

    def _interrupt(self) -> bool:
        """Pass a Ctrl-C on to the task that has the terminal, and runs; return False if it is to end the job.

        The terminal sends it to launch.py's processes only: a task is in a session of its own.
        """
        now = time.monotonic()
        if self._attached is None or self._ending.phase is not Phase.RUNNING or now < self._interrupted + _TWICE_S:
            return False
        self._interrupted = now
        return any(crew.signal_task(self._attached, signal.SIGINT) for crew in self._crews)

    def _timeout(self) -> float:
        if self._ending.all_exited:
            return _POLL_S  # what tasks have started is not our child: nothing tells when it exits
        now = time.monotonic()
        wakes = [wake for wake in (self._ending.wake, self._drill.wake, now + _CHECK_S) if wake is not None]
        return max(0.0, min(wakes) - now)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self.say(action.text)
            elif isinstance(action, Kill):
                for crew in self._crews:
                    crew.signal(action.signum)
            elif isinstance(action, Restart):
                self._restart(action)
            else:
                self._outlet.pump()
                self._report(action)

    def _report(self, action: Tell | Lose) -> None:
        task = self._tasks[action.index]
        try:
            if isinstance(action, Tell):
                self._on_failure(task, action.how)
            else:
                self._say_lost(action)
                self._print(self._postmortem.lost(action.index, action.how))
        except Exception as error:
            self.say(f"could not tell the others that {task.name} {action.how}: {error}")

    def _say_lost(self, loss: Lose) -> None:
        if not self._on_loss(self._tasks[loss.index], loss):
            self._unheard.append(loss)
            self._say_again_at = time.monotonic() + _CHECK_S

    def _say_again(self) -> None:
        if not self._unheard or self._ending.phase is not Phase.RUNNING or self._ending.finished:
            return  # nobody wants to hear it
        if time.monotonic() >= self._say_again_at:
            unheard, self._unheard = self._unheard, []
            for loss in unheard:
                self._say_lost(loss)

    def _restart(self, action: Restart, host: str = "") -> None:
        crew = self._crew_of(action.index)
        if crew is not None:
            self._display.begins(action.index, action.start, str(action.before))
            crew.restart(
                *(action.index, again(action.start, action.before, action.since)),
                host or self._moves.host_of(action.index),
            )
        else:
            self.exited(action.index, Exit(1, text="could not be started again"))

    def take_order(self, words: Mapping[str, str], caller: Orderer) -> None:
        if "add" not in words:
            self._moves.take(words, caller)
            return
        try:
            index = self._add_worker(words)
        except OrderRefused as refused:
            caller.end(refused.code, str(refused))
        else:
            caller.end(DONE, f"{self._tasks[index].title} has been started; one of the others lets it in")

    def _add_worker(self, words: Mapping[str, str]) -> int:
        """Start one more worker, or a dead one that nobody would start again: `{"add": "worker", "to": "node3"}`."""
        now, most = time.monotonic(), 0 if self._restarts is None else self._restarts.max_workers
        if words.keys() - {"to"} != {"add"} or words["add"] != "worker":
            raise OrderRefused(USAGE, f"expected worker, and to, got {', '.join(f'{k} {v}' for k, v in words.items())}")
        if self._ending.phase is not Phase.RUNNING or self._ending.finished:
            raise OrderRefused(REFUSED, "the job is ending")
        if not most:
            raise OrderRefused(REFUSED, "no worker can be added to this job: start it with --max-workers")
        host = self._moves.known(words.get("to", ""))
        dead = [index for index in self._ending.dead_workers if self._crew_of(index) is not None]
        if dead:
            self._restart(self._ending.revive(dead[0], now), host)
            return dead[0]
        rank, index = sum(task.role == "worker" for task in self._tasks), len(self._tasks)
        if rank >= most:
            raise OrderRefused(REFUSED, f"the job has had {rank} workers, and --max-workers is {most}")
        for crew in self._crews:
            task = crew.more(index, rank, host)
            if task is not None:
                self._tasks.append(task)
                self._ending.add(index, now)
                self._display.begins(index)
                crew.take(index, task)
                return index
        raise OrderRefused(REFUSED, "no host of the job can start a worker now")

    def _hosts(self) -> list[str]:
        return [host for crew in self._crews for host in crew.hosts()]

    def _why_not_moved(self) -> str:
        if self._ending.phase is not Phase.RUNNING or self._ending.finished:
            return "the job is ending"
        standby = next((index for index, task in enumerate(self._tasks) if task.role == "standby"), None)
        if standby is not None and self._crew_of(standby) is None:
            return "its launcher cannot start processes anew"
        if standby is None:
            return "servers of this job have no standbys to take over from them: start it with --replicas 1"
        return ""

    def _retire(self, index: int) -> None:
        """Have a process retire. The order is given until it has ended: the scheduler may be about to be restarted."""
        self._ending.moving = index
        self._retire_again_at = time.monotonic() + _RETIRE_S
        if self._ending.phase is Phase.RUNNING and self._ending.runs(index):
            self._on_retire(self._tasks[index], self._ending.start(index))

    def _inject(self) -> None:
        for index, fault in self._drill.due(time.monotonic()):
            hit = any(crew.signal_task(index, fault.signal) for crew in self._crews)
            self.say(f"--inject: {fault}" if hit else f"--inject: not {fault}: it does not run")

    def _crew_of(self, index: int) -> Crew | None:
        """The crew that can start a task again."""
        return next((crew for crew in self._crews if crew.can_restart(index)), None)

    def _balance(self) -> None:
        """Read from the processes only as fast as the output can be written, and wait until it can be written."""
        reading = self._outlet.pending < _HIGH_WATER
        if reading != self._reading:
            self._reading = reading
            for crew in self._crews:
                crew.reading(reading)
        if self._outlet.waits_for != self._waiting_for:
            if self._waiting_for is not None:
                self._selector.unregister(self._waiting_for)
            self._waiting_for = self._outlet.waits_for
            if self._waiting_for is not None:
                self._selector.register(self._waiting_for, selectors.EVENT_WRITE)
        self._give_up_on_broken_output()

    def _give_up_on_broken_output(self) -> None:
        """End as by SIGPIPE if standard output has no reader any more (`| head`)."""
        error = self._outlet.broken.get(self._outlet.stdout)
        if error is not None and not self._muted:
            self._muted = True
            if isinstance(error, BrokenPipeError):
                self._perform(self._ending.signalled(signal.SIGPIPE, time.monotonic()))
            else:
                self.say(f"cannot write to standard output: {error.strerror}; the job goes on without it")

    def _flush(self) -> None:
        """Write out the rest. Wait for a slow reader, but not long after a signal."""
        deadline = time.monotonic() + _FLUSH_S
        while True:
            self._outlet.pump()
            if self._outlet.waits_for is None or (self._hurry and time.monotonic() > deadline):
                return
            self._balance()
            self._selector.select(_POLL_S)
            if any(signum != CHILD for signum in self._signals.take()):
                self._hurry = True
