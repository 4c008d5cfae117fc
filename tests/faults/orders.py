"""Orders in which processes are killed, stopped and continued, and what must become of the job. Pure.

An order that spares one process of each rank, until the other is in step again, must not end the job, whatever comes
back when. An order that does not must end it, and what is named must be what has ended it: never a death that has
healed, and never a process that was given up and has come back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

SEATS = ("server", "standby")
LONG = 1.8  # limits of heartbeats after which a silent process has been given up, also by a busy scheduler
KILLED, FAILED = 137, 1  # exit codes: of a job that a kill has ended, and of one whose workers were told why it failed


class Step(NamedTuple):
    """What happens next.

    Attributes:
        action: ``kill``, ``stop`` or ``cont`` a member; ``pass`` time; or ``heal``: wait until all ranks are in step.
        member: by name; empty for none.
        limits: of time that passes, as a multiple of the heartbeat's limit.
    """

    action: str
    member: str = ""
    limits: float = 0.0


@dataclass(frozen=True)
class Order:
    """What happens in one run.

    Attributes:
        steps: in their order.
        code: the job's exit code.
        blamed: the members of which one must be named as what has ended the job; empty for anyone, or nobody.
    """

    steps: tuple[Step, ...]
    code: int = 0
    blamed: frozenset[str] = frozenset()


def order(seed: int, ranks: int = 2, ends: tuple[str, ...] = ("", *SEATS, "both", "scheduler")) -> Order:
    """Return the order of a seed.

    Args:
        seed: of all of it.
        ranks: of servers.
        ends: what may end the job, of which one is chosen: nothing; a server or standby that is lost while its rank has
            no other (``both``: for both are silent); a scheduler, worker or aggregator that is.
    """
    dice = random.Random(f"order {seed}")
    steps: list[Step] = []
    for _ in range(dice.randint(1, 3)):
        steps += _survived(dice, ranks)
    end = dice.choice(ends)
    if not end:
        return Order(tuple(steps))
    rank = dice.randrange(ranks)
    first, second = (f"{role} {rank}" for role in dice.sample(SEATS, 2))
    back = [Step("cont", first)] * (dice.random() < 0.7)
    if end == "both":
        steps += [Step("stop", first), Step("pass", "", LONG), Step("stop", second), Step("pass", "", LONG), *back]
        return Order((*steps, Step("pass", "", 0.3), Step("cont", second)), FAILED)
    if end in SEATS:
        if dice.random() < 0.3:
            steps += [Step("kill", first), Step("pass", "", dice.choice((0.0, 0.05))), Step("kill", second)]
            return Order(tuple(steps), KILLED, frozenset((first, second)))
        steps += [Step("stop", first), Step("pass", "", LONG)]
        dead = Step("kill", second)
        steps += [dead, Step("pass", "", dice.choice((0.0, 0.1))), *back] if dice.random() < 0.5 else [*back, dead]
        return Order(tuple(steps), KILLED, frozenset((second,)))
    if end == "scheduler" or dice.random() < 0.5:
        who = end if end == "scheduler" else f"{end} 0"
        return Order((*steps, Step("stop", who), Step("pass", "", 3.0), Step("cont", who)), FAILED)
    return Order((*steps, Step("kill", f"{end} 0")), KILLED, frozenset((f"{end} 0",)))


def _survived(dice: random.Random, ranks: int) -> list[Step]:
    """Losses that the job survives, each of one process of a rank; at the end all ranks are in step."""
    parts: list[list[Step]] = []
    for rank in dice.sample(range(ranks), dice.randint(1, ranks)):
        who = f"{dice.choice(SEATS)} {rank}"
        parts.append(
            dice.choice(
                (
                    [Step("kill", who)],
                    [Step("stop", who), Step("pass", "", LONG), Step("cont", who)],
                    [Step("stop", who), Step("pass", "", LONG), Step("kill", who)],
                    [Step("stop", who), Step("pass", "", 0.3), Step("cont", who)],
                    [Step("stop", who), Step("pass", "", 0.3), Step("kill", who)],
                )
            )
        )
    if dice.random() < 0.4:
        parts.append([Step("kill", "scheduler")])
    elif dice.random() < 0.3:
        parts.append([Step("stop", "scheduler"), Step("pass", "", 0.3), Step("cont", "scheduler")])
    steps = []
    while parts:  # each part in its order, and the parts in any; a scheduler that is stopped for long ends the job
        part = dice.choice(parts)
        count = len(part) if part[0].member == "scheduler" else 1
        steps += part[:count]
        del part[:count]
        parts = [part for part in parts if part]
    return [*steps, Step("heal")]
