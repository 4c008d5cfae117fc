"""What a worker reports, with a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore import wire
from kvstore.member.activity import StoreActivity, WorkerActivity
from kvstore.member.mutual_waits import BlockedTime
from kvstore.wire.guests import MOST_VALUES

PEERS = [b"server 0", b"server 1"]


class Worker:
    """A worker whose requests are played."""

    def __init__(self) -> None:
        self.now = 50.0
        links = SimpleNamespace(
            outstanding=[1, 2, 3], sent={PEERS[0]: 10, b"the scheduler": 99}, received={PEERS[1]: 7}
        )
        self.blocked = BlockedTime()
        client: Any = SimpleNamespace(node=wire.Node("worker", 4, 1), links=links, blocked=self.blocked)
        self.activity = WorkerActivity(client, lambda: self.now, lambda: PEERS)


def test_a_report_says_what_has_been_counted():
    worker = Worker()
    worker.activity.stores += [lambda: StoreActivity(12, 2), lambda: StoreActivity(30)]
    worker.blocked.here().since = 49.5
    report = worker.activity.report()
    assert (report.at, report.node, report.rounds, report.ahead) == (50.0, wire.Node("worker", 4, 1), 30, 2)
    assert (report.blocked_us, report.input_us, report.outstanding) == (500_000, -1, 3)
    assert (report.sent, report.received) == ([10, 0], [0, 7])
    assert report.memory > 1 << 20
    assert wire.decode(wire.encode(report)) == report


def test_rounds_stay_when_the_store_is_closed():
    worker = Worker()
    worker.activity.stores.append(lambda: StoreActivity(12))
    worker.activity.report()
    worker.activity.stores.clear()
    assert worker.activity.report().rounds == 12


def test_input_is_unknown_until_the_program_says_it():
    activity = Worker().activity
    activity.read_input(0.25)
    activity.read_input(0.5)
    assert activity.report().input_us == 750_000


def test_the_latest_values_are_reported_as_far_as_they_are_numbers_and_few():
    activity = Worker().activity
    activity.log({"epoch": 1, "loss": 2.5})
    activity.log({"loss": float("nan"), "accuracy": 0.5})
    assert activity.report().values == [["epoch", 1.0], ["loss", 2.5], ["accuracy", 0.5]]
    activity.log({f"value {number}": number for number in range(100)})
    report = activity.report()
    assert len(report.values) == MOST_VALUES
    assert wire.decode(wire.encode(report)) == report
