from __future__ import annotations

import dataclasses
import json
import math

from simulated_job import SimulatedJob
from viewed_job import PLACE, server, view_of, worker

from kvstore import wire
from kvstore.job.curve_keys import pair, with_key
from kvstore.observing import as_json
from kvstore.observing.text import LocatedMember


def test_the_format_is_what_the_reference_describes() -> None:
    waits = {"waiting": [0], "missing": [1], "oldest_us": 2_000_000, "why": "push 7"}
    described = as_json.described_view(view_of([worker(0, before={}), worker(1), server(0, **waits)]))
    assert described.keys() == {
        *("runs_s", "failure", "expected", "rounds_per_s", "members", "waits", "scheduler_waits", "scheduler_awaited"),
        *("events", "advice"),
    }
    assert described["expected"] == {"worker": 2, "server": 1, "standby": 0, "aggregator": 0}
    assert described["waits"] == [
        {"role": "server", "ranks": [0], "waiting": [0], "missing": [1], "seconds": 2.4, "why": "push 7"}
    ]
    assert described["advice"] == []
    stuck = as_json.described_view(view_of([worker(0), server(0, **waits | {"oldest_us": 60_000_000})]))["advice"]
    assert [(one["kind"], one["role"], one["rank"], one["severity"]) for one in stuck] == [
        ("stuck", "worker", 1, "warning")
    ]
    assert described["events"] == [{"number": 1, "ago_s": 59.0, "text": "all have joined"}]
    first = described["members"][0]
    assert first.keys() == {"role", "rank", "starts", "state", "silent_s", "address", "host", "pid", "figures"}
    assert (first["figures"]["rounds_per_s"], first["figures"]["input"]) == (0.0, None)
    assert described["members"][2]["figures"]["held"] == 4000


def test_a_big_job_is_json_with_finite_numbers_only() -> None:
    described = as_json.finite(as_json.described_view(SimulatedJob().view(30.0)))
    assert len(json.loads(json.dumps(described, allow_nan=False))["members"]) == 80


def test_no_key_is_in_it() -> None:
    root, own = pair(), pair()
    place = dataclasses.replace(PLACE, address=with_key("tcp://10.0.0.1:5", root[0]), key=own[1])
    told = json.dumps(as_json.described_job(place))
    assert own[1] not in told
    assert json.loads(told)["pid"] == 42


def test_stacks_are_by_member() -> None:
    stacks = wire.Stacks(wire.Node("worker", 0, 1), 1, "a.py:1 in f", "", [["MainThread", ["a.py:1 in f"]]])
    described = as_json.described_stacks(
        [LocatedMember("worker", 0, "is at a.py:1 in f", stacks), LocatedMember("worker", 1, "does not answer", None)]
    )
    assert described == [
        {
            "role": "worker",
            "rank": 0,
            "place": "is at a.py:1 in f",
            "threads": [{"name": "MainThread", "frames": ["a.py:1 in f"]}],
        },
        {"role": "worker", "rank": 1, "place": "does not answer", "threads": []},
    ]


def test_numbers_that_json_has_not_are_null() -> None:
    assert as_json.finite({"a": [math.inf, 1.5], "b": (math.nan, "x")}) == {"a": [None, 1.5], "b": [None, "x"]}
