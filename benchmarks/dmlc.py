"""The members of a parameter server's job, by the environment that MXNet's launchers set; ours and MXNet's obey it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.jobs import Member, Place, free_port


@dataclass(frozen=True)
class Layout:
    """Where the workers and the servers of a job run, one place for each; the scheduler is beside the first worker."""

    workers: Sequence[Place]
    servers: Sequence[Place]


def members(
    layout: Layout, *, servers: Sequence[str], workers: Sequence[str], env: Mapping[str, str] | None = None
) -> list[Member]:
    """Every process of the job, in the order in which to start them.

    Args:
        layout: where they run.
        servers: the command of the servers, and of the scheduler.
        workers: that of the workers.
        env: what all of them get besides.
    """
    root = layout.workers[0]
    job = {
        **(env or {}),
        "DMLC_NUM_WORKER": str(len(layout.workers)),
        "DMLC_NUM_SERVER": str(len(layout.servers)),
        "DMLC_PS_ROOT_URI": root.address,
        "DMLC_PS_ROOT_PORT": str(free_port()),
    }

    def member(role: str, rank: int, command: Sequence[str], place: Place) -> Member:
        its = {"DMLC_ROLE": role, "DMLC_TASK_ID": str(rank)}
        if place.namespace:  # on one machine a member finds its own address
            its["DMLC_NODE_HOST"] = place.address
        return Member(f"{role} {rank}", command, {**job, **its}, place)

    made = [member("scheduler", 0, servers, root)]
    made += [member("server", rank, servers, place) for rank, place in enumerate(layout.servers)]
    made += [member("worker", rank, workers, place) for rank, place in enumerate(layout.workers)]
    return made
