"""What is shown of the lines of processes, and what `--live` knows of each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import screen

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.description import OutputOptions
from launcher.job.tasks import Task
from launcher.output import live as live_module
from launcher.output.display import Display, of_terminal, prepare
from launcher.output.live import LiveRow, LiveTable, LiveView, duration, require_rich
from launcher.output.outlet import Outlet

# ---- what is shown of the lines of processes, and what their files have


TASKS = [
    *(Task("scheduler", 0, (), {}), Task("server", 0, (), {})),
    *(Task("worker", rank, (), {}, host="node7") for rank in range(2)),
]
SERVER, FIRST, SECOND = 1, 2, 3
AT = "2026-03-01T09:30:00.000000Z"
CLOCK = 1772357400.0  # that time


class Shown:
    """A display whose output goes to files, or to a terminal."""

    def __init__(self, stdout: int, stderr: int, options: OutputOptions, attached: int | None = None) -> None:
        self.outlet = Outlet(stdout, stderr)
        self.now = 0.0
        self.received = b""  # by the terminal
        self.display = Display(
            TASKS,
            self.outlet,
            environ={"TERM": "xterm", "NO_COLOR": "1"},
            options=options,
            name="launch.py",
            attached=attached,
            clock=lambda: CLOCK,
            monotonic=lambda: self.now,
        )

    def tick(self, now: float) -> None:
        self.now = now
        self.display.tick()

    def lines(self, index: int, *lines: str, number: int = 1) -> None:
        self.display.output(index, number, "".join(f"{line}\n" for line in lines).encode())


Show = Callable[..., Shown]


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Show]:
    """Make a display that writes into the files `out` and `err`."""
    fds = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
    made: list[Shown] = []

    def show(**options: object) -> Shown:
        made.append(Shown(*fds, OutputOptions(**options)))  # type: ignore[arg-type]
        return made[-1]

    yield show
    for each in made:
        each.display.close()
    for fd in fds:
        os.close(fd)


def read(tmp_path: Path, shown: Shown) -> tuple[str, str]:
    shown.outlet.pump()
    return (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def test_only_the_workers_that_are_asked_for(shown: Show, tmp_path: Path) -> None:
    few = shown(show=(1,))
    for index in (SERVER, FIRST, SECOND):
        few.lines(index, "hi")
        few.lines(index, "oh", number=2)
    assert read(tmp_path, few) == ("[server 0] hi\n[worker 1] hi\n", "[server 0] oh\n[worker 1] oh\n")


def test_the_last_lines_of_a_worker_that_fails_are_shown_once(shown: Show, tmp_path: Path) -> None:
    none = shown(show=())
    none.lines(FIRST, *(f"step {number}" for number in range(30)))
    none.lines(FIRST, "x" * 5000, number=2)
    none.display.output(FIRST, 1, b"no end")
    none.display.output(FIRST, 1, b"")
    none.lines(SERVER, "hi", number=2)
    assert [none.display.show_hidden(index) for index in (FIRST, FIRST, SECOND, SERVER)] == [True, False, False, False]
    _, err = read(tmp_path, none)
    assert err.splitlines() == [
        "[server 0] hi",
        "launch.py: the last 20 lines of worker 0 on node7, which had not been shown:",
        *(f"[worker 0] step {number}" for number in range(12, 30)),
        f"[worker 0] {'x' * 1989}",
        "[worker 0] no end",
    ]


def test_a_file_for_each_process_and_one_for_launch_py(shown: Show, tmp_path: Path) -> None:
    logged = shown(log_dir=str(tmp_path / "logs"), show=())
    display = logged.display
    display.say("starting 2 workers")
    display.say("the page is at http://127.0.0.1:80/?token=hunter2", secret=True)
    for index in range(len(TASKS)):
        display.begins(index)
    logged.lines(FIRST, "Epoch[0]")
    display.output(FIRST, 2, b"\xff\x1b[1mwarning\r\n")
    display.output(SERVER, 2, b"slow")
    display.output(SERVER, 2, b"")
    display.exited(SERVER, Exit(signum=9), failed=True)
    display.begins(SERVER, 2, "was killed by SIGKILL")
    display.reported(FIRST, ExitReport("ValueError: no", details="Traceback\n  ValueError: no\n"))
    display.reported(SECOND, ExitReport("NodeLost: worker 0", consequence=True))
    display.reported(SECOND, ExitReport("printed", printed=True))
    display.exited(FIRST, Exit(code=1), failed=True)
    contents = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert {name: re.findall(rb"^%s (.*)$" % AT.encode(), text, re.MULTILINE) for name, text in contents.items()} == {
        "launch.log": [b"stderr F starting 2 workers"],
        "scheduler.log": [b"stderr F launch.py: start 1 of scheduler"],
        "server-0.log": [
            b"stderr F launch.py: start 1 of server 0",
            b"stderr P slow",
            b"stderr F launch.py: was killed by SIGKILL",
            b"stderr F launch.py: start 2 of server 0, because it was killed by SIGKILL",
        ],
        "worker-0.log": [
            b"stderr F launch.py: start 1 of worker 0 on node7",
            b"stdout F Epoch[0]",
            b"stderr F \xff\x1b[1mwarning\r",
            b"stderr F Traceback",
            b"stderr F   ValueError: no",
            b"stderr F launch.py: exited with code 1",
        ],
        "worker-1.log": [b"stderr F launch.py: start 1 of worker 1 on node7", b"stderr F NodeLost: worker 0"],
    }
    shown_lines = "".join(read(tmp_path, logged))
    assert "Epoch" not in shown_lines
    assert "token=hunter2" in shown_lines


def test_a_line_that_does_not_end_is_written_after_a_second(shown: Show, tmp_path: Path) -> None:
    logged = shown(log_dir=str(tmp_path / "logs"))
    file = tmp_path / "logs" / "worker-0.log"
    logged.display.output(FIRST, 1, b"loading...")
    logged.tick(0.5)
    assert not file.exists()
    logged.tick(1.5)
    logged.tick(9.0)
    assert file.read_text() == f"{AT} stdout P loading...\n"


def test_a_disk_that_is_full_is_said_once_and_counted_at_the_end(shown: Show, tmp_path: Path) -> None:
    logged = shown(log_dir=str(tmp_path / "logs"))
    (tmp_path / "logs" / "worker-0.log").mkdir()
    (tmp_path / "logs" / "worker-1.log").mkdir()
    for index in (FIRST, SECOND, FIRST):
        logged.lines(index, "hi")
    logged.display.conclude()
    out, err = read(tmp_path, logged)
    assert out.count("hi") == 3
    first, last = err.splitlines()
    assert first.startswith(f"launch.py: cannot write {tmp_path}/logs/worker-0.log: Is a directory; the job goes on")
    assert last == f"launch.py: 3 lines could not be written, and are missing in {tmp_path}/logs"


def test_without_a_terminal_live_changes_nothing(shown: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "find_spec", lambda _: None)
    plain = shown(live=True, log_dir=str(tmp_path / "logs"))
    plain.lines(FIRST, "hi")
    plain.tick(9.0)
    plain.display.conclude()
    assert read(tmp_path, plain) == ("[worker 0] hi\n", "")


def drawn(ours: int, shown: Shown) -> list[str]:
    """What is on the terminal, without what the columns are called."""
    shown.outlet.pump()
    os.write(shown.outlet.stderr, b"\0")  # the terminal may deliver in parts
    while not shown.received.endswith(b"\0"):
        shown.received += os.read(ours, 1 << 16)
    shown.received = shown.received.rstrip(b"\0")
    lines = screen.seen(shown.received.decode())
    return [re.sub(r"  +", "  ", line.rstrip()) for line in lines if not line.startswith("process ")]


def test_one_line_for_each_process_on_a_terminal(tmp_path: Path) -> None:
    with screen.terminal() as (ours, theirs):
        live = Shown(theirs, theirs, OutputOptions(live=True, log_dir=str(tmp_path)))
        live.lines(FIRST, "Epoch[0]", "", "Epoch[1]", "")
        live.display.output(SECOND, 2, b"50%\r")
        live.lines(SERVER, "careful", number=2)
        live.tick(1.0)
        assert drawn(ours, live) == [
            "[server 0] careful",
            "worker 0  node7  running  0:01  Epoch[1]",
            "worker 1  node7  running  0:01  50%",
            "server 0  running  0:01  careful",
            "scheduler  running  0:01",
        ]
        live.display.output(SECOND, 2, b" \r")
        live.display.exited(SECOND, Exit(code=7), failed=True)
        live.display.exited(FIRST, Exit(), failed=False)
        live.display.conclude()
        live.display.show_hidden(FIRST)
        live.display.say("it is over")
        assert drawn(ours, live) == [
            "[server 0] careful",
            *("worker 0  node7  ended  0:00  Epoch[1]", "worker 1  node7  failed  0:00  exited with code 7"),
            *("server 0  running  0:01  careful", "scheduler  running  0:01"),
            "launch.py: the last 4 lines of worker 0 on node7, which had not been shown:",
            *("[worker 0] Epoch[0]", "[worker 0]", "[worker 0] Epoch[1]", "[worker 0]"),
            *("launch.py: it is over", ""),
        ]
        live.display.close()


def test_no_bar_is_drawn_on_a_terminal_where_somebody_types(tmp_path: Path) -> None:
    with screen.terminal() as (ours, theirs):
        debugged = Shown(theirs, theirs, OutputOptions(log_dir=str(tmp_path)), attached=FIRST)
        debugged.display.begins(FIRST)
        debugged.display.output(SECOND, 2, b"50%\r")
        debugged.lines(SECOND, "hi")
        debugged.display.output(SECOND, 2, b"100%\r")
        assert drawn(ours, debugged) == ["[worker 1] hi", ""]
        debugged.display.close()
    assert "what it prints is on the terminal alone" in (tmp_path / "worker-0.log").read_text()


def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    with screen.terminal() as (ours, theirs):
        live = Shown(theirs, theirs, OutputOptions(live=True, log_dir=str(tmp_path)))
        live.tick(1.0)
        live.outlet.pump()
        os.close(ours)
        live.lines(FIRST, "Epoch[1]")
        live.tick(2.0)
        live.display.exited(FIRST, Exit(), failed=False)
        live.display.conclude()
        live.outlet.pump()
        live.display.close()
    assert "Epoch[1]" in (tmp_path / "worker-0.log").read_text()


def test_a_fault_in_drawing_does_not_end_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise ValueError("no such color")

    with screen.terminal() as (ours, theirs):
        live = Shown(theirs, theirs, OutputOptions(live=True, log_dir=str(tmp_path)))
        live.tick(1.0)
        monkeypatch.setattr(live_module.LiveTable, "draw", fail)
        live.lines(FIRST, "a")
        live.tick(3.0)
        live.lines(FIRST, "b")
        live.display.conclude()
        assert drawn(ours, live) == [
            "launch.py: --live cannot draw any more (ValueError: no such color); lines are shown instead",
            *("[worker 0] b", ""),
        ]
        live.display.close()


def test_where_nothing_has_begun_nothing_is_drawn(tmp_path: Path) -> None:
    with screen.terminal() as (ours, theirs):
        live = Shown(theirs, theirs, OutputOptions(live=True, log_dir=str(tmp_path)))
        live.display.say("cannot start worker 0")
        live.display.conclude()
        assert drawn(ours, live) == ["launch.py: cannot start worker 0", ""]
        live.display.close()


def test_lines_scroll_above_if_they_are_asked_for(tmp_path: Path) -> None:
    with screen.terminal() as (ours, theirs), (tmp_path / "out").open("wb") as out:
        live = Shown(theirs, theirs, OutputOptions(live=True, scroll=True, show=(0,)))
        live.lines(FIRST, "a")
        live.lines(SECOND, "b")
        live.tick(1.0)
        rows = ["worker 0  node7  running  0:01  a", "server 0  running  0:01", "scheduler  running  0:01"]
        assert drawn(ours, live) == ["[worker 0] a", *rows]
        piped = Shown(out.fileno(), theirs, OutputOptions(live=True, log_dir=str(tmp_path / "logs")))
        piped.lines(SECOND, "b")
        piped.outlet.pump()
        piped.display.close()
    assert (tmp_path / "out").read_bytes() == b"[worker 1] b\n", "what goes into a file is not on the terminal"


def test_live_needs_a_place_for_the_lines() -> None:
    with pytest.raises(LaunchError, match="into files, with --log-dir DIR, or above it, with --show all or --show"):
        OutputOptions(live=True)


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(OutputOptions(log_dir=str(tmp_path / "logs")), {})
    assert list((tmp_path / "logs").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot make this directory"):
        prepare(OutputOptions(log_dir=str(tmp_path / "file")), {})
    monkeypatch.setattr(live_module, "find_spec", lambda _: None)
    with screen.terminal() as (_, theirs):
        before = os.dup(2)
        os.dup2(theirs, 2)
        try:
            with pytest.raises(LaunchError, match="--live needs rich"):
                prepare(OutputOptions(live=True, scroll=True), {"TERM": "xterm"})
        finally:
            os.dup2(before, 2)
            os.close(before)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        (OutputOptions(), 90),
        (OutputOptions(show=(0,)), 90),
        (OutputOptions(show=(1,)), 0),
        (OutputOptions(live=True, log_dir="x"), 50),
    ],
)
def test_workers_are_told_how_wide_a_bar_may_be_and_that_colors_are_not_wanted(
    options: OutputOptions, width: int
) -> None:
    with screen.terminal() as (_, theirs):
        told = of_terminal(Outlet(1, theirs), {"TERM": "xterm", "NO_COLOR": "1"}, options)
        assert told == {"KVSTORE_COLUMNS": str(width), "NO_COLOR": "1"}
        beside = len("node7") + 2 if options.live else 0
        elsewhere = of_terminal(Outlet(1, theirs), {"TERM": "xterm"}, options, "node7")
        assert elsewhere == {"KVSTORE_COLUMNS": str(width - beside)}
        assert of_terminal(Outlet(1, theirs), {"TERM": "dumb"}, options) == {"KVSTORE_COLUMNS": "0"}


# ---- what `--live` knows of each process, and which processes get a line


FOUR_WORKERS = [
    *(Task("scheduler", 0, (), {}), Task("server", 0, (), {})),
    *(Task("worker", rank, (), {}) for rank in range(4)),
]


@pytest.fixture
def view() -> LiveView:
    return LiveView(FOUR_WORKERS, range(len(FOUR_WORKERS)), 0.0)


def row(view: LiveView, name: str, now: float = 0.0) -> LiveRow:
    (found,) = (row for row in view.rows(now, 99)[0] if row.name == name)
    return found


def test_workers_are_above(view: LiveView) -> None:
    rows, rest = view.rows(61.0, 6)
    names = ["worker 0", "worker 1", "worker 2", "worker 3", "server 0", "scheduler"]
    assert ([row.name for row in rows], rest) == (names, "")
    assert [FOUR_WORKERS[row.task].name for row in rows] == names
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
    view = LiveView(FOUR_WORKERS, [1, 2], 0.0)
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
