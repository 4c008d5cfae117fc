"""What the page is told of a job."""

from __future__ import annotations

import json
from dataclasses import replace

from simulated_job import SimulatedJob

from servers.observer.page_snapshot import drawn, figures, snapshot, values

JOB = SimulatedJob(workers=3, servers=2, straggler=1)


def test_rates_are_of_the_time_between_two_reports() -> None:
    told = snapshot(JOB.view(100.0))
    worker = told["workers"][0]
    assert (worker["name"], worker["state"], worker["rounds"], worker["rate"]) == ("worker 0", "ready", 1000, 10.0)
    assert len(worker["links"]) == 2
    assert sum(worker["links"]) == worker["sent"] + worker["received"]
    assert told["figures"]["rounds"] == 10.0
    assert (told["expected"]["worker"], len(told["servers"])) == (3, 2)


def test_it_says_where_each_process_runs() -> None:
    view = JOB.view(9.0)
    members = [replace(view.members[0], host="node7", pid=42), *view.members[1:]]
    first, second = snapshot(replace(view, members=members))["workers"][:2]
    assert (first["host"], first["pid"]) == ("node7", 42)
    assert (second["host"], second["pid"]) == ("", None)


def test_it_says_who_waits_for_whom() -> None:
    first, second = snapshot(JOB.view(100.0))["waiting"]
    assert (first["at"], first["waiting"], first["missing"], first["seconds"]) == ("server 0", [0, 2], [1], 0.04)
    assert second["at"] == "server 1"


def test_it_is_json_without_what_is_not() -> None:
    view = JOB.view(0.5)  # each member has reported once
    told = json.loads(json.dumps(snapshot(view), allow_nan=False))
    assert told["figures"]["rounds"] is None
    assert told["workers"][0]["waiting"] is None
    assert told["figures"]["held"] > 0


def test_members_without_reports_are_there() -> None:
    view = JOB.view(9.0)
    view = replace(view, members=[replace(member, worker=None, server=None) for member in view.members])
    told = snapshot(view)
    assert [member["name"] for member in told["workers"] + told["servers"]] == [
        "worker 0",
        "worker 1",
        "worker 2",
        "server 0",
        "server 1",
    ]
    assert json.dumps(told, allow_nan=False)
    assert drawn(view) == {}


def test_the_lost_do_not_count() -> None:
    view = SimulatedJob(workers=3, servers=2, killed=1).view(100.0)
    whole = SimulatedJob(workers=3, servers=2).view(100.0)
    assert snapshot(view)["workers"][1]["state"] == "lost"
    assert (figures(view)["worker memory"], figures(whole)["worker memory"]) == (802_100_000, 1_203_150_000)
    assert "worker 1 memory" not in drawn(view)
    assert "worker 1 memory" in drawn(whole)


def test_it_says_who_comes_last_and_is_awaited() -> None:
    workers = snapshot(JOB.view(100.0))["workers"]
    assert [worker["last"] for worker in workers] == [0.33, 1.0, 0.33]
    assert [worker["alone"] for worker in workers] == [0.0, 0.4, 0.0]


def test_what_programs_log_is_averaged_over_the_workers() -> None:
    assert values(JOB.view(0.0001))["loss"] == 2.4 - 2.3 * (1 - 2.718281828459045 ** (-0.5 / 900))


def test_it_has_the_advice() -> None:
    (advice,) = snapshot(JOB.view(100.0))["advice"]
    assert (advice["about"], advice["severity"]) == ("worker 1", "warning")
    assert advice["kind"].startswith("straggler")
    assert "worker 1" in advice["text"]
