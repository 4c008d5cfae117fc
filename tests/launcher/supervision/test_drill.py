"""When launch.py injects faults. The clock is a number."""

from __future__ import annotations

from launcher.job.injection import Injection
from launcher.job.tasks import Task
from launcher.supervision.drill import Drill

TASKS = [Task("scheduler", 0, ("x",), {}), Task("server", 0, ("x",), {}), Task("standby", 0, ("x",), {})]


def test_faults_come_in_the_order_of_their_times_after_the_start() -> None:
    texts = ("stop:standby:0@3s", "kill:server:0@round:2", "cont:standby:0@4s", "kill:scheduler@3s")
    stop, _, cont, kill = injections = [Injection.parse(text) for text in texts]
    drill = Drill(TASKS, injections)
    assert drill.wake is None
    assert drill.due(50.0) == []
    assert drill.wake == 53.0
    assert drill.due(52.9) == []
    assert drill.due(53.0) == [(2, stop), (0, kill)]
    assert drill.wake == 54.0
    assert drill.due(99.0) == [(2, cont)]
    assert (drill.due(100.0), drill.wake) == ([], None)


def test_without_faults_there_is_nothing_to_wait_for() -> None:
    drill = Drill(TASKS, [Injection.parse("kill:server:0@round:2")])
    assert (drill.due(50.0), drill.wake) == ([], None)
