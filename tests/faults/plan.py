"""What happens in one run: which job, and which faults when. Pure: a seed gives the same plan every time."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

KINDS = ("unix", "shm", "tcp", "curve")
MODES = ("sync", "async", "ssp")
ACTIONS = ("cut", "cut", "stop")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        after_s: seconds after the fault before it, or after training has begun.
        action: ``cut`` a connection; ``stop`` a process for ``last_s``; or ``kill`` it.
        member: which process, as ``server 1``.
        which: of its connections.
    """

    after_s: float
    action: str
    member: str
    which: int
    last_s: float


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: of all of it.
        kind: what links are made of.
        mode: the store's.
        rounds: how often each worker pushes.
        half: whether values go as fp16, which is exact for the integers that are pushed.
        interrupts: whether handlers of signals raise exceptions in the middle of the workers' calls.
        faults: in the order in which they come.
    """

    seed: int
    kind: str
    mode: str
    rounds: int
    half: bool
    interrupts: bool
    faults: tuple[Fault, ...]
    workers: int = 2
    servers: int = 2

    @classmethod
    def of(cls, seed: int, kind: str) -> Plan:
        """Return the plan of a seed: cuts and stops, and in one of five a kill."""
        dice = random.Random(f"{kind} {seed}")
        members = [f"{role} {rank}" for role in ("worker", "server") for rank in range(2)] + ["scheduler 0"]
        actions = [dice.choice(ACTIONS) for _ in range(dice.randint(1, 8))] + ["kill"] * (dice.random() < 0.2)
        faults = [
            Fault(dice.expovariate(5.0), action, dice.choice(members), dice.randrange(100), dice.uniform(0.05, 0.8))
            for action in actions
        ]
        return cls(seed, kind, dice.choice(MODES), dice.randint(50, 300), dice.random() < 0.25, False, tuple(faults))

    @classmethod
    def interrupting(cls, seed: int, kind: str) -> Plan:
        """Return the plan of a seed whose only faults are signals, at any moment of the workers' calls."""
        dice = random.Random(f"signals {kind} {seed}")
        return cls(seed, kind, dice.choice(MODES), 200, dice.random() < 0.25, True, ())

    @property
    def kills(self) -> bool:
        return any(fault.action == "kill" for fault in self.faults)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Plan:
        found = json.loads(text)
        return cls(**found | {"faults": tuple(Fault(**fault) for fault in found["faults"])})


def pushed(rank: int, number: int) -> int:
    """What worker ``rank`` contributes with its push ``number``: an integer that float16 holds."""
    return (rank + 2 * number) % 7 + 1


def total(workers: int, number: int) -> int:
    return sum(pushed(rank, earlier) for rank in range(workers) for earlier in range(1, number + 1))
