"""What ``launch.py`` does for a simulated job: it reports who has died, and starts dead seats again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from simulation.network import Network, Process
from simulation.transport import SimulatedTransport

from kvstore import wire
from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.contract import member_name
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.tasks import Task
from launcher.supervision.ending import Action, Ending, Kill, Lose, Restart, Tell
from launcher.supervision.restarts import Restarts

REPORTS_S = (0.0, 0.3, 0.6)  # when it says so, for a link may be cut
READS_S = 0.25  # how often it looks for reports


class SimulatedLauncher:
    """See the module.

    Args:
        network: of the job.
        processes: by name, the latest of each member.
        root: where the scheduler listens.
        reap_s: until it sees that a process has ended, on average.
        restarts: how many processes it starts again.
        start_s: until a process that it starts runs, on average.
        again: the roles whose processes it starts again.
        start: starts the next process of a member, by name.
        working: whether workers are still at work; if not, nobody is started again.

    Attributes:
        left: how many processes it starts again.
    """

    def __init__(
        self,
        network: Network,
        processes: Mapping[str, Process],
        root: str,
        reap_s: float,
        restarts: int,
        start_s: float,
        again: Collection[str],
        start: Callable[[str], None],
        working: Callable[[], bool],
    ) -> None:
        self.left = restarts
        self.network = network
        self.processes = processes
        self.again = again
        self.start = start
        self._root = root
        self.reap_s = reap_s
        self.start_s = start_s
        self._working = working
        self._process = Process("launcher", 1)
        self._waiting: list[wire.Lost | wire.Retire] = []  # of which a scheduler may not know
        self._moving: list[Process] = []

    def over(self, alive: bool) -> bool:
        return not alive

    def reported(self, process: Process, report: ExitReport) -> None:
        """Take what a process says of its end."""

    def exited(self, process: Process, how: Exit) -> None:
        if process.name.startswith("worker") and not how.status:
            return
        if process in self._moving and not how.status:
            self.network.world.after(self.network.delay(self.start_s), lambda: self.start_again(process.name))
        if how.code not in (0, JOB_FAILED_EXIT) or how.signum:
            self.network.world.after(self.network.delay(self.reap_s), lambda: self._reap(process))

    def move(self, name: str) -> None:
        """Have the scheduler retire the latest process of a member; start the next one when it has ended in order."""
        process, (role, rank) = self.processes[name], _member(name)
        if not process.dead and process.tasks[0].is_alive():
            self._moving.append(process)
            self.tell(wire.Retire(role, rank, process.start))

    def tell(self, lost: wire.Lost | wire.Retire) -> None:
        """Tell the scheduler of an end, several times, and again when it has been started again."""
        self._waiting.append(lost)
        for after_s in REPORTS_S:
            self.network.world.after(after_s, lambda: self._say(lost))

    def start_again(self, name: str) -> None:
        if not self._working() or (name.startswith("worker") and self._over()):
            return
        self.start(name)
        if name == "scheduler":
            for lost in self._waiting:
                self.network.world.after(REPORTS_S[1], partial(self._say, lost))

    def _over(self) -> bool:
        scheduler = self.processes["scheduler"]
        return not scheduler.dead and not scheduler.tasks[0].is_alive()

    def _reap(self, process: Process) -> None:
        role, rank = _member(process.name)
        again = role in self.again and self.left > 0
        if role != "scheduler":
            self.tell(wire.Lost(role, rank, "was killed", process.start, not again))
        if not again:
            return
        self.left -= 1
        self.network.world.after(self.network.delay(self.start_s), lambda: self.start_again(process.name))

    def _say(self, lost: wire.Lost | wire.Retire) -> None:
        if not self._working():
            return
        end = SimulatedTransport(self.network, self._process)
        end.send(end.connect(self._root), wire.encode(lost))
        self.network.world.after(REPORTS_S[1], end.close)


class Supervision(SimulatedLauncher):
    """One that ends the job as the supervision of ``launch.py`` does, which decides what is whose fault.

    Attributes:
        ending: decides. All processes must have begun before the first of them ends.
        tasks: of the job.
    """

    ending: Ending

    def over(self, alive: bool) -> bool:
        if not hasattr(self, "ending"):
            names = list(self.processes)
            self.tasks = [Task(*_member(name), ("x",), {}) for name in names]  # type: ignore[arg-type]
            self.ending = Ending(self.tasks, restarts=Restarts(self.tasks, frozenset(self.again), self.left))
            self._indices: Mapping[str, int] = {name: index for index, name in enumerate(names)}
            self._reports: dict[str, ExitReport] = {}
            self._tick()
        return self.ending.over

    def reported(self, process: Process, report: ExitReport) -> None:
        self._reports[process.name] = report
        self.network.world.after(self.network.dice.uniform(0.0, READS_S), lambda: self._read(process.name))

    def exited(self, process: Process, how: Exit) -> None:
        self.network.world.after(self.network.delay(self.reap_s), lambda: self._exited(process, how))

    def _read(self, name: str) -> None:
        report = self._reports.pop(name, None)
        if report is not None:
            self.ending.reported(self._indices[name], report)

    def _exited(self, process: Process, how: Exit) -> None:
        self._read(process.name)
        self._perform(self.ending.exited(self._indices[process.name], how, self.network.world.now))
        self._tick()

    def _tick(self) -> None:
        self._perform(self.ending.tick(self.network.world.now, lambda: False))
        if self.ending.wake is not None:
            self.network.world.after(max(0.0, self.ending.wake - self.network.world.now), self._tick)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Kill):
                self._end(action.signum)
            elif isinstance(action, Restart):
                name = self._name(action.index)
                self.network.world.after(self.network.delay(self.start_s), partial(self.start_again, name))
            elif isinstance(action, Lose | Tell) and self.tasks[action.index].role != "scheduler":
                more = (action.start, action.final) if isinstance(action, Lose) else ()
                self.tell(wire.Lost(self.tasks[action.index].role, self.tasks[action.index].rank, action.how, *more))

    def _end(self, signum: int) -> None:
        """Send a signal to all. One that is stopped dies by SIGKILL only."""
        for process in list(self.processes.values()):
            if not process.dead and process.tasks[0].is_alive() and (signum == signal.SIGKILL or not process.stopped):
                process.kill()
                self.exited(process, Exit(signum=signum))

    def _name(self, index: int) -> str:
        return member_name(self.tasks[index].role, self.tasks[index].rank)


def _member(name: str) -> tuple[str, int]:
    role, _, rank = name.partition(" ")
    return role, int(rank or 0)
