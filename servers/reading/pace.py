"""The part of a server's time that readers get: what is left, within a budget. Clocks are passed in.

A piece of work for readers is done when no worker's message waits. On a host that computes all the time even that
slows workers down, since they share its cores. So the time that readers may take is saved up: a small share of all
time, and a larger one while many cores of the host are idle. The work is charged by the processor time of this thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from servers.reading.desk import ReadDesk
from servers.requests.replies import Outbox

PIECE_BYTES = 128 << 10  # copied in some 20 to 50 us
BURST_S = 0.005  # what may be saved up
LEAST_S = 0.0005  # when all is spent, so much is saved up before the next piece
ARRIVAL_S = 0.00005  # what receiving one message of a reader is charged, since nobody measures it
# The most that readers can owe. A piece that takes longer is held up by the collector of garbage or by the system. With
# a share of 1 %, readers would pay for a second of it by a wait of 100 s, and they give up after a minute.
DEBT_S = 0.05
# The least share of the time that followers get, even where the readers' share is smaller. Their answers are short: two
# followers take 1.5 % at one version a second, where 1 % of a server's 10 million elements change.
FOLLOW_SHARE = 0.04
IDLE_SHARE = 0.1  # of the time, in addition, while the host has time to spare
LOOK_S = 1.0  # between two looks at the cores
# So many cores must be idle, and half of all: where there are few, they are idle while workers and servers wait for
# each other, and each is needed at once when that is over.
IDLE_CORES, IDLE_PART = 1.75, 0.5


class ReaderPace:
    """When readers get a piece of this thread's time.

    Args:
        share: the part of this thread's time that they get in any case.
        spent: returns the processor time of this thread, in seconds.
        idle: returns how many cores have been idle of late, and how many there are.
    """

    def __init__(
        self,
        desk: ReadDesk,
        share: float,
        clock: Callable[[], float],
        spent: Callable[[], float],
        idle: Callable[[], tuple[float, int]],
    ) -> None:
        self.gate: Callable[[Outbox], Outbox] = lambda outbox: outbox  # through which answers leave
        self._desk = desk
        self._share = share
        self._clock = clock
        self._spent = spent
        self._idle = idle
        self._saved_s = BURST_S
        self._at = clock()
        self._look_at = float("-inf")
        self._rate = share  # at which time is saved up now
        self._billed_from: float | None = None  # since when work of this thread is for readers
        self._ready_at: float | None = None  # since when there has been work and time for it
        self._taken = self._followed = 0  # messages that have been charged
        self._weight = min(1.0, share / FOLLOW_SHARE)  # what followers are charged of their work
        self._follows = False  # whether the work is for a follower

    def due(self) -> float | None:
        """Return when ``do`` may be called, if no message waits then; None if there is nothing to do for readers."""
        self._settle()
        if not self._desk.busy:
            return None
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            before = self._spent()
            idle, cores = self._idle()
            self._saved_s -= self._spent() - before
            self._rate = self._share + (IDLE_SHARE if idle >= max(IDLE_CORES, IDLE_PART * cores) else 0.0)
        self._saved_s = min(BURST_S, max(-DEBT_S, self._saved_s) + self._rate * (now - self._at))
        self._at = now
        if self._saved_s > 0:
            self._ready_at = now if self._ready_at is None else self._ready_at
            return self._ready_at
        self._ready_at = None
        return now + min(LOOK_S, (LEAST_S - self._saved_s) / self._rate)

    def do(self) -> Outbox:
        """Do a piece of work for readers. Until ``due`` is called, this thread works for them."""
        self._billed_from, self._ready_at = self._spent(), None
        self._follows = self._desk.follows
        return self.gate(self._desk.step(PIECE_BYTES))

    def _settle(self) -> None:
        if self._billed_from is not None:
            self._saved_s -= (self._spent() - self._billed_from) * (self._weight if self._follows else 1.0)
            self._billed_from = None
        if self._desk.taken != self._taken:
            followed = self._desk.followed - self._followed
            self._saved_s -= ARRIVAL_S * (self._desk.taken - self._taken - followed * (1.0 - self._weight))
            self._taken, self._followed = self._desk.taken, self._desk.followed


class IdleCores:
    """How many of the cores that this process may use are idle, as Linux counts; 0 where it does not.

    ``read`` returns the text of /proc/stat.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        read: Callable[[], str] = lambda: Path("/proc/stat").read_text(),
        cores: Callable[[], set[int]] = lambda: os.sched_getaffinity(0),
    ) -> None:
        self._clock = clock
        self._read = read
        self._cores = cores
        self._before: tuple[float, int] | None = None

    def __call__(self) -> tuple[float, int]:
        """Return how many cores have been idle, on average, since the last call, and how many there are."""
        try:
            names = {f"cpu{core}" for core in self._cores()}
            lines = (line.split() for line in self._read().splitlines())
            ticks = sum(int(words[4]) + int(words[5]) for words in lines if words and words[0] in names)
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            return 0.0, 1
        now = self._clock()
        before, self._before = self._before, (now, ticks)
        if before is None or now <= before[0]:
            return 0.0, len(names)
        return (ticks - before[1]) * tick_s / (now - before[0]), len(names)
