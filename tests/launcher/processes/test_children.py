"""Processes that are started here."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_files
import pytest
from agent_doubles import Heard
from waiting import until

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit, words
from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job, OutputOptions
from launcher.job.tasks import Task
from launcher.processes.child import Child, cannot_start, suggestion
from launcher.processes.children import Children, Share, shared
from launcher.processes.guard import Guard
from launcher.processes.keeper import strays
from launcher.processes.machine import require_files
from launcher.supervision.crew import turn

# ---- child


@dataclass
class Shell:
    """A program that the shell runs."""

    text: str
    name: str = "worker 0"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": os.defpath})

    @property
    def argv(self) -> tuple[str, ...]:
        return ("sh", "-c", self.text)


@dataclass
class Program:
    argv: tuple[str, ...]
    name: str = "worker 0"
    env: dict[str, str] = field(default_factory=dict)


def run(text: str, **env: str) -> tuple[Child, Exit]:
    child = Child(Shell(text, env={"PATH": os.defpath, **env}))
    child.execute()
    return child, until(child.poll, "its end")


def close(child: Child) -> None:
    child.reap()
    os.close(child.stdout)
    os.close(child.stderr)


def test_it_has_its_own_environment_session_and_pipes() -> None:
    child, how = run("echo $W; ps -o sid= -p $$ >&2; cat", W="mine")
    assert how == Exit(code=0)
    assert os.read(child.stdout, 99) == b"mine\n"  # and nothing to read on its standard input
    assert int(os.read(child.stderr, 99)) == child.pid
    close(child)


@pytest.mark.parametrize(("text", "how"), [("exit 7", Exit(code=7)), ("kill -9 $$", Exit(signum=9))])
def test_how_it_ended(text: str, how: Exit) -> None:
    child, ended = run(text)
    assert ended == child.poll() == how
    close(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere it is reaped at once")
def test_its_number_is_nobody_elses_until_it_is_reaped() -> None:
    child, _ = run("exit 0")
    os.kill(child.pid, 0)  # a zombie still
    close(child)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_it_runs_nothing_before_it_is_told_to() -> None:
    child = Child(Shell("exit 0"))
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    child.execute()  # which is too late, and no error
    assert until(child.poll) == Exit(signum=9)
    close(child)


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    child = Child(Program((str(tmp_path / "none"),)))
    with pytest.raises(LaunchError, match=r"cannot start worker 0: there is no command .*/none") as caught:
        child.execute()
    assert caught.value.exit_code == 127
    until(child.poll)
    close(child)


def test_what_to_tell_the_user(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.touch()
    missing = FileNotFoundError()
    for argv, error, text, code in (
        (("train.py",), missing, "there is no command train.py", 127),
        (
            ("python train.py",),
            missing,
            "there is no command python train.py; quote the whole command, or none of it",
            127,
        ),
        ((str(script),), missing, f"the interpreter that {script} names does not exist", 127),
        ((str(script),), PermissionError(13, "Permission denied"), f"{script}: Permission denied", 126),
        (("pyhton", "x.py"), missing, "there is no command pyhton; did you mean: python x.py?", 127),
    ):
        told = cannot_start(Program(argv), error)
        assert (str(told), told.exit_code) == (f"cannot start worker 0: {text}", code)


def test_it_may_say_why_it_ends_before_it_does(tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom kvstore.job.exit_report import ExitReport, hand_over\n"
        "assert hand_over(ExitReport('ValueError: no'), os.environ)\ntime.sleep(600)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    program = Program((sys.executable, "-S", "-c", code), env={"PYTHONPATH": root})
    child = Child(program, report=tmp_path / "report-1")
    assert child.report() is None
    child.execute()
    assert until(child.report, "its report") == ExitReport("ValueError: no")
    assert (child.report(), child.poll()) == (None, None)
    os.kill(child.pid, signal.SIGKILL)
    until(child.poll, "its end")
    close(child)


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with a few programs, and a file that cannot be executed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, mode in (("python3.11", 0o755), ("torchrun", 0o755), ("pyhtom", 0o644)):
        (folder / name).touch(mode)
    return f"/no/such/folder:{folder}"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (("pyhton", "train.py"), "python train.py"),
        (("pyton3", "train.py"), "python3 train.py"),
        (("torchrnu", "a b.py", "--lr"), "torchrun 'a b.py' --lr"),
        (("no-such-command",), ""),
        (("/usr/bin/pyhton", "train.py"), ""),  # a path says where to look
        (("pyhton train.py", "--lr"), ""),
        (("missing.py",), ""),
    ],
)
def test_misspelt_programs(programs: str, argv: tuple[str, ...], meant: str) -> None:
    assert suggestion(argv, programs) == meant


def test_a_script_needs_python(programs: str, tmp_path: Path) -> None:
    (tmp_path / "ok.py").touch()
    assert suggestion(("ok.py", "--lr", "0.1"), programs, str(tmp_path)) == "python ok.py --lr 0.1"
    assert suggestion(("./ok.py",), programs, str(tmp_path)) == "python ./ok.py"
    assert suggestion((str(tmp_path / "ok.py"),), programs) == f"python {tmp_path}/ok.py"


def test_a_long_command_is_cut_between_words(programs: str) -> None:
    assert suggestion(("pyhton", "train.py", *["--word"] * 99), programs).endswith(" --word ...")


# ---- children


def environment(guard: Guard) -> dict[str, str]:
    name, _, mark = guard.mark.partition("=")
    return {"PATH": os.defpath, name: mark}


class Crew:
    """Children that run commands of the shell, or the words of a tuple, by index; and what they have told."""

    def __init__(self, guard: Guard, commands: dict[int, str | tuple[str, ...]], **options: Any) -> None:
        env = environment(guard)
        argvs = {i: ("sh", "-c", words) if isinstance(words, str) else words for i, words in commands.items()}
        self.watch(guard, {i: Task("worker", i, argv, env) for i, argv in argvs.items()}, **options)

    @classmethod
    def of_servers(cls, guard: Guard, number: int, **env: str) -> Crew:
        """Servers that end at once, because they are told of no job, and a worker that sleeps."""
        self = cls.__new__(cls)
        argv = words(sys.executable, "servers")
        servers = {
            i: Task("server", i, argv, environment(guard) | {"DMLC_TASK_ID": str(i), "DMLC_ROLE": "server"} | env)
            for i in range(number)
        }
        self.watch(guard, {**servers, number: Task("worker", 0, ("sleep", "600"), environment(guard))})
        return self

    def watch(self, guard: Guard, tasks: Mapping[int, Task], **options: Any) -> None:
        self.children = Children(tasks, guard, **options)
        self.sink = Heard()
        self.selector = selectors.DefaultSelector()

    def start(self) -> None:
        self.children.start(self.selector, self.sink)

    def until(self, condition: Callable[[], Any]) -> None:
        def step() -> bool:
            turn(self.selector, 0.02)
            self.children.collect()
            return bool(condition())

        until(step, step=0)

    def text(self, index: int, number: int) -> bytes:
        return b"".join(event[3] for event in self.sink.events if event[:3] == ("output", index, number))

    def why(self, index: int) -> str:
        return next(event[2].error for event in self.sink.events if event[:2] == ("reported", index))

    def close(self) -> None:
        self.children.close()
        self.children.close()
        assert not self.selector.get_map()
        self.selector.close()


@pytest.mark.parametrize(
    ("options", "foreground", "terminal", "share"),
    [
        ({"num_workers": 1}, True, True, (0, Share.ALL)),
        ({"num_workers": 1}, True, False, (0, Share.INPUT)),
        ({"num_workers": 1}, False, True, None),
        ({"num_workers": 1, "output": OutputOptions(log_dir="logs")}, True, True, (0, Share.INPUT)),
        ({"num_workers": 2}, True, True, None),
        ({"num_workers": 2, "cluster": Cluster(attach=1)}, True, False, (1, Share.ALL)),
    ],
)
def test_one_worker_alone_has_the_terminal_or_the_input_and_of_several_the_one_that_is_named(
    options: dict[str, Any], foreground: bool, terminal: bool, share: tuple[int, Share] | None
) -> None:
    job = Job(**{"num_servers": 1, "command": ("x",), **options})
    assert shared(job, foreground, terminal) == share


def test_output_comes_before_the_exit_and_ends(guard: Guard) -> None:
    crew = Crew(guard, {3: "echo out; echo err >&2; exit 7", 5: "kill -9 $$"})
    crew.start()
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert dict(crew.sink.exits) == {3: Exit(code=7), 5: Exit(signum=9)}
    assert (crew.text(3, 1), crew.text(3, 2)) == (b"out\n", b"err\n")
    events = crew.sink.events
    assert events.index(("output", 3, 1, b"out\n")) < events.index(("exited", 3, Exit(code=7)))
    assert not crew.children.leftovers()
    crew.close()
    assert {(event[1], event[2]) for event in crew.sink.events if event[0] == "output" and not event[3]} == {
        *((3, 1), (3, 2), (5, 1), (5, 2))
    }


def test_why_a_task_ends_is_reported_while_it_runs_and_before_its_exit(guard: Guard, tmp_path: Path) -> None:
    report = ExitReport("ValueError: no")
    (tmp_path / "report").write_bytes(report.dumps())
    say = f'cp {tmp_path}/report "${{KVSTORE_EXIT_REPORT#*:*:}}"'
    crew = Crew(guard, {3: f"{say}; exit 1", 5: f"{say}; sleep 600"})
    crew.start()
    crew.until(lambda: ("reported", 5, report) in crew.sink.events)
    crew.until(lambda: crew.sink.exits)
    events = [event for event in crew.sink.events if event[0] != "output" and event[1] == 3]
    assert events == [("reported", 3, report), ("exited", 3, Exit(code=1))]
    crew.close()


def test_what_is_not_wanted_stays_in_the_pipes(guard: Guard) -> None:
    crew = Crew(guard, {0: "echo one; read line", 1: "echo two"})
    crew.start()
    crew.children.reading(False)
    turn(crew.selector, 0.05)
    assert crew.sink.events == []
    crew.children.reading(True)
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert (crew.text(0, 1), crew.text(1, 1)) == (b"one\n", b"two\n")
    crew.close()


def test_a_signal_reaches_what_they_have_started_too(guard: Guard) -> None:
    crew = Crew(guard, {0: "sleep 600 & sleep 600"})
    crew.start()
    crew.children.signal(15)
    crew.until(lambda: crew.sink.exits)
    crew.until(lambda: not crew.children.leftovers())
    assert crew.sink.exits == [(0, Exit(signum=15))]
    crew.close()


def test_a_task_is_started_again_as_it_was_but_for_some_variables(guard: Guard, tmp_path: Path) -> None:
    read, write = os.pipe()
    say = f'cp {tmp_path}/report "${{KVSTORE_EXIT_REPORT#*:*:}}"'
    (tmp_path / "report").write_bytes(ExitReport("ValueError: no").dumps())
    first = f"{say}; printf half; kill -9 $$"
    command = f"echo $N >/proc/self/fd/{write}; test $N || {{ {first}; }}; exit 7"
    crew = Crew(guard, {3: command}, pass_fds={3: (write,)})
    crew.start()
    crew.until(lambda: crew.sink.exits)
    assert crew.children.can_restart(3)
    assert not crew.children.can_restart(4)
    crew.children.restart(3, {"N": "2"})
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert crew.sink.exits == [(3, Exit(signum=9)), (3, Exit(code=7))]
    assert len([event for event in crew.sink.events if event[0] == "reported"]) == 1, "each has a report of its own"
    assert os.read(read, 99) == b"\n2\n", "descriptors, too"
    assert crew.text(3, 1) == b"half"
    crew.close()
    os.close(read)
    os.close(write)


def test_one_that_cannot_be_started_again_has_ended_again(guard: Guard, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o700)
    crew = Crew(guard, {3: (str(program),)})
    crew.start()
    crew.until(lambda: crew.sink.exits)
    program.unlink()
    crew.children.restart(3, {})
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert crew.sink.exits[1][1].status
    assert [text for text in crew.sink.said if "cannot start worker 3: there is no command" in text]
    crew.close()


def test_a_signal_for_one_of_them_reaches_no_other(guard: Guard) -> None:
    crew = Crew(guard, {0: "sleep 600; true", 1: "echo ready; read line; sleep 600; true"})
    crew.start()
    assert crew.children.signal_task(0, 9)
    crew.until(lambda: crew.sink.exits)
    assert crew.sink.exits == [(0, Exit(signum=9))]
    assert not crew.children.signal_task(0, 9)
    assert not crew.children.signal_task(7, 9)
    assert crew.children.leftovers()
    crew.close()


def test_what_is_left_is_killed_at_the_close(guard: Guard) -> None:
    crew = Crew(guard, {0: "trap '' TERM; echo ready; while :; do sleep 1; done"})
    crew.start()
    crew.until(lambda: crew.text(0, 1))
    assert crew.children.leftovers()
    crew.close()
    assert not crew.children.leftovers()


def test_a_program_that_is_not_there_is_an_error_and_those_before_it_are_closed(guard: Guard) -> None:
    crew = Crew(guard, {0: "sleep 600", 1: ("/no/such",)})
    with pytest.raises(LaunchError, match="cannot start worker 1: there is no command /no/such"):
        crew.start()
    crew.close()
    assert not crew.children.leftovers()


def test_descriptors_are_passed_to_whom_they_are_for(guard: Guard) -> None:
    read, write = os.pipe()
    command = f"exec {sys.executable} -S -c 'import os; os.write({write}, b\"mine\")' 2>/dev/null"
    crew = Crew(guard, {0: command, 1: command}, pass_fds={0: (write,)})
    crew.start()
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert dict(crew.sink.exits) == {0: Exit(), 1: Exit(code=1)}
    assert os.read(read, 99) == b"mine"
    crew.close()
    os.close(read)
    os.close(write)


def fork_server(guard: Guard) -> int:
    return next(pid for pid in strays((), guard.mark) if b"servers.fork_server" in cmdline(pid))


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has gone
        return b""


def test_servers_that_one_process_makes_are_children_as_all_others(guard: Guard) -> None:
    nobody = f"ipc://{guard.directory}/nobody"
    job = {"DMLC_PS_ROOT_URI": nobody, "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "KVSTORE_REPLICAS": "1"}
    crew = Crew.of_servers(guard, 2, **job)  # they wait for a scheduler
    crew.start()
    assert crew.children.signal_task(0, signal.SIGKILL), "as soon as it exists"
    ours = "\0".join(words(sys.executable, "servers")).encode()
    crew.until(lambda: crew.sink.exits and ours in {cmdline(pid).rstrip(b"\0") for pid in strays((), guard.mark)})
    assert crew.sink.exits == [(0, Exit(signum=9))]
    assert crew.children.signal_task(1, signal.SIGKILL)
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert crew.sink.exits[1] == (1, Exit(signum=9))
    before = fork_server(guard)
    crew.children.restart(1, {"KVSTORE_START": "2", "DMLC_PS_ROOT_URI": ""})
    crew.until(lambda: len(crew.sink.exits) == 3)
    assert (crew.sink.exits[2], fork_server(guard)) == ((1, Exit(code=1)), before)
    assert "DMLC_PS_ROOT_URI" in crew.why(1)
    crew.children.signal_task(2, signal.SIGKILL)
    crew.until(lambda: len(crew.sink.exits) == 4)
    assert not crew.children.leftovers()
    crew.close()


def test_without_the_process_that_makes_them_servers_start_by_themselves(guard: Guard) -> None:
    crew = Crew.of_servers(guard, 2)
    crew.start()
    os.kill(fork_server(guard), signal.SIGKILL)
    crew.until(lambda: len(crew.sink.exits) == 2)
    assert sorted(crew.sink.exits) == [(0, Exit(code=1)), (1, Exit(code=1))]
    assert "DMLC_PS_ROOT_URI" in crew.why(1)
    crew.close()


def test_servers_that_do_not_exist_yet_end_by_the_signal_for_all(guard: Guard) -> None:
    crew = Crew.of_servers(guard, 2)
    crew.start()
    crew.children.signal(signal.SIGTERM)
    crew.until(lambda: len(crew.sink.exits) == 3)
    assert sorted(crew.sink.exits) == [(i, Exit(signum=15)) for i in range(3)]
    crew.until(lambda: not crew.children.leftovers())
    crew.close()


# ---- machine


def printed(code: str, **options: object) -> str:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_more_files_than_are_allowed_is_an_error_that_says_how_many_would_do() -> None:
    what = r"needs 201 open files, but 200 are allowed; raise that: ulimit -n 201"
    with open_files.at_most(200):
        require_files(136)
        with pytest.raises(LaunchError, match=what):
            require_files(137)


def test_a_standard_stream_that_is_closed_is_opened() -> None:
    code = (
        "import os, launcher.processes.machine as m; os.close(0); os.close(2); m.open_standard_streams();"
        "print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 2)), os.pipe()[0] > 2)"
    )
    assert printed(code) == "/dev/null /dev/null True"
