"""What ``launch.py`` does for a simulated job: it reports who has died, and starts dead seats again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from simulation.network import Network, Process
from simulation.transport import SimulatedTransport

from kvstore.wire import Lost, encode

REPORTS_S = (0.0, 0.3, 0.6)  # when it says so, for a link may be cut


class SimulatedLauncher:
    """See the module.

    Args:
        network: of the job.
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
        root: str,
        reap_s: float,
        restarts: int,
        start_s: float,
        again: Collection[str],
        start: Callable[[str], None],
        working: Callable[[], bool],
    ) -> None:
        self.left = restarts
        self._network = network
        self._root = root
        self._reap_s = reap_s
        self._start_s = start_s
        self._again = again
        self._start = start
        self._working = working
        self._process = Process("launcher", 1)
        self._waiting: list[tuple[Process, bool]] = []  # of whose ends a scheduler may not know

    def ended(self, process: Process) -> None:
        """Take it that a process has ended, other than well."""
        self._network.world.after(self._network.delay(self._reap_s), lambda: self._reap(process))

    def _reap(self, process: Process) -> None:
        role = process.name.partition(" ")[0]
        again = role in self._again and self.left > 0
        if role != "scheduler":
            self._waiting.append((process, not again))
            for after_s in REPORTS_S:
                self._network.world.after(after_s, lambda: self._report(process, not again))
        if not again:
            return
        self.left -= 1
        self._network.world.after(self._network.delay(self._start_s), lambda: self._start_again(process))

    def _start_again(self, process: Process) -> None:
        if not self._working():
            return
        self._start(process.name)
        if process.name == "scheduler":
            for dead in self._waiting:
                self._network.world.after(REPORTS_S[1], partial(self._report, *dead))

    def _report(self, process: Process, final: bool) -> None:
        if not self._working():
            return
        role, _, rank = process.name.partition(" ")
        end = SimulatedTransport(self._network, self._process)
        end.send(end.connect(self._root), encode(Lost(role, int(rank), "was killed", process.start, final)))
        self._network.world.after(REPORTS_S[1], end.close)
