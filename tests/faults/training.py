"""What a worker of a run does: it pushes integers and holds every value that it reads to what it must be."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import kvstore as kv
from faults.plan import Plan, pushed, total

SIZES = {"cut": 50_000, "whole": 300, "small": 1}  # elements: over the bound, so that both servers have some; under it
KEYS = list(SIZES)
OPTIONS: dict[str, dict[str, int]] = {"sync": {}, "async": {}, "ssp": {"staleness": 3}}
BOUND = 1000
MEAN_S = 0.002  # until an alarm, from the beginning of a call


class Wrong(AssertionError):
    """A value is not what it must be: the one thing that must never happen."""


class Interrupts:
    """Exceptions that the handlers of signals raise in the middle of calls.

    SIGALRM raises what handlers of alarms raise, which looks like an error of the system's to whoever is at a socket.

    Args:
        wanted: whether there are any.
        dice: when.

    Attributes:
        raised: how many there have been.
    """

    def __init__(self, wanted: bool, dice: random.Random) -> None:
        self.raised = 0
        self._wanted = wanted
        self._dice = dice
        self._armed = False
        if wanted:
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.raised += 1
            raise TimeoutError("an alarm") if number == signal.SIGALRM else KeyboardInterrupt

    def call(self, action: Callable[..., Any], *args: Any) -> bool:
        """Call ``action``; return whether it has returned, or an exception has ended it."""
        if self._wanted:
            signal.setitimer(signal.ITIMER_REAL, self._dice.expovariate(1 / MEAN_S))
        try:
            self._armed = True
            action(*args)
            self._armed = False
        except KeyboardInterrupt:
            return False
        except TimeoutError as exc:
            if isinstance(exc, kv.KVStoreError):  # DeadlineExceeded is a TimeoutError
                raise
            return False
        return True


class Training:
    """One worker's training.

    Args:
        plan: of the run.
        say: tells how far it is.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self.store = kv.create(f"dist_{plan.mode}", bigarray_bound=BOUND, **OPTIONS[plan.mode])
        self._dice = random.Random(f"{plan.seed} {self.store.rank}")
        self._interrupts = Interrupts(plan.interrupts, self._dice)
        self._values = [torch.zeros(size) for size in SIZES.values()]
        self._outs = [torch.zeros(size) for size in SIZES.values()]
        if plan.half:
            self.store.set_gradient_compression({"type": "fp16"})
        self.store.set_optimizer("sgd", learning_rate=1.0)
        self.store.init(KEYS, self._outs)
        self.store.barrier()

    def run(self) -> None:
        made = 0
        self._say("training")
        while made < self._plan.rounds:
            made = self._step(made)
        self.store.barrier()
        self.store.pull(KEYS, self._outs)
        self._require({float(total(self._plan.workers, made))}.__eq__, made)
        self._say(f"exact after {made} pushes and {self._interrupts.raised} interrupts")
        self.store.close()

    def _step(self, before: int) -> int:
        """Push once more, if nothing interrupts it; return how often this worker has pushed."""
        for value in self._values:
            value.fill_(float(pushed(self.store.rank, before + 1)))
        together = self._dice.random() < 0.6
        if together:
            read = self._interrupts.call(self.store.pushpull, KEYS, self._values, self._outs)
        else:
            read = self._interrupts.call(self.store.push, KEYS, self._values)
        for value in self._values:
            value.fill_(1e6)  # nobody reads them any more
        made = self.store.statistics().pushes // len(KEYS)
        if made - before not in (0, 1):
            raise Wrong(f"{made - before} pushes by one call")
        if not (together and read):
            read = self._interrupts.call(self.store.pull, KEYS, self._outs)
        if read:
            self._check(made)
        return made

    def _check(self, made: int) -> None:
        if self._plan.mode == "sync":
            self._require({float(total(self._plan.workers, made))}.__eq__, made)
            return
        least = sum(pushed(self.store.rank, number) for number in range(1, made + 1))
        self._require(lambda values: min(values) >= least and all(map(float.is_integer, values)), made)

    def _require(self, right: Callable[[set[float]], bool], made: int) -> None:
        for key, out in zip(KEYS, self._outs, strict=True):
            values = set(torch.unique(-out).tolist())
            if not right(values):
                raise Wrong(f"{key!r} after push {made} in {self._plan.mode}: {sorted(values)[:5]}")
