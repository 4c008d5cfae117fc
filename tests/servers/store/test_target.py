"""What contributions go to: who waits for its rounds, and why they have failed."""

from __future__ import annotations

from asking import Worker

from kvstore.spec import Spec
from servers.store.rounds import Rounds
from servers.store.target import FAILURES, HeldSegments, ParkedRequest, Target


def target() -> Target[str]:
    spec = Spec((2,), "float32")
    return Target(HeldSegments([3, 8], ["a", "b"], [spec, spec], [0, 0]), Rounds([0]))


def test_requests_are_released_when_all_targets_that_they_wait_for_are_where_they_must_be():
    first, second, worker = target(), target(), Worker()
    one, both = ParkedRequest(b"", worker.pull([3])), ParkedRequest(b"", worker.pull([3, 8]))
    for each, of in ((one, [first]), (both, [first, second])):
        for at in of:
            at.parked.append((1, each))
            each.left += 1
    first.rounds.contribute([0], 1, "")
    assert first.release(None) == []
    assert first.rounds.complete() is not None
    error = ValueError("of the first")
    assert first.release(error) == [one]
    second.rounds.contribute([0], 1, "")
    assert second.rounds.complete() is not None
    assert second.release(None) == [both]
    assert both.error is error
    assert first.parked == second.parked == []


def test_a_target_is_idle_while_no_round_is_open_and_nobody_waits():
    made = target()
    assert made.idle
    made.parked.append((1, ParkedRequest(b"", Worker().pull([3]))))
    assert not made.idle
    made.parked.clear()
    made.rounds.contribute([0], 1, "")
    assert not made.idle


def test_the_last_failures_are_kept_and_places_are_known_by_id():
    made = target()
    for version in range(FAILURES + 3):
        made.fail(version, ValueError(version))
    assert sorted(made.failures) == list(range(3, FAILURES + 3))
    assert made.places == {3: 0, 8: 1}
    assert made.segments.segment(1).key == "b"
