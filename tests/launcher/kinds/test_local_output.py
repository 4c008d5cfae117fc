"""What of a real job's lines is shown, and what is in its files: after kills, on a full disk, and on a terminal."""

from __future__ import annotations

import os
import re
import select
import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import screen
from launched import Launched
from waiting import LONG, until

from launcher.launch import main
from launcher.output.display import DEPRECATED

Start = Callable[..., Launched]
LINES = 2000


def entries(path: Path) -> list[str]:
    """The entries of a file without their times."""
    lines = path.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (stdout|stderr) [FP] ", line) for line in lines)
    return [line.partition(" ")[2] for line in lines]


@pytest.mark.long
def test_a_process_that_is_killed_loses_no_line(start: Start, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        f"for n in range({LINES}): print(n, flush=True)\n"
        "print('oh', end='', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    launched = start("-n", "1", "--log-dir", "logs", "--show", "none", "python", "-S", "-c", code)
    assert launched.wait() == 128 + signal.SIGKILL
    assert sorted(entries(tmp_path / "logs" / "worker-0.log")) == sorted(
        [
            "stderr F launch.py: start 1 of worker 0",
            *(f"stdout F {n}" for n in range(LINES)),
            "stderr P oh",
            "stderr F launch.py: was killed by SIGKILL",
        ]
    )
    assert launched.out == ""
    shown = launched.err.splitlines()
    assert shown[0] == "launch.py: the last 20 lines of worker 0, which had not been shown:"
    assert {*shown[1:-1]} > {f"[worker 0] {n}" for n in range(LINES - 19, LINES)}
    assert shown[-1] == "launch.py: worker 0 was killed by SIGKILL"
    assert entries(tmp_path / "logs" / "launch.log")[-1] == "stderr F worker 0 was killed by SIGKILL"


@pytest.mark.long
def test_what_launch_py_has_received_is_there_when_it_is_killed(start: Start, tmp_path: Path) -> None:
    code = f"import signal\nfor n in range({LINES}): print(n, flush=True)\nsignal.pause()"
    launched = start("-n", "1", "--log-dir", "logs", "python", "-S", "-c", code)
    file = tmp_path / "logs" / "worker-0.log"
    until(lambda: file.exists() and file.read_text().endswith(f" {LINES - 1}\n"), over=launched.over)
    launched.kill(signal.SIGKILL)
    assert launched.wait() == -signal.SIGKILL
    until(lambda: not launched.family())
    assert entries(file)[1:] == [f"stdout F {n}" for n in range(LINES)]
    again = start("-n", "1", "--log-dir", "logs", "true")
    assert again.wait() == 0, again.err
    assert entries(file)[LINES + 1 :] == [
        *("stderr F launch.py: start 1 of worker 0", "stderr F launch.py: exited with code 0")
    ]


@pytest.mark.long
def test_a_full_disk_neither_ends_nor_hangs_a_job(start: Start, tmp_path: Path) -> None:
    launched = start(
        *("-n", "1", "--log-dir", "logs", "python", "-S", "-c", f"for n in range({LINES}): print(n)"),
        prelude="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))",
    )
    assert launched.wait() == 0, launched.err
    assert launched.out.count("[worker 0] ") < LINES, "the limit is on that file, too"
    complaint, *others = launched.err.splitlines()
    assert complaint.startswith(
        f"launch.py: cannot write {tmp_path}/logs/worker-0.log: File too large; the job goes on"
    )
    assert re.fullmatch(r"launch.py: \d+ lines could not be written, and are missing in .*/logs", others[-1])
    assert (tmp_path / "logs" / "worker-0.log").stat().st_size <= 9000


@pytest.mark.long
def test_live_on_a_terminal(start: Start, tmp_path: Path) -> None:
    """One line for each process, and those of worker 1 above; the failure is last."""
    code = (
        "import os, sys, time\n"
        "rank = int(os.environ['DMLC_TASK_ID'])\n"
        "print('step 1'); print('step 2', file=sys.stderr)\n"
        "while rank and not os.path.exists('go'): time.sleep(0.01)\n"
        "sys.exit(3 * rank)\n"
    )
    with screen.terminal() as (ours, theirs):
        words = ("-n", "2", "-s", "1", "--live", "--show", "1", "--log-dir", "logs", "python", "-S", "-c", code)
        launched = start(*words, env={"TERM": "xterm"}, stdout=theirs, stderr=theirs)
        os.close(theirs)
        received = b""
        while not re.search(rb"worker 1.*running.*step", received):
            received += os.read(ours, 1 << 16)
        (tmp_path / "go").touch()
        assert launched.wait() == 3
        while b"worker 1 exited with code 3" not in received:
            received += os.read(ours, 1 << 16)
    lines = [re.sub("  +", "  ", line.rstrip()) for line in screen.seen(received.decode())]
    above = lines.index("process  state  for  silent  last line")
    assert lines[:2] == [
        f"launch.py: warning: {DEPRECATED}",
        "launch.py: starting 2 workers, 1 server on this machine",
    ]
    assert sorted(lines[2:above]) == ["[worker 1] step 1", "[worker 1] step 2"]
    assert re.fullmatch(r"worker 1  failed  \S+  exited with code 3; step [12]", lines[above + 1])
    assert lines[-2:] == ["launch.py: worker 1 exited with code 3; the last that it printed: step 2", ""]
    assert "\x1b[33m[worker 1]\x1b[0m step 1" in received.decode().replace("\x1b[0;33m", "\x1b[33m")
    assert (tmp_path / "logs" / "worker-0.log").read_text().count("step") == 2


@pytest.mark.long
def test_without_a_terminal_there_are_plain_lines(start: Start) -> None:
    launched = start("-n", "2", "--live", "--log-dir", "logs", "printf '1%%\\r2%%\\n'; echo done")
    assert launched.wait() == 0
    assert launched.lines == sorted([f"[worker {n}] {text}" for n in (0, 1) for text in ("1%", "2%", "done")])
    assert launched.err == f"launch.py: warning: {DEPRECATED}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--show", "2"), "--show 2: there is no worker 2; the workers' ranks are 0 to 1"),
        (("--show", "0-"), "argument --show: '0-' is not a rank; valid: all, none, or ranks of workers such as 0,"),
        (
            ("--live",),
            "--live shows the last line of each process; say where the others go: into files, with --log-dir",
        ),
        (("--log-size", "16"), "argument --log-size: '16' is not a size from 64k on; valid: such as 500k, 16m or 1g"),
        (("--log-dir", "/dev/null"), "--log-dir /dev/null: cannot make this directory: Not a directory"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "2", *words, "true"]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert "starting" not in captured.err


# As a shell starts it: the terminal is its session's, and Ctrl-C a signal.
CONTROLLED = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
PROGRAM = """
import os, sys
rank = int(os.environ["DMLC_TASK_ID"])
if rank:
    known = rank + 40, all(map(os.isatty, (0, 1, 2))), os.environ["KVSTORE_PATIENCE_S"]
    breakpoint()
    print("went on")
sys.stdin.read()
"""
ASKS = "import os; print([input('? '), input('? ')], os.environ.get('KVSTORE_PATIENCE_S'))"


class Typist:
    """Somebody at a terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = ""

    def types(self, text: str, after: str) -> None:
        """Wait until the program has said ``after``, beyond what was seen before, and type."""
        self.waits(after)
        os.write(self._fd, text.encode())

    def waits(self, wanted: str) -> None:
        """Wait until the program has said something."""
        begin, deadline = len(self.seen), time.monotonic() + LONG
        while wanted not in self.seen[begin:]:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 1 << 16).decode()


def test_breakpoint_in_the_worker_that_has_the_terminal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with screen.terminal() as (ours, theirs):
        mode = termios.tcgetattr(theirs)
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        launched = start("-n", "2", "--attach", "1", "python", "train.py", prelude=CONTROLLED, **streams)
        user = Typist(ours)
        user.types("known\n", after="(Pdb) ")
        user.types("no such\x03", after="(41, True, '0')\r\n(Pdb) ")
        user.types("n\n", after="KeyboardInterrupt--")
        user.types("\x03\x03", after="went on")
        assert launched.wait() == 130, user.seen
        assert termios.tcgetattr(theirs) == mode, "a prompt that was killed has left it otherwise"
        user.waits("no process of the job is left")
    assert "[worker 1]" not in user.seen, "between it and the terminal is nobody"
    assert not launched.family()


def test_input_from_a_file_is_for_the_only_worker_and_for_the_one_that_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "answers").write_text("one\ntwo\n")
    said = []
    for words, env in (
        (("-n", "1"), {}),
        (("-n", "1", "--attach", "0"), {"KVSTORE_PATIENCE_S": "7"}),
    ):
        with (tmp_path / "answers").open() as answers:
            launched = start(*words, "python", "-S", "asks.py", stdin=answers.fileno(), env=env)
            launched.wait()
            said.append(launched.out)
    assert said[0] == "[worker 0] ? ? ['one', 'two'] None\n"
    assert said[1] == "? ? ['one', 'two'] 7\n"
