"""Workers that wait for each other: when that is proven, and when it may be otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from rendezvous import Job

from kvstore import wire
from servers.scheduler.deadlocks import Deadlocks


def stuck(rank: int, missing: Sequence[int], prompt: int = 0, wait: int = 1) -> wire.Stuck:
    return wire.Stuck(
        wire.Node("worker", rank, 1), prompt, [wait], list(missing), f"call {rank}: needs {list(missing)}"
    )


def gone_on(rank: int) -> wire.Stuck:
    return wire.Stuck(wire.Node("worker", rank, 1), 0, [], [], "")


def told(said: list[tuple[int, wire.Message]]) -> dict[int, type[wire.Message]]:
    return {rank: type(message) for rank, message in said}


def test_workers_are_told_when_all_have_said_it_again_after_all_had_said_it():
    deadlocks = Deadlocks()
    assert deadlocks.take(stuck(0, [1])) == []
    assert deadlocks.take(stuck(1, [0])) == [(0, wire.StillStuck(1)), (1, wire.StillStuck(1))]
    assert deadlocks.take(stuck(1, [0], prompt=1)) == []
    text = (
        "workers 0, 1 wait for each other: worker 0 is in call 0: needs [1]; worker 1 is in call 1: needs [0]. "
        "All workers must make the same calls, in the same order"
    )
    assert deadlocks.take(stuck(0, [1], prompt=1)) == [(0, wire.Deadlock([1], text)), (1, wire.Deadlock([1], text))]


def test_nobody_is_told_while_one_that_is_needed_does_not_wait():
    deadlocks = Deadlocks()
    for prompt in (0, 1):
        assert deadlocks.take(stuck(0, [1, 2], prompt)) == []
        assert deadlocks.take(stuck(1, [0, 2], prompt)) == []


def test_nobody_is_told_if_one_has_gone_on_since():
    deadlocks = Deadlocks()
    deadlocks.take(stuck(0, [1]))
    deadlocks.take(stuck(1, [0]))
    deadlocks.take(gone_on(1))
    assert deadlocks.take(stuck(0, [1], prompt=1)) == []


def test_who_waits_in_another_call_by_then_is_prompted_anew():
    deadlocks = Deadlocks()
    deadlocks.take(stuck(0, [1]))
    deadlocks.take(stuck(1, [0]))
    assert deadlocks.take(stuck(0, [1], prompt=1, wait=2)) == [(0, wire.StillStuck(2)), (1, wire.StillStuck(2))]
    assert deadlocks.take(stuck(1, [0], prompt=1)) == [(1, wire.StillStuck(2))], "said before the second prompt came"
    assert deadlocks.take(stuck(1, [0], prompt=2)) == []
    assert set(told(deadlocks.take(stuck(0, [1], prompt=2, wait=2))).values()) == {wire.Deadlock}


def test_who_has_not_heard_the_prompt_hears_it_again():
    deadlocks = Deadlocks()
    deadlocks.take(stuck(0, [1]))
    deadlocks.take(stuck(1, [0]))
    assert deadlocks.take(stuck(0, [1])) == [(0, wire.StillStuck(1))]


def test_groups_of_their_own_do_not_disturb_each_other():
    deadlocks = Deadlocks()
    for rank, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        deadlocks.take(stuck(rank, [other]))
    assert deadlocks.take(stuck(0, [1], prompt=1)) == []
    assert deadlocks.take(stuck(2, [3], prompt=2)) == []
    assert told(deadlocks.take(stuck(1, [0], prompt=1))) == {0: wire.Deadlock, 1: wire.Deadlock}
    assert told(deadlocks.take(stuck(3, [2], prompt=2))) == {2: wire.Deadlock, 3: wire.Deadlock}


def test_who_waits_behind_a_circle_is_told_who_is_in_it():
    deadlocks = Deadlocks()
    for prompt in (0, 1):
        deadlocks.take(stuck(1, [2], prompt))
        deadlocks.take(stuck(2, [1], prompt))
    deadlocks = Deadlocks()
    deadlocks.take(stuck(1, [2]))
    deadlocks.take(stuck(0, [1]))
    assert told(deadlocks.take(stuck(2, [1]))) == {1: wire.StillStuck, 2: wire.StillStuck}
    assert told(deadlocks.take(stuck(0, [1]))) == {0: wire.StillStuck, 1: wire.StillStuck, 2: wire.StillStuck}
    deadlocks.take(stuck(1, [2], prompt=2))
    deadlocks.take(stuck(2, [1], prompt=2))
    said = deadlocks.take(stuck(0, [1], prompt=2))
    assert not said, "the two were told, and have no wait any more"


def test_the_scheduler_takes_it_over_the_link_of_the_workers_beats_only():
    job = Job(2, 1)
    w0, w1 = job.workers
    assert job.handle(w0.beats, stuck(0, [1])) == []
    assert job.handle(w0.beats, stuck(1, [0])) == []
    assert job.handle(w1.beats, stuck(1, [0])) == [(w0, wire.StillStuck(1)), (w1, wire.StillStuck(1))]
