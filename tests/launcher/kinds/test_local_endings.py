"""How jobs end, with real processes: who is told, what comes out, and that nothing stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import FOREVER, HASTE
from waiting import PROMPT, until

Start = Callable[..., Any]

READY = "import os; open('ready-' + os.environ['DMLC_TASK_ID'], 'w').close()"
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; time.sleep(600)"
STUBBORN_SERVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
# A child in the group, one in a group of its own, and one in a session of its own.
FAMILY = f"""
import os, subprocess, sys, time
children = []
for move in ("pass", "os.setpgid(0, 0)", "os.setsid()"):
    code = f"import os, time; {{move}}; print(flush=True); time.sleep(600)  # grandchild"
    children.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE))
    children[-1].stdout.readline()
{READY}
time.sleep(600)
"""


def ready(tmp_path: Path, workers: int) -> Callable[[], bool]:
    return lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(workers))


def gone(launched: Any) -> Callable[[], bool]:
    return lambda: not launched.family()


def test_the_first_failure_is_the_exit_code_and_is_told(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "note"
    launched = start(
        "-n", "3", "test $DMLC_TASK_ID != 1 || exit 7; exec sleep 60", env={"NOTE_FAILURE": str(note), "PW": "hunter2"}
    )
    assert launched.wait() == 7
    assert launched.err.splitlines() == ["launch.py: worker 1 exited with code 7"]
    assert note.read_text().startswith("worker 1 exited with code 7 ipc://")
    assert len(note.read_text().splitlines()) == 1
    assert "hunter2" not in launched.out + launched.err
    assert launched.family() == {}


# What has the start 2 says so to the worker.
DIES_ONCE = """
import os, signal
if os.environ["DMLC_ROLE"] == "server":
    if "KVSTORE_START" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    open("started-" + os.environ["KVSTORE_START"], "w").close()
signal.pause()
"""


def test_a_server_that_has_a_standby_may_die(start: Start, tmp_path: Path) -> None:
    worker = "while test ! -e started-2; do sleep 0.05; done"
    launched = start("-n", "1", "-s", "1", "--replicas", "1", worker, server=DIES_ONCE)
    assert launched.wait() == 0
    assert launched.all_err == "launch.py: starting 1 worker, 1 server, 1 standby on this machine\n"
    assert launched.family() == {}


def test_a_kill_inside_a_shell_is_recognized_and_failing_to_tell_does_not_matter(start: Start) -> None:
    launched = start("-n", "1", "sh -c 'kill -9 $$'; exit $?", env={"FAIL_TO_TELL": "1"})
    assert launched.wait() == 137
    assert "could not tell the others that worker 0 exited with code 137 (128 + SIGKILL): nobody home" in launched.err
    assert "launch.py: worker 0 exited with code 137 (128 + SIGKILL)" in launched.err


SHOW_PID = """
import os, signal, sys
name = os.environ["DMLC_ROLE"] + os.environ["DMLC_TASK_ID"]
open("new-" + name, "w").write(str(os.getpid()))
os.rename("new-" + name, "pid-" + name)
signal.pause()
"""


@pytest.mark.parametrize(("file", "name"), [("pid-worker1", "worker 1"), ("pid-scheduler0", "scheduler")])
def test_a_killed_process_ends_the_job(start: Start, tmp_path: Path, file: str, name: str) -> None:
    launched = start("-n", "2", "-s", "1", "python", "-S", "-c", SHOW_PID, server=SHOW_PID, limits={})
    until(lambda: len(list(tmp_path.glob("pid-*"))) == 4)
    os.kill(int((tmp_path / file).read_text()), signal.SIGKILL)
    assert launched.wait() == 137
    assert launched.err.splitlines() == [f"launch.py: {name} was killed by SIGKILL"]
    assert launched.family() == {}


def test_survivors_have_time_to_say_why(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = (
        "import os, sys, time\n"
        "if os.environ['DMLC_TASK_ID'] == '0': sys.exit(7)\n"
        f"while not os.path.exists({str(note)!r}): time.sleep(0.01)\n"
        "sys.exit('worker 0 is dead')\n"
    )
    launched = start("-n", "2", "python", "-c", code, env={"NOTE_FAILURE": str(note)}, limits={"window": FOREVER})
    assert launched.wait() == 7
    assert launched.err.splitlines() == ["[worker 1] worker 0 is dead", "launch.py: worker 0 exited with code 7"]


def test_last_words_come_before_the_verdict(start: Start) -> None:
    launched = start("-n", "1", "python", "-c", "raise ValueError('x' * 100000)")
    assert launched.wait() == 1
    lines = launched.err.splitlines()
    assert lines[0] == "[worker 0] Traceback (most recent call last):"
    assert lines[-2] == "[worker 0] ValueError: " + "x" * 100000
    cause = f"{'ValueError: ' + 'x' * 1000:.300}"
    assert lines[-1] == f"launch.py: worker 0 exited with code 1; the last that it printed: {cause}"


def test_a_server_that_leaves_alone_is_a_failure(start: Start) -> None:
    server = "import os, signal; os.environ['DMLC_ROLE'] == 'server' or signal.pause()"
    launched = start("-n", "1", "sleep 60", server=server)
    assert launched.wait() == 1
    assert launched.err == "launch.py: server 0 exited with code 0 while workers were running\n"


def test_a_server_that_fails_when_the_workers_are_done(start: Start, tmp_path: Path) -> None:
    server = (
        "import os, sys, signal, time\n"
        "if os.environ['DMLC_ROLE'] == 'scheduler': signal.pause()\n"
        f"while not os.path.exists({str(tmp_path / 'ready-0')!r}): time.sleep(0.01)\n"
        "sys.exit(5)\n"
    )
    launched = start("-n", "1", "-s", "1", "python", "-S", "-c", READY, server=server, limits={"linger": FOREVER})
    assert launched.wait() == 5


def test_those_who_ignore_sigterm_are_killed_in_time(start: Start, tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['DMLC_TASK_ID'] == '0':\n"
        "    while not os.path.exists('ready-1'): time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        f"{STUBBORN}"
    )
    launched = start("-n", "2", "-s", "1", "python", "-S", "-c", code, server=STUBBORN_SERVER, limits={})
    until(lambda: (tmp_path / "ready-1").exists())
    assert launched.wait(PROMPT) == 7
    assert launched.family() == {}


def test_stubborn_servers_do_not_hold_up_a_finished_job(start: Start, tmp_path: Path) -> None:
    launched = start("-n", "1", "python", "-S", "-c", READY, server=STUBBORN_SERVER, limits={})
    until(ready(tmp_path, 1))
    assert launched.wait(PROMPT) == 0
    assert launched.family() == {}


def test_a_signal_ends_everything(start: Start, tmp_path: Path, short: Path) -> None:
    """SIGTERM and SIGINT are in tests below."""
    launched = start("-n", "2", "-s", "1", "python", "-S", "-c", FAMILY)
    until(ready(tmp_path, 2))
    launched.kill(signal.SIGHUP)
    assert launched.wait(PROMPT) == 129
    assert launched.family() == {}
    assert list(short.iterdir()) == []


def test_a_checkpoint_can_be_written_on_sigterm(start: Start, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.5); open('saved', 'w'); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, save)\n{READY}\nsignal.pause()\n"
    )
    # Behind a shell, which dies at once: what it had started has its grace nevertheless.
    (tmp_path / "train.py").write_text(code)
    launched = start("-n", "1", "python train.py; true", limits={**HASTE, "grace": FOREVER})
    until(ready(tmp_path, 1))
    launched.kill(signal.SIGTERM)
    assert launched.wait() == 143
    assert (tmp_path / "saved").exists()


def test_a_second_interrupt_does_not_wait_and_a_third_takes_nothing_back(start: Start, tmp_path: Path) -> None:
    third = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    marks = "signal.signal(signal.SIGTERM, lambda *_: open('asked', 'w').close())"
    code = f"import signal, time\n{marks}\n{READY}\nwhile True: time.sleep(600)\n"
    launched = start("-n", "1", "python", "-S", "-c", code, limits={"grace": FOREVER}, prelude=third)
    until(ready(tmp_path, 1))
    launched.kill(signal.SIGINT)
    until(lambda: (tmp_path / "asked").exists())
    launched.kill(signal.SIGINT)
    assert launched.wait() == 130
    assert launched.err == "launch.py: Ctrl-C: ended 1 worker, 1 server, the scheduler; no process of the job is left\n"
    assert launched.family() == {}


def test_nohup(start: Start, tmp_path: Path, short: Path) -> None:
    """With `&` in a script: the shell then starts it with SIGINT ignored, too."""
    ignoring = "import signal\nfor each in (signal.SIGHUP, signal.SIGINT): signal.signal(each, signal.SIG_IGN)"
    launched = start("-n", "1", "python", "-S", "-c", f"{READY}; import time; time.sleep(600)", prelude=ignoring)
    until(ready(tmp_path, 1))
    (directory,) = (path for path in short.glob("kvstore-*") if path.name.split("-")[2].isdigit())
    assert directory.stat().st_mode & 0o777 == 0o700
    # Two signals that are pending at once are handled in an order of the kernel's. So look, too.
    (ignored,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{launched.process.pid}/status").read_text())
    assert int(ignored, 16) & 1 << signal.SIGINT - 1
    launched.kill(signal.SIGHUP)
    launched.kill(signal.SIGINT)
    launched.kill(signal.SIGTERM)
    assert launched.wait() == 143
    assert list(short.iterdir()) == []


def test_killing_launch_leaves_nothing(start: Start, tmp_path: Path, short: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    launched = start("-n", "2", "python -S family.py; true", server=STUBBORN_SERVER)
    until(ready(tmp_path, 2))
    assert sum("grandchild" in line for line in launched.family().values()) == 6
    launched.kill(signal.SIGKILL)
    launched.wait()
    until(gone(launched))
    until(lambda: not list(short.iterdir()))


def test_killing_launch_with_stopped_children(start: Start, tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    launched = start("-n", "1", "python", "-S", "family.py")
    until(ready(tmp_path, 1))
    for pid, line in launched.family().items():
        if "grandchild" in line:
            os.kill(pid, signal.SIGSTOP)
    launched.kill(signal.SIGKILL)
    launched.wait()
    until(gone(launched))


def test_a_keeper_that_dies_is_replaced_and_told_everything(start: Start, tmp_path: Path) -> None:
    launched = start("-n", "1", "python", "-S", "-c", FAMILY)
    until(ready(tmp_path, 1))
    first = launched.pid_of("keeper.py")
    os.kill(first, signal.SIGTERM)  # ignored
    os.kill(first, signal.SIGKILL)
    until(lambda: "the keeper process died; started another" in launched.err)
    until(lambda: any("keeper.py" in line for line in launched.family().values()))
    assert launched.pid_of("keeper.py") != first
    launched.kill(signal.SIGKILL)
    launched.wait()
    until(gone(launched))


def test_a_job_goes_on_without_a_keeper_that_will_not_live(start: Start, tmp_path: Path) -> None:
    launched = start("-n", "1", "python", "-S", "-c", f"{READY}; import time; time.sleep(600)")
    until(ready(tmp_path, 1))
    for count in range(1, 5):
        keepers = until(lambda: [pid for pid, line in launched.family().items() if "keeper.py" in line])
        os.kill(keepers[0], signal.SIGKILL)
        until(lambda count=count: launched.err.count("the keeper process died") == count)
    assert "if launch.py is killed, processes may stay behind" in launched.err
    launched.kill(signal.SIGTERM)
    assert launched.wait() == 143
    assert launched.family() == {}


def test_the_dead_are_swept_when_the_next_job_starts(start: Start, short: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = short / f"kvstore-{os.getuid()}-{dead.pid}-left"
    left.mkdir()
    assert start("-n", "1", "true").wait() == 0
    assert list(short.iterdir()) == []
