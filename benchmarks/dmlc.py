"""The processes of a parameter server's job, with the environment of MXNet's launchers, which we use too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.jobs import Member, Place, free_port


@dataclass(frozen=True)
class Layout:
    """The place of each worker and server of a job. The scheduler is beside the first worker."""

    workers: Sequence[Place]
    servers: Sequence[Place]


def members(
    layout: Layout, *, servers: Sequence[str], workers: Sequence[str], env: Mapping[str, str] | None = None
) -> list[Member]:
    """Return every process of the job, in the order of their start.

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
        own = {"DMLC_ROLE": role, "DMLC_TASK_ID": str(rank)}
        if place.namespace:  # on one machine a member finds its own address
            own["DMLC_NODE_HOST"] = place.address
        return Member(f"{role} {rank}", command, {**job, **own}, place)

    made = [member("scheduler", 0, servers, root)]
    made += [member("server", rank, servers, place) for rank, place in enumerate(layout.servers)]
    made += [member("worker", rank, workers, place) for rank, place in enumerate(layout.workers)]
    return made
