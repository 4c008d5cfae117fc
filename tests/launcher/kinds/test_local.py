"""Jobs that run: commands, environments, and what is shown of their lines."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import screen
from launched import FOREVER, SPOKEN, WAITS, Launched, when_spoken
from waiting import LONG, PROMPT, until

from launcher.kinds.registry import KINDS
from launcher.launch import main

# ---- jobs that run: commands, environments, output


Start = Callable[..., Launched]

SHOW = "import json, os, sys; print(json.dumps([sys.executable, sys.argv[1:], dict(os.environ)]))"


def shown(launched: Any) -> dict[str, tuple[str, list[str], dict[str, str]]]:
    """What processes that run SHOW have printed, by their prefix."""
    pairs = (line.split("] ", 1) for line in launched.out.splitlines())
    return {name + "]": json.loads(text) for name, text in pairs}


def test_scripts_that_know_nothing_of_servers_end_promptly_and_nothing_is_copied(start: Start, tmp_path: Path) -> None:
    assert "sync_dst_dir" in KINDS["local"].takes
    there = tmp_path / "there"
    launched = start("-n", "2", "--launcher", "local", "--sync-dst-dir", str(there), "pwd", limits={})
    assert launched.wait(PROMPT) == 0
    assert launched.lines == [f"[worker 0] {tmp_path}", f"[worker 1] {tmp_path}"]
    assert launched.err == "launch.py: --sync-dst-dir: nothing is copied: all processes run here\n"
    assert not there.exists()
    assert launched.family() == {}


def test_servers_that_leave_by_themselves_are_not_waited_for(start: Start) -> None:
    launched = start("-n", "1", "sleep 0.5", server="", limits={"linger": FOREVER})
    assert launched.wait() == 0
    assert launched.err == ""


@pytest.mark.parametrize(
    "command",
    [(f"cd / && python3 -c '{SHOW}' 'a b' '$(id)'",), ("env", "X=1", "python", "-c", SHOW, "a b", "$(id)")],
)
def test_python_is_the_one_that_runs_launch(start: Start, command: tuple[str, ...]) -> None:
    launched = start("-n", "1", *command)
    assert launched.wait() == 0
    executable, argv, _ = shown(launched)["[worker 0]"]
    assert (executable, argv) == (sys.executable, ["a b", "$(id)"])


def test_each_process_gets_its_environment(start: Start, short: Path) -> None:
    launched = start(
        "-n", "2", "-s", "1", "--env-server", "S:x:y", "--env-worker", "W:$(id) 'q", "--env", "MINE",
        "python", "-c", when_spoken("scheduler0", "server0") + SHOW,
        server=f"{SHOW}; sys.stdout.flush(); {SPOKEN}; {WAITS}",
        env={"MINE": "m", "OMP_NUM_THREADS": "3", "KVSTORE_COLUMNS": "7"},
    )  # fmt: skip
    assert launched.wait() == 0
    processes = {name: env for name, (_, _, env) in shown(launched).items()}
    assert set(processes) == {"[scheduler]", "[server 0]", "[worker 0]", "[worker 1]"}
    for name, env in processes.items():
        assert env["MINE"] == "m"
        assert env["OMP_NUM_THREADS"] == "3"
        assert env.get("OMP_WAIT_POLICY") == (None if name == "[scheduler]" else "passive")
        assert env["DMLC_PS_ROOT_URI"].startswith(f"ipc://{short}/kvstore-")
        assert env["DMLC_PS_ROOT_URI"].endswith("/scheduler")
        assert env["DMLC_ROLE"] == name.strip("[]").split()[0]
        assert (env["DMLC_NUM_WORKER"], env["DMLC_NUM_SERVER"], env["DMLC_NODE_HOST"]) == ("2", "1", "127.0.0.1")
    assert [processes[f"[worker {rank}]"]["DMLC_TASK_ID"] for rank in (0, 1)] == ["0", "1"]
    assert processes["[worker 1]"]["W"] == "$(id) 'q"
    assert processes["[server 0]"]["S"] == "x:y"
    assert processes["[worker 0]"]["KVSTORE_COLUMNS"] == "0", "there is no terminal"
    assert "S" not in processes["[worker 0]"]
    assert "W" not in processes["[server 0]"]


TAKES_OVER = """
import os, socket
if os.environ["DMLC_ROLE"] == "scheduler":
    listener = socket.socket(fileno=int(os.environ["KVSTORE_ROOT_FD"]))
    assert listener.getsockname() == (os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"]))
    link, _ = listener.accept()
    link.sendall(b"welcome")
    link.close()
import signal; signal.pause()
"""
CALLS = """
import os, socket
assert "KVSTORE_ROOT_FD" not in os.environ
print(socket.create_connection((os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"]))).recv(99))
"""


def test_over_tcp_the_scheduler_inherits_a_listening_socket(start: Start) -> None:
    launched = start("-n", "1", "python", "-c", CALLS, server=TAKES_OVER, env={"KVSTORE_TRANSPORT": "tcp"})
    assert launched.wait() == 0
    assert launched.lines == ["[worker 0] b'welcome'"]


def test_a_transport_that_there_is_not_is_an_error_before_anything_runs(start: Start) -> None:
    launched = start("-n", "1", "echo hi", env={"KVSTORE_TRANSPORT": "pigeons"})
    assert launched.wait() != 0
    assert "KVSTORE_TRANSPORT='pigeons' is not valid; valid: sockets, tcp, zeromq" in launched.err
    assert launched.out == ""


NOISY = """
import os, sys
name = sys.argv[1]
for i in range(2000):
    line = f"{i}:" + name * 50 + "\\n"
    # In pieces, which is how lines get mixed.
    for fd in (1, 2):
        os.write(fd, line[:20].encode())
        os.write(fd, line[20:].encode())
"""


def test_nothing_is_lost_or_mixed(start: Start) -> None:
    launched = start("-n", "3", f"python -c '{NOISY}' $DMLC_TASK_ID")
    assert launched.wait() == 0
    for text in (launched.out, launched.err):
        lines = text.splitlines()
        for rank in ("0", "1", "2"):
            mine = [line for line in lines if line.startswith(f"[worker {rank}] ")]
            assert mine == [f"[worker {rank}] {i}:{rank * 50}" for i in range(2000)]
        assert len(lines) == 6000


def test_nothing_is_mixed_where_output_and_error_are_one(start: Start) -> None:
    read, write = os.pipe()
    launched = start("-n", "2", f"python -c '{NOISY}' $DMLC_TASK_ID", stdout=write, stderr=write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    assert launched.wait() == 0
    for rank in ("0", "1"):
        expected = [f"[worker {rank}] {i}:{rank * 50}" for i in range(2000)]
        assert sorted(line for line in lines if f"worker {rank}" in line) == sorted(expected * 2)


def test_odd_output(start: Start) -> None:
    code = r"""
import os
os.write(1, b"\xff\xfe\n\r 50%\r100%\n" + b"x" * 3_000_000 + b"\nlast")
"""
    launched = start("-n", "1", "python", "-c", code)
    assert launched.wait() == 0
    out = (launched.directory / "out").read_bytes()
    assert out.split(b"\n") == [
        b"[worker 0] \xff\xfe",
        b"[worker 0]  50%",
        b"[worker 0] 100%",
        b"[worker 0] " + b"x" * 3_000_000,
        b"[worker 0] last",
        b"",
    ]


def test_a_grandchild_that_keeps_the_pipe_is_not_waited_for(start: Start) -> None:
    launched = start("-n", "1", "sleep 60 & yes | head -c 100000000 > /dev/null & echo early; printf late")
    assert launched.wait() == 0
    assert launched.lines == ["[worker 0] early", "[worker 0] late"]
    assert launched.family() == {}


def test_colors_on_a_terminal(start: Start) -> None:
    ours, theirs = pty.openpty()
    launched = start("-n", "1", "echo hi", env={"NO_COLOR": "", "TERM": "xterm"}, stdout=theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        seen = terminal.read(100)
        assert launched.wait() == 0
    assert seen.count(b"\x1b[0m hi\r\n") == 1
    assert b"[worker 0]" in seen


def test_workers_know_how_wide_the_terminal_is_that_shows_their_bars(start: Start) -> None:
    with screen.terminal() as (ours, theirs):
        launched = start(
            "-n", "1", r"echo $KVSTORE_COLUMNS; printf '1%%\r2%%\r' >&2", env={"TERM": "xterm"}, stderr=theirs
        )
        os.close(theirs)
        assert launched.wait() == 0
        assert launched.lines == [f"[worker 0] {screen.COLUMNS}"]
        starting, *shown = screen.seen(os.read(ours, 1 << 16).decode())
        assert starting == "launch.py: starting 1 worker, 1 server on this machine"
        assert shown == ["[worker 0] 2%", ""]


def test_a_reader_that_pauses_loses_nothing(start: Start, tmp_path: Path) -> None:
    read, write = os.pipe()
    size = 12_000_000  # more than launch.py holds before it stops reading
    code = f"print(('x' * 99 + '\\n') * {size // 100}, end='', flush=True); open('done', 'w')"
    launched = start("-n", "1", "python", "-c", code, stdout=write)
    os.close(write)
    until(lambda: launched.family())
    received = 0
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 20):
            if not received:
                assert not (tmp_path / "done").exists()  # the worker is held back
            received += len(data)
    assert launched.wait() == 0
    assert received == size // 100 * (100 + len("[worker 0] "))


def test_a_reader_that_leaves_ends_the_job(start: Start) -> None:
    read, write = os.pipe()
    launched = start("-n", "1", "yes", stdout=write)
    os.close(write)
    os.read(read, 100)
    os.close(read)
    assert launched.wait() == 141
    assert launched.family() == {}


def test_a_reader_that_is_stuck_does_not_keep_a_job_alive(start: Start) -> None:
    read, write = os.pipe()
    launched = start("-n", "1", "yes", stdout=write, limits={})
    os.close(write)
    os.read(read, 1)
    launched.kill(15)
    assert launched.wait(PROMPT) == 143
    assert launched.family() == {}
    os.close(read)


def test_a_full_disk_costs_the_output_and_not_the_job(start: Start) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    launched = start("-n", "1", "echo hi", stdout=full)
    os.close(full)
    assert launched.wait() == 0
    assert "cannot write to standard output: No space left on device" in launched.err


def test_closed_standard_streams_take_no_pipe_for_theirs(start: Start) -> None:
    launched = start("-n", "1", "echo lost; echo kept >&2", prelude="import os; os.close(0); os.close(1)")
    assert launched.wait() == 0
    assert (launched.out, launched.err) == ("", "[worker 0] kept\n")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (("pyhton ok.py",), 127, "cannot start worker 0: there is no command pyhton; did you mean: python ok.py?"),
        (("./ok.py",), 126, "./ok.py: is not executable; did you mean: python ./ok.py?"),
        (("./not-a-program",), 126, "./not-a-program: Exec format error"),
    ],
)
def test_a_command_that_cannot_run(
    start: Start, short: Path, tmp_path: Path, command: tuple[str, ...], code: int, message: str
) -> None:
    for name, text, mode in (("ok.py", "", 0o600), ("not-a-program", "\0", 0o700)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    launched = start("-n", "2", *command, env={"SECRET": "hunter2"})
    assert launched.wait() == code
    assert message in launched.err
    assert "Traceback" not in launched.err
    assert "hunter2" not in launched.err
    assert launched.family() == {}
    assert list(short.iterdir()) == []


# ---- what of a real job's lines is shown, and what is in its files: after kills, on a full disk, and on a terminal


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
def test_without_a_terminal_there_are_plain_lines(start: Start) -> None:
    launched = start("-n", "2", "--live", "printf '1%%\\r2%%\\n'; echo done")
    assert launched.wait() == 0
    assert launched.lines == sorted([f"[worker {n}] {text}" for n in (0, 1) for text in ("1%", "2%", "done")])
    assert launched.err.startswith("launch.py: warning: --live does nothing any more, and will be an error in the next")
    assert "kvstore-status --watch" in launched.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--show", "2"), "--show 2: there is no worker 2; the workers' ranks are 0 to 1"),
        (("--show", "0-"), "argument --show: '0-' is not a rank; valid: all, none, or ranks of workers such as 0,"),
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

    def types(self, text: str, after: str, or_else: str = "") -> None:
        """Wait until the program has said ``after``, beyond what was seen before, and type; see ``waits``."""
        self.waits(after, or_else)
        os.write(self._fd, text.encode())

    def waits(self, wanted: str, or_else: str = "") -> None:
        """Wait until the program has said something; type ``or_else`` once if it has not for a while."""
        begin, now = len(self.seen), time.monotonic()
        deadline, patient_until = now + LONG, now + 3
        while wanted not in self.seen[begin:]:
            assert time.monotonic() < deadline, self.seen
            if or_else and time.monotonic() > patient_until:
                os.write(self._fd, or_else.encode())
                or_else = ""
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
        # Python's prompt is woken by a signal that comes while it waits for a key. One that comes just before, when the
        # prompt is written already, is seen after the next line.
        user.types("n\n", after="KeyboardInterrupt--", or_else="\n")
        user.waits("went on")

        def ended() -> bool:
            # Linux merges two into one signal if launch.py has not handled the first. Some come when the job has ended.
            os.write(ours, b"\x03")
            return launched.process.poll() is not None

        until(ended, "the end of the job", step=0.05)
        assert launched.wait() == 130, user.seen
        assert termios.tcgetattr(theirs) == mode, "a prompt that was killed has left it otherwise"
        user.waits("no process of the job is left")
    assert "[worker 1]" not in user.seen, "between it and the terminal is nobody"
    assert not launched.family()


def test_input_from_a_file_is_for_the_only_worker_and_for_the_one_that_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "answers").write_text("one\ntwo\n")
    said = []
    for words, env in ((("-n", "1"), {}), (("-n", "1", "--attach", "0"), {"KVSTORE_PATIENCE_S": "7"})):
        with (tmp_path / "answers").open() as answers:
            launched = start(*words, "python", "-S", "asks.py", stdin=answers.fileno(), env=env)
            launched.wait()
            said.append(launched.out)
    assert said[0] == "[worker 0] ? ? ['one', 'two'] None\n"
    assert said[1] == "? ? ['one', 'two'] 7\n"
