from __future__ import annotations

import os
import selectors
import sys

import called
from agent_doubles import Heard
from waiting import until

from kvstore.job.exits import Exit
from launcher.calls.handover import Handover
from launcher.calls.outcome import Returned
from launcher.calls.spawned import SpawnedCrew
from launcher.job.tasks import Task
from launcher.processes.guard import Guard
from launcher.supervision.crew import turn


def tasks(guard: Guard) -> dict[int, Task]:
    name, _, mark = guard.mark.partition("=")
    env = {name: mark, "PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = Task("server", 0, ("sh", "-c", "echo a server"), env)
    workers = [Task("worker", rank, ("never executed",), {**env, "DMLC_TASK_ID": str(rank)}) for rank in (0, 1)]
    return dict(enumerate([server, *workers]))


def test_workers_make_the_call_and_servers_run_what_their_tasks_say(guard: Guard) -> None:
    handover = Handover(called.rank, (), {}, 2)
    crew, sink = SpawnedCrew(handover, tasks(guard), guard), Heard()
    with selectors.DefaultSelector() as selector:
        crew.start(selector, sink)
        # Nobody collects: the crew notices by itself that a process has ended.
        until(lambda: turn(selector, 0.05) and len(sink.exits) == 3, step=0)
        assert sorted(sink.exits, key=lambda end: end[0]) == [(index, Exit()) for index in range(3)]
        assert ("output", 0, 1, b"a server\n") in sink.events
        assert [handover.outcome(rank) for rank in (0, 1)] == [Returned(0), Returned(1)]
        crew.close()
        assert not selector.get_map()
    handover.close()


def test_a_worker_that_never_reads_is_no_obstacle(guard: Guard) -> None:
    handover = Handover(called.rank, (bytes(1 << 20),), {}, 2)
    for start in handover.starts:
        start.argv = ("sh", "-c", "exit 7")
    crew, sink = SpawnedCrew(handover, tasks(guard), guard), Heard()
    with selectors.DefaultSelector() as selector:
        crew.start(selector, sink)
        until(lambda: turn(selector, 0.05) and len(sink.exits) == 3, step=0)
        assert dict(sink.exits) == {0: Exit(), 1: Exit(code=7), 2: Exit(code=7)}
        crew.close()
    handover.close()
