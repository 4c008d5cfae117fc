"""Servers and standbys that are moved to another host, or to another process, while their job runs. No I/O.

The scheduler lets the process retire as soon as the other one of its rank can serve alone. It ends in order, and is
started again at once, where it is to be: as the standby of the other one. Moves are made one after the other, so no two
ranks are without a standby at a time because of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.job.tasks import Task
from launcher.supervision.control import DONE, FAILED, REFUSED, USAGE, Orderer

PAIRED = ("server", "standby")


@dataclass(eq=False)
class Order:
    """What somebody has asked for: moves, each of a task to a host (empty: where it is). They are made in order."""

    caller: Orderer
    left: deque[tuple[int, str]]
    done: list[str] = field(default_factory=list)


class OrderRefused(Exception):
    """An order that cannot be carried out, and how its command ends."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Moves:
    """The moves of one job.

    Args:
        hosts: returns the hosts on which tasks can be started; none if all run on this machine.
        why_not: returns why nothing can be moved in this job, or at this moment; "" if it can.
        runs: whether a task runs.
        retire: has the scheduler told that a task's process is to end. It is called again and again until that ends.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        hosts: Callable[[], list[str]],
        why_not: Callable[[], str],
        runs: Callable[[int], bool],
        retire: Callable[[int], None],
    ) -> None:
        self._tasks, self._hosts, self._why_not, self._runs, self._retire = tasks, hosts, why_not, runs, retire
        self._orders: deque[Order] = deque()
        self.current: tuple[int, str] | None = None  # the task that is being moved, and to which host

    def take(self, words: Mapping[str, str], caller: Orderer) -> None:
        """Take an order: `{"move": "server:1", "to": "node3"}`, without `to` for its host; `{"drain": "node2"}`."""
        try:
            why_not = self._why_not()
            if why_not:
                raise OrderRefused(REFUSED, why_not)
            if set(words) in ({"move"}, {"move", "to"}):
                moves = [(self._named(words["move"]), self.known(words.get("to", "")))]
            elif set(words) == {"drain"}:
                moves = self._drained(self.known(words["drain"]))
            else:
                raise OrderRefused(
                    USAGE, f"expected move and to, or drain, got {', '.join(sorted(words)) or 'nothing'}"
                )
        except OrderRefused as refused:
            caller.end(refused.code, str(refused))
            return
        self._orders.append(Order(caller, deque(moves)))
        if len(self._orders) > 1:
            caller.say("waits for moves that were ordered before")
        else:
            self.go_on()

    def go_on(self) -> None:
        """Begin the next move if none is under way; else order this one again, which the scheduler may have missed."""
        while self.current is None and self._orders:
            order = self._orders[0]
            if not order.left:
                self._orders.popleft()
                order.caller.end(DONE, "; ".join(order.done) or "there is nothing to move")
                continue
            index, host = self.current = order.left.popleft()
            order.caller.say(f"moving {self._tasks[index].title}{f' to {host}' if host else ''}")
        if self.current is not None:
            self._retire(self.current[0])

    def host_of(self, index: int) -> str:
        """Return where a task is to be started again; "" for where it was."""
        return self.current[1] if self.current is not None and self.current[0] == index else ""

    def ended(self, index: int, how: str, in_order: bool) -> None:
        """The process of a task has ended; it has been started again if that was `in_order`."""
        if self.current is None or self.current[0] != index:
            return
        self.current = None
        order, task = self._orders[0], self._tasks[index]
        if in_order:
            order.done.append(f"{task.title} has been started anew, and is brought into step")
        else:
            self._orders.popleft()
            order.caller.end(FAILED, f"{task.title} {how} before it could be moved: the job has lost it, as ever")
        self.go_on()

    # ---- what may be ordered

    def _named(self, name: str) -> int:
        role, _, rank = name.partition(":")
        for index, task in enumerate(self._tasks):
            if role in PAIRED and task.role == role and str(task.rank) == rank:
                if not self._runs(index):
                    raise OrderRefused(REFUSED, f"{task.title} does not run at this moment; try again when it does")
                return index
        last = max(task.rank for task in self._tasks if task.role == "server")
        raise OrderRefused(
            USAGE, f"there is no {name!r}; valid: server:0 to server:{last}, standby:0 to standby:{last}"
        )

    def known(self, host: str) -> str:
        """Return the host of that name, on which processes can be started."""
        hosts = self._hosts()
        if host and host not in hosts:
            valid = f"valid: {', '.join(hosts)}" if hosts else "all of its processes run on one machine"
            raise OrderRefused(USAGE, f"the job has no host {host!r} to start processes on; {valid}")
        return host

    def _drained(self, host: str) -> list[tuple[int, str]]:
        """Return the moves that leave no server or standby on `host`: to where the fewest are, and no partner is."""
        others = [other for other in self._hosts() if other != host]
        if not others:
            raise OrderRefused(REFUSED, f"there is no host but {host} to move its servers to")
        load = Counter(task.host for task in self._tasks if task.role in PAIRED)
        where: dict[tuple[str, int], str] = {
            (task.role, task.rank): task.host for task in self._tasks if task.role in PAIRED
        }
        moves = []
        for index, task in enumerate(self._tasks):
            if task.role not in PAIRED or task.host != host:
                continue
            partner = where[PAIRED[task.role == "server"], task.rank]
            chosen = min(others, key=lambda other: (other == partner, load[other], others.index(other)))
            load[chosen] += 1
            where[task.role, task.rank] = chosen
            moves.append((index, chosen))
        return moves
