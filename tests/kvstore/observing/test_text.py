from __future__ import annotations

import dataclasses
import json
import math

from simulated_job import SimulatedJob
from viewed_job import PLACE, server, view_of, worker

from kvstore import wire
from kvstore.job.curve_keys import pair, with_key
from kvstore.observing import as_json
from kvstore.observing.advice import Advice
from kvstore.observing.columns import FEW, MOST_DIFFERENT, Column, member_table
from kvstore.observing.text import (
    LocatedMember,
    StatusParts,
    job_lines,
    located_members,
    silent_scheduler_lines,
    stacks_lines,
    status_lines,
)
from kvstore.observing.view import Event, JobView, MemberView

ADVICE = (Advice("stuck", "worker", 1, "workers wait"), Advice("straggler_compute", "worker", 1, "worker 1 computes"))


def text(view: JobView, parts: StatusParts | None = None) -> str:
    return "\n".join(line.text for line in status_lines(PLACE, view, parts or StatusParts()))


def hanging() -> JobView:
    waits = {
        "waiting": [0, 2],
        "missing": [1],
        "oldest_us": 12_000_000,
        "why": "waits for worker 1, whose push 7 of 'w' is missing",
    }
    return view_of([worker(0), worker(1, rounds=49), worker(2), server(0, **waits), server(1, **waits)])


def test_a_job_that_hangs_is_shown_with_whom_it_waits_for_and_where_that_one_is() -> None:
    shown = text(hanging(), StatusParts(places={1: "is at train.py:41 in load_batch"}, advice=ADVICE))
    assert (
        shown
        == """\
python train.py
  j · local · pid 42
  runs for 1 min 0 s · 3 of 3 workers, 2 of 2 servers

who waits for whom
  servers 0, 1: workers 0, 2 have waited 12 s for worker 1, whose push 7 of 'w' is missing
  worker 1 is at train.py:41 in load_batch

advice
  - worker 1 computes

workers
            state   beat  rounds  memory
  worker 0  ready  0.4 s      50  100 MB
  worker 1  ready  0.4 s      49  100 MB
  worker 2  ready  0.4 s      50  100 MB

servers
            state   beat  rounds  memory    held
  server 0  ready  0.4 s      50  100 MB  4.0 kB
  server 1  ready  0.4 s      50  100 MB  4.0 kB

events
          59 s ago  all have joined"""
    )


def test_the_process_of_each_member_is_shown_and_its_host_where_the_hosts_are_several() -> None:
    def at(member: MemberView, host: str) -> MemberView:
        return dataclasses.replace(member, host=host, pid=4000 + member.rank)

    one = text(view_of([at(worker(0), "node7"), at(server(0), "node7")]))
    assert "runs for 1 min 0 s on node7 · 1 of 1 worker" in one
    assert "  memory  pid\n  worker 0  ready  0.4 s      50  100 MB  4000\n" in one
    two = text(view_of([at(worker(0), "node7"), at(worker(1), "n8"), server(0), server(1)]))
    assert "runs for 1 min 0 s ·" in two
    assert two.split("workers\n")[-1].split("\n\n")[0].split("\n") == [
        "            state   beat  rounds  memory  pid   host",
        "  worker 0  ready  0.4 s      50  100 MB  4000  node7",
        "  worker 1  ready  0.4 s      50  100 MB  4001  n8",
    ]
    assert "pid" not in two.split("servers\n")[-1], "nobody there has said it"


def test_of_many_the_awaited_one_is_shown_with_its_process() -> None:
    members = [dataclasses.replace(worker(rank), host=f"node{rank % 2}", pid=4000 + rank) for rank in range(64)]
    shown = text(view_of(members), StatusParts(advice=[Advice("straggler_compute", "worker", 7, "worker 7 is slow")]))
    assert "4007  node1" in shown
    assert "4000" not in shown


def test_what_the_scheduler_waits_for_is_shown_before_anybody_has_joined() -> None:
    view = dataclasses.replace(view_of([], waits="waits for worker 0 to join"), num_workers=1, num_servers=1)
    shown = text(view)
    assert "0 of 1 worker, 0 of 1 server" in shown
    assert "scheduler: waits for worker 0 to join" in shown


def test_a_job_of_64_workers_and_16_servers_fits_on_a_screen() -> None:
    job = SimulatedJob(workers=64, servers=16, straggler=5, killed=9)
    lines = text(job.view(60.0)).split("\n")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert any(line.split()[:3] == ["worker", "9", "lost"] for line in lines)
    assert any(line.split()[:3] == ["worker", "5", "ready"] for line in lines), "the straggler waits little"
    everybody = text(job.view(60.0), StatusParts(everybody=True)).split("\n")
    assert sum(line.split()[:1] == ["worker"] and "logs" not in line for line in everybody) == 64


def test_a_straggler_among_many_has_a_row_however_little_its_numbers_differ() -> None:
    view = view_of([worker(rank) for rank in range(64)])
    assert "nobody differs" in text(view)
    shown = text(view, StatusParts(advice=[Advice("straggler_compute", "worker", 7, "worker 7 is slow")]))
    assert "\n  worker 7  " in shown
    assert "nobody differs" not in shown


def test_long_advice_is_wrapped() -> None:
    advice = Advice("bound_by_store", "", -1, "more servers " * 20, "info")
    lines = [line for line in status_lines(PLACE, view_of([]), StatusParts(advice=[advice])) if "servers" in line.text]
    assert [line.text[:4] for line in lines] == ["  - ", "    ", "    "]
    assert {line.style for line in lines} == {"plain"}


def test_a_number_and_its_sign_stay_together() -> None:
    advice = Advice("bound_by_store", "", -1, "in 98 % and " * 30)
    lines = [line.text for line in status_lines(PLACE, view_of([]), StatusParts(advice=[advice]))]
    assert not [line for line in lines if line.strip().startswith("%")]
    assert "\u00a0" not in "".join(lines)


def test_a_failure_is_shown() -> None:
    view = view_of([worker(0, "lost")], failure="worker 0 was killed by SIGKILL")
    [line] = [line for line in status_lines(PLACE, view, StatusParts()) if "failed" in line.text]
    assert (line.text, line.style) == ("  the job has failed: worker 0 was killed by SIGKILL", "bad")


def test_rates_and_logged_values_are_in_the_head() -> None:
    view = view_of([worker(0, before={"rounds": 0}, values=[["epoch", 3.0], ["loss", 0.12345]])])
    shown = text(view)
    assert "50 rounds, 5.00 a second" in shown
    assert "worker 0 logs epoch 3, loss 0.1235" in shown


def test_a_member_that_is_silent_is_said_to_be() -> None:
    view = view_of([dataclasses.replace(worker(0), silent_s=9.0), worker(1)])
    assert "worker 0  silent  9.0 s" in text(view)


def test_links_are_shown_if_they_are_wanted() -> None:
    view = view_of([worker(0, before={}, sent=[10_000, 0], received=[0, 0])])
    assert "bytes a second over each link" not in text(view)
    assert "worker 0      0     1.0 kB sent        0 B received" in text(view, StatusParts(links=True))


def test_the_latest_events_are_shown() -> None:
    view = view_of([], events=[Event(number, 100.0, f"event {number}") for number in range(1, 21)])
    assert "event 12\n" not in text(view) + "\n"
    assert "event 13" in text(view)
    assert "event 1\n" in text(view, StatusParts(everybody=True))


def test_a_silent_scheduler_and_lists() -> None:
    assert [line.text for line in silent_scheduler_lines(PLACE, "it does not answer")] == [
        "python train.py",
        "  j · local · pid 42",
        "  it does not answer",
    ]
    by_mpirun = dataclasses.replace(PLACE, launcher="mpirun (Open MPI)")
    listed = [line.text for line in job_lines([(PLACE, "runs"), (by_mpirun, "waits")])]
    assert listed[1].split() == ["42", "local", "runs", "python", "train.py"]
    assert listed[1].index("python") == listed[2].index("python"), "columns are as wide as what is in them"


def stacks(rank: int, place: str = "train.py:3 in main", ours: str = "courier") -> wire.Stacks:
    return wire.Stacks(
        wire.Node("worker", rank, 1), 1, place, "", [["MainThread", ["a.py:1 in f", place]], [f"kvstore {ours}", []]]
    )


def test_answers_are_found_by_rank_and_who_has_not_answered_is_there_too() -> None:
    located = located_members("worker", {0: "is at a", 1: "does not answer"}, [stacks(0)])
    assert [(member.rank, member.stacks is not None) for member in located] == [(0, True), (1, False)]


def test_equal_stacks_are_shown_once() -> None:
    answers = [stacks(0), stacks(1), stacks(2, "train.py:9 in load"), stacks(3)]
    places = {one.node.rank: f"is at {one.place}" for one in answers} | {4: "does not answer"}
    assert [line.text for line in stacks_lines(located_members("worker", places, answers))] == [
        *(
            "",
            "workers 0, 1, 3: each is at train.py:3 in main",
            "  MainThread",
            "    a.py:1 in f",
            "    train.py:3 in main",
        ),
        *("", "worker 2 is at train.py:9 in load", "  MainThread", "    a.py:1 in f", "    train.py:9 in load"),
        *("", "worker 4 does not answer"),
    ]


def test_this_packages_threads_are_shown_if_that_is_wanted() -> None:
    located = [LocatedMember("worker", 0, "is at x", stacks(0))]
    assert "  kvstore courier" not in [line.text for line in stacks_lines(located)]
    assert "  kvstore courier" in [line.text for line in stacks_lines(located, all_threads=True)]


NUMBER: Column[tuple[str, float | None]] = Column("number", lambda row: row[1], lambda number: f"{number:g}", 1.0)


def table(rows: list[tuple[str, float | None]], notable: str = "", everybody: bool = False) -> list[str]:
    lines = member_table(
        rows, [NUMBER], lambda row: row[0], lambda _: "ready", lambda row: row[0] == notable, everybody
    )
    return [line.text for line in lines]


def many(count: int = 64, **others: float) -> list[tuple[str, float | None]]:
    return [(f"w{rank}", others.get(f"w{rank}", 10.0)) for rank in range(count)]


def test_of_few_each_has_a_row() -> None:
    assert table([("w0", 1.0), ("w1", None)]) == ["      state  number", "  w0  ready       1", "  w1  ready       -"]


def test_of_many_what_is_usual_is_shown_and_who_differs() -> None:
    lines = table(many(w7=50.0))
    assert [line.split() for line in lines] == [
        ["state", "number"],
        ["lowest", "of", "64", "10"],
        ["median", "of", "64", "10"],
        ["highest", "of", "64", "50"],
        ["w7", "ready", "50"],
    ]


def test_who_is_notable_is_shown_whatever_the_numbers_say() -> None:
    assert table(many(), notable="w3")[-1].split()[0] == "w3"


def test_if_nobody_differs_that_is_said() -> None:
    assert table(many())[-1] == "  nobody differs from the rest; --all shows everybody"


def test_of_many_that_differ_some_are_shown_and_the_others_counted() -> None:
    odd = {f"w{rank}": 100.0 + rank for rank in range(20)}
    lines = table(many(**odd), notable="w19")
    assert len(lines) == 1 + 3 + MOST_DIFFERENT + 1
    assert "w19" in lines[-2], "who is notable goes first"
    assert lines[-1] == "  12 more differ from the rest; --all shows everybody"


def test_all_are_shown_if_that_is_wanted() -> None:
    assert len(table(many(), everybody=True)) == 1 + 64


def test_where_numbers_spread_nobody_differs() -> None:
    spread = [(f"w{rank}", float(rank)) for rank in range(FEW + 1)]
    assert "nobody differs" in table(spread)[-1]


def test_a_column_in_which_nothing_is_known_is_left_out() -> None:
    assert table([("w0", None), ("w1", 0.0)])[0].split() == ["state"]
    assert table([]) == []


def test_what_differs_has_a_style() -> None:
    lines = member_table(
        [("w0", 1.0), ("w1", 1.0), ("w2", 9.0), ("w3", 1.0)],
        [NUMBER],
        lambda row: row[0],
        lambda _: "ready",
        lambda row: row[0] == "w3",
    )
    assert [line.style for line in lines] == ["faint", "plain", "plain", "odd", "bad"]


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
