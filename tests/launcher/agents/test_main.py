from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launched import ROOT
from programs_of_ours import run
from waiting import LONG

import kvstore
from kvstore import wire
from kvstore.job.exit_report import ExitReport
from launcher.agents import main as module
from launcher.agents.links import protocol as p
from launcher.agents.links.link import Unframer
from launcher.agents.links.protocol import Hello
from launcher.agents.main import Agent
from launcher.job.command import agent_argv
from launcher.supervision.crew import SignalQueue

Reaction = Callable[["LaunchPy", wire.Message], None]


class LaunchPy:
    """launch.py's end of a link: says one thing at once, and what a test wants to each message that comes."""

    pending = unsent = 0

    def __init__(self, *first: wire.Message, reaction: Reaction = lambda *_: None) -> None:
        self._first, self._reaction = first, reaction
        self.heard: list[wire.Message] = []
        self.closed = 0

    def open(self, selector: Any, on_message: Callable[[wire.Message], None], on_end: Callable[[str], None]) -> None:
        self.says, self.hangs_up = on_message, on_end

    def send(self, message: wire.Message) -> None:
        self.heard.append(message)
        if isinstance(message, p.Hello):
            for word in self._first:
                self.says(word)
        self._reaction(self, message)

    def reading(self, wanted: bool) -> None:
        """It takes everything."""

    def poll(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: type[wire.Message]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


@pytest.fixture(autouse=True)
def short_names(tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent makes its directory in ``short``, and pytest has made its own by then."""
    monkeypatch.setattr("tempfile.tempdir", str(short))


@pytest.fixture(autouse=True)
def working_directory() -> Iterator[None]:
    before = Path.cwd()
    yield
    os.chdir(before)


def serve(link: LaunchPy, rank: int = -1) -> int:
    with SignalQueue() as signals:
        return Agent(link, signals, rank).run()


def survey(directory: Path, *command: str, create: bool = False, toward: str = "127.0.0.1") -> p.Survey:
    return p.Survey("", toward, os.fsencode(directory), create, [word.encode() for word in command])


def start(directory: Path, *words: str, limit_s: float = LONG, variables: dict[str, str] | None = None) -> p.StartTasks:
    task = [4, "worker", 1, 1, p.pack({"DMLC_ROLE": "worker", **(variables or {})})]
    return p.StartTasks(
        "kvstore-0-1-x", os.fsencode(directory), [word.encode() for word in words], [], limit_s, 0, [task]
    )


def printed(link: LaunchPy) -> bytes:
    return b"".join(bytes(part) for output in link.of(p.Output) for part in output.buffers if output.number == 1)


def when_empty(link: LaunchPy, message: wire.Message) -> None:
    if isinstance(message, p.Empty):
        link.says(p.Bye())


def test_it_says_what_it_is_and_goes_when_it_is_told_to() -> None:
    link = LaunchPy(p.Ping(), p.Bye())
    assert serve(link, rank=3) == 0
    hello, pong, bye = link.heard
    assert isinstance(hello, p.Hello)
    assert (hello.version, hello.rank) == (kvstore.__version__, 3)
    assert (pong, bye, link.closed) == (p.Pong(), p.Bye(), 1)


def test_it_listens_where_others_will_look_for_it(tmp_path: Path) -> None:
    link = LaunchPy(survey(tmp_path, "python", "-V"), p.Bye())
    serve(link)
    (surveyed,) = link.of(p.Surveyed)
    assert (surveyed.address, surveyed.problem) == ("127.0.0.1", "")
    assert surveyed.port > 0


@pytest.mark.parametrize(
    ("directory", "command", "create", "problem"),
    [
        ("none", (), False, "there is no directory .*/none; --sync-dst-dir copies the working directory"),
        ("file", (), True, "cannot make the directory .*/file: "),
        (".", ("no-such-program",), False, "cannot start the command: there is no command no-such-program"),
        (".", ("./file",), False, r"\./file: is not executable"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, directory: str, command: tuple[str, ...], create: bool, problem: str
) -> None:
    (tmp_path / "file").touch()
    link = LaunchPy(survey(tmp_path / directory, *command, create=create), p.Bye())
    serve(link)
    (surveyed,) = link.of(p.Surveyed)
    assert surveyed.port == 0
    assert re.search(problem, surveyed.problem), surveyed.problem


def test_a_directory_is_made_where_the_working_directory_will_be_copied_to(tmp_path: Path) -> None:
    link = LaunchPy(survey(tmp_path / "a" / "b", create=True), p.Bye())
    serve(link)
    assert link.of(p.Surveyed)[0].problem == ""
    assert (tmp_path / "a" / "b").is_dir()


def test_it_runs_its_tasks_and_relays_what_becomes_of_them(tmp_path: Path, short: Path) -> None:
    link = LaunchPy(start(tmp_path, "echo $W in $PWD; exit 7", variables={"W": "w"}), reaction=when_empty)
    assert serve(link) == 0
    kinds = [type(message) for message in link.heard]
    assert kinds.index(p.Started) < kinds.index(p.Exited) < kinds.index(p.Empty)
    assert printed(link) == b"w in %s\n" % os.fsencode(tmp_path)
    assert link.of(p.Exited) == [p.Exited(4, 7, 0)]
    assert link.heard[-1] == p.Bye()
    assert list(short.iterdir()) == []


def test_a_task_is_started_again_when_launch_py_says_so(tmp_path: Path) -> None:
    def again(link: LaunchPy, message: wire.Message) -> None:
        if isinstance(message, p.Empty) and len(link.of(p.Exited)) == 1:
            for index in (3, 4):  # it has no task 3
                link.says(p.StartAgain(index, p.pack({"W": "again"})))
        else:
            when_empty(link, message)

    link = LaunchPy(start(tmp_path, "echo $W; exit 7", variables={"W": "w"}), reaction=again)
    assert serve(link) == 0
    assert printed(link) == b"w\nagain\n"
    assert link.of(p.Exited) == [p.Exited(4, 7, 0)] * 2


def test_it_passes_on_why_a_task_ends(tmp_path: Path) -> None:
    report = ExitReport("ValueError: no", "train.py:3", "Traceback\n")
    (tmp_path / "report").write_bytes(report.dumps())
    command = 'cp report "${KVSTORE_EXIT_REPORT#*:*:}"; exit 1'
    link = LaunchPy(start(tmp_path, command), reaction=when_empty)
    assert serve(link) == 0
    assert link.of(p.Reported) == [p.Reported(4, **asdict(report))]
    kinds = [type(message) for message in link.heard]
    assert kinds.index(p.Reported) < kinds.index(p.Exited)


def test_python_is_the_interpreter_that_runs_the_agent(tmp_path: Path) -> None:
    link = LaunchPy(start(tmp_path, "python", "-c", "import sys; print(sys.executable)"), reaction=when_empty)
    serve(link)
    assert printed(link) == f"{sys.executable}\n".encode()


def test_tasks_that_cannot_be_started_are_refused(tmp_path: Path, short: Path) -> None:
    def leave(link: LaunchPy, message: wire.Message) -> None:
        if isinstance(message, p.Refused):
            link.says(p.Bye())

    link = LaunchPy(start(tmp_path, "/no/such"), reaction=leave)
    assert serve(link) == 0
    (refused,) = link.of(p.Refused)
    assert (refused.text, refused.code) == ("cannot start worker 1: there is no command /no/such", 127)
    assert link.of(p.Started) == []
    assert list(short.iterdir()) == []


@pytest.mark.parametrize("message", [p.Signal(signal.SIGTERM), p.SignalTask(4, signal.SIGTERM)])
def test_a_signal_from_launch_py_reaches_its_tasks(tmp_path: Path, message: wire.Message) -> None:
    said = message

    def signal_it(link: LaunchPy, message: wire.Message) -> None:
        if isinstance(message, p.Started):
            link.says(said)
        when_empty(link, message)

    link = LaunchPy(start(tmp_path, "sleep", "600"), reaction=signal_it)
    assert serve(link) == 0
    assert link.of(p.Exited) == [p.Exited(4, 0, 15)]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda link: link.hangs_up("it was closed"), "the link to launch.py ended: it was closed"),
        (lambda _: os.kill(os.getpid(), signal.SIGTERM), "it was sent SIGTERM"),
    ],
)
def test_when_it_ends_by_itself_its_tasks_end_and_it_says_why(
    tmp_path: Path, short: Path, end: Callable[[LaunchPy], None], why: str
) -> None:
    link = LaunchPy(
        start(tmp_path, "sleep", "600"),
        reaction=lambda link, message: end(link) if isinstance(message, p.Started) else None,
    )
    assert serve(link) == 1
    assert link.heard[-1] == p.Bye(why)
    assert link.of(p.Exited) == []  # they have not failed: the agent has ended them
    assert list(short.iterdir()) == []


def test_it_does_not_wait_for_ever_for_a_launch_py_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    link = LaunchPy()
    assert serve(link) == 1
    assert link.heard[-1] == p.Bye("launch.py had been silent for 0 s, as if stopped, or cut off")


def test_others_are_probed(tmp_path: Path) -> None:
    link = LaunchPy(p.Probe([["node7", "127.0.0.1", 1], ["node8", "no address", 1]]), p.Bye())
    serve(link)
    (probed,) = link.of(p.Probed)
    assert [name for name, _ in probed.failures] == ["node8", "node7"]


def test_an_agent_over_pipes_ends_with_its_link(tmp_path: Path) -> None:
    code, out, err = run(agent_argv(sys.executable, str(ROOT)), tmp_path)
    assert (code, err) == (1, "")
    hello, *rest = [wire.decode(frames) for frames in Unframer().feed(out)]
    assert isinstance(hello, Hello)
    assert (hello.version, hello.rank, rest) == (kvstore.__version__, -1, [])
