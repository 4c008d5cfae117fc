"""What `--live` knows of each process, and which processes get a line."""

from __future__ import annotations

import re

import pytest

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.tasks import Task
from launcher.output import live as live_module
from launcher.output.live import LiveRow, LiveTable, LiveView, duration, require_rich

TASKS = [
    *(Task("scheduler", 0, (), {}), Task("server", 0, (), {})),
    *(Task("worker", rank, (), {}) for rank in range(4)),
]


@pytest.fixture
def view() -> LiveView:
    return LiveView(TASKS, range(len(TASKS)), 0.0)


def row(view: LiveView, name: str, now: float = 0.0) -> LiveRow:
    (found,) = (row for row in view.rows(now, 99)[0] if row.name == name)
    return found


def test_workers_are_above(view: LiveView) -> None:
    rows, rest = view.rows(61.0, 6)
    names = ["worker 0", "worker 1", "worker 2", "worker 3", "server 0", "scheduler"]
    assert ([row.name for row in rows], rest) == (names, "")
    assert [TASKS[row.task].name for row in rows] == names
    assert {(row.state, row.lasting, row.silent, row.text) for row in rows} == {("running", "1:01", "1:01", b"")}


def test_the_last_line_and_how_long_ago_it_was(view: LiveView) -> None:
    view.said(2, b"step 1", 5.0)
    assert row(view, "worker 0", 14.0)[4:] == ("0:14", "", b"step 1")
    assert row(view, "worker 0", 15.0)[4:] == ("0:15", "0:10", b"step 1")
    view.rewrites(2, b"50%", 16.0)
    assert row(view, "worker 0", 17.0)[4:] == ("0:17", "", b"50%")
    view.rewrites(2, b"50%", 30.0)
    assert row(view, "worker 0", 30.0).silent == "0:14", "what stays the same is silence"
    view.rewrites(2, b"", 31.0)
    assert row(view, "worker 0", 31.0).text == b"step 1"


@pytest.mark.parametrize(
    ("how", "failed", "state", "text"),
    [
        (Exit(), False, "ended", b"bye"),
        (Exit(code=3), True, "failed", b"exited with code 3; bye"),
        (Exit(signum=15), False, "ended", b"was killed by SIGTERM; bye"),
    ],
)
def test_ends(view: LiveView, how: Exit, failed: bool, state: str, text: bytes) -> None:
    view.said(2, b"bye", 1.0)
    view.rewrites(2, b"99%", 2.0)
    view.exited(2, how, failed, 3.0)
    assert row(view, "worker 0", 63.0)[3:] == (state, "1:00", "", text)


def test_who_ends_because_of_another_has_not_failed(view: LiveView) -> None:
    view.reported(2, ExitReport("worker 1 was lost", consequence=True), 1.0)
    view.reported(3, ExitReport("ValueError: no data"), 1.0)
    for index in (2, 3):
        view.exited(index, Exit(code=1), True, 2.0)
    assert row(view, "worker 0")[3::3] == ("ended", b"exited with code 1; worker 1 was lost")
    assert row(view, "worker 1")[3::3] == ("failed", b"exited with code 1; ValueError: no data")


def test_a_restart(view: LiveView) -> None:
    view.begins(1, 1, 1.0)
    view.exited(1, Exit(signum=9), True, 2.0)
    view.begins(1, 2, 3.0)
    assert row(view, "server 0", 5.0)[3:] == ("restarted", "0:02", "", b"start 2")


def test_if_there_is_no_room_for_all_those_that_matter_have_a_line(view: LiveView) -> None:
    view.exited(5, Exit(code=1), True, 0.0)
    view.exited(2, Exit(), False, 0.0)
    rows, rest = view.rows(0.0, 4)
    assert [row.name for row in rows] == ["worker 0", "worker 1", "worker 3"]
    assert rest == "and 3 more: 3 running"
    rows, rest = view.rows(0.0, 2)
    assert [row.name for row in rows] == ["worker 3"]
    assert rest == "and 5 more: 1 ended, 4 running"


def test_who_is_not_asked_for_has_a_line_once_it_fails() -> None:
    view = LiveView(TASKS, [1, 2], 0.0)
    view.said(5, b"x", 0.0)
    assert [row.name for row in view.rows(0.0, 9)[0]] == ["worker 0", "server 0"]
    view.exited(5, Exit(code=1), True, 0.0)
    assert [row.name for row in view.rows(0.0, 9)[0]] == ["worker 0", "worker 3", "server 0"]


def test_it_says_whether_there_is_anything_new(view: LiveView) -> None:
    seen = []
    for change in (
        lambda: None,
        lambda: view.said(2, b"x", 0.0),
        lambda: view.rewrites(2, b"1%", 0.0),
        lambda: view.rewrites(2, b"1%", 0.0),
        lambda: view.exited(2, Exit(), False, 0.0),
    ):
        view.rows(0.0, 9)
        change()
        seen.append(view.changed)
    assert seen == [False, True, True, False, True]


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 7.9, 61, 3599, 3600, 360000)] == [
        *("0:00", "0:07", "1:01", "59:59", "1:00:00", "100:00:00")
    ]


ROWS = [
    LiveRow(2, "worker 0", "", "running", "0:07", "", b"Epoch[0] " + b"x" * 99),
    LiveRow(3, "worker 1", "", "failed", "1:00", "", b"exited with code 1; no data"),
    LiveRow(0, "scheduler", "", "running", "12:00", "11:00", b""),
]


def test_a_line_for_each_process() -> None:
    drawn = LiveTable(color=False).draw(ROWS, "and 2 more: 2 ended", 60).decode()
    assert drawn.split("\n") == [
        "process    state      for  silent  last line",
        "worker 0   running   0:07          Epoch[0] xxxxxxxxxxxxxxx…",
        "worker 1   failed    1:00          exited with code 1; no d…",
        "scheduler  running  12:00   11:00",
        "and 2 more: 2 ended",
    ]


def test_hosts_are_shown_where_there_are_any() -> None:
    rows = [ROWS[0]._replace(host="node7.cluster.example.org"), ROWS[2]]
    assert LiveTable(color=False).draw(rows, "", 60).decode().split("\n") == [
        "process    host                  state      for  silent  la…",
        "worker 0   node7.cluster.examp…  running   0:07          Ep…",
        "scheduler                        running  12:00   11:00",
    ]


def test_colors_are_as_in_the_prefixes_of_lines() -> None:
    drawn = LiveTable(color=True).draw(ROWS, "", 60)
    assert b"\x1b[35mworker 0" in drawn
    assert b"\x1b[1;31mfailed" in drawn


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("width", [1, 10, 40, 200])
@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\xff\xfe", b"\x1b[2J\x1b[10;10Hgone", b"\x1b]0;title\x07", b"\x1b[31mred", b"\x1b[3", b"\x1bc"),
        *(b"a\tb\bc", b"[bold]x[/bold] :smile:", "漢字\N{COMBINING DIAERESIS}".encode() * 50, b"x" * 100_000),
    ],
)
def test_no_text_leaves_its_line(text: bytes, width: int, color: bool) -> None:
    drawn = LiveTable(color).draw([LiveRow(0, "worker 0", "", "running", "0:01", "", text)], "", width)
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", drawn).decode()
    assert plain.count("\n") == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", plain)
    if not color:
        assert b"\x1b" not in drawn
    if text.startswith(b"[bold]") and width == 200:
        assert plain.endswith("[bold]x[/bold] :smile:")


def test_without_rich_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_rich()
    monkeypatch.setattr(live_module, "find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=re.escape("--live needs rich, which is not installed: pip install")):
        require_rich()
