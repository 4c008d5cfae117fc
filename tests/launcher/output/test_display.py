"""What is shown of the lines of processes, and what their files have."""

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
from launcher.output.display import Display, of_terminal, prepare
from launcher.output.outlet import Outlet

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
    display.exited(SERVER, Exit(signum=9))
    display.begins(SERVER, 2, "was killed by SIGKILL")
    display.reported(FIRST, ExitReport("ValueError: no", details="Traceback\n  ValueError: no\n"))
    display.reported(SECOND, ExitReport("NodeLost: worker 0", consequence=True))
    display.reported(SECOND, ExitReport("printed", printed=True))
    display.exited(FIRST, Exit(code=1))
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


def drawn(ours: int, shown: Shown) -> list[str]:
    """What is on the terminal."""
    shown.outlet.pump()
    os.write(shown.outlet.stderr, b"\0")  # the terminal may deliver in parts
    while not shown.received.endswith(b"\0"):
        shown.received += os.read(ours, 1 << 16)
    shown.received = shown.received.rstrip(b"\0")
    return [line.rstrip() for line in screen.seen(shown.received.decode())]


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
        logged = Shown(theirs, theirs, OutputOptions(log_dir=str(tmp_path)))
        logged.display.output(SECOND, 2, b"50%\r")
        logged.outlet.pump()
        os.close(ours)
        logged.lines(FIRST, "Epoch[1]")
        logged.tick(2.0)
        logged.display.exited(FIRST, Exit())
        logged.display.conclude()
        logged.outlet.pump()
        logged.display.close()
    assert "Epoch[1]" in (tmp_path / "worker-0.log").read_text()


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    prepare(OutputOptions(log_dir=str(tmp_path / "logs")))
    assert list((tmp_path / "logs").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot make this directory"):
        prepare(OutputOptions(log_dir=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("options", "width"),
    [
        (OutputOptions(), 90),
        (OutputOptions(show=(0,)), 90),
        (OutputOptions(show=(1,)), 0),
    ],
)
def test_workers_are_told_how_wide_a_bar_may_be_and_that_colors_are_not_wanted(
    options: OutputOptions, width: int
) -> None:
    with screen.terminal() as (_, theirs):
        told = of_terminal(Outlet(1, theirs), {"TERM": "xterm", "NO_COLOR": "1"}, options)
        assert told == {"KVSTORE_COLUMNS": str(width), "NO_COLOR": "1"}
        assert of_terminal(Outlet(1, theirs), {"TERM": "dumb"}, options) == {"KVSTORE_COLUMNS": "0"}
