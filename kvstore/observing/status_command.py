"""``kvstore-status``: shows how running jobs are. It asks their schedulers, and changes no result of theirs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, NodeLost
from kvstore.job import page_address, processes
from kvstore.job.place import ObservingPlace
from kvstore.job.settings import DASHBOARD_FD, DASHBOARD_TOKEN, LIFELINE, NO_COLOR, OBSERVE, ROLE, TRACE, TRACE_FILE
from kvstore.job.trace_target import TRACED, TraceTarget
from kvstore.observing import as_json
from kvstore.observing.advice import SHOWN_BY, Advice, advise
from kvstore.observing.choice import NoSuchJob, jobs_here, listed, place_at, place_named, roots_here, seconds
from kvstore.observing.columns import TextLine
from kvstore.observing.figures import awaited, job_rounds_per_s
from kvstore.observing.observer_session import TIMEOUT_S, ObserverSession, stacks_in
from kvstore.observing.quantities import rate
from kvstore.observing.straggler import doing_of
from kvstore.observing.text import (
    LocatedMember,
    StatusParts,
    job_lines,
    located_members,
    silent_scheduler_lines,
    stacks_lines,
    status_lines,
)
from kvstore.observing.view import JobView

SHOWN, NO_JOB, USAGE, NO_ANSWER, FAILED = 0, 1, 2, 3, 4  # exit codes
LISTED_S = 2.0  # for each of several jobs
AWAITED_S = 2.0  # a worker that is awaited for so long is asked where it is
MOST_AWAITED = 4  # so many at most are asked
LOOKS, LOOK_S = 5, 0.1  # how often a straggler is asked where it is, and the seconds between
ROLES = ("worker", "server", "standby", "aggregator")


_CODES = {"title": "1", "bad": "31", "odd": "33", "faint": "2"}  # ECMA-48 "select graphic rendition"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


_OURS = (LIFELINE, TRACE_FILE, TRACE, DASHBOARD_FD, DASHBOARD_TOKEN)


@dataclass(frozen=True)
class PreparedPage:
    """The page's socket, which listens, and its token."""

    listener: socket.socket
    token: str = field(repr=False)


@dataclass(frozen=True)
class ObserverProgram:
    """The observer that this command becomes to serve a page or to write a trace: its words and its environment.

    The observer is in ``servers``, which this package may not import. So it is executed in place of the command: Ctrl-C
    and signals reach it, and its exit code is the command's.
    """

    place: ObservingPlace
    page: PreparedPage | None = None
    trace: TraceTarget | None = None

    def variables(self, env: Mapping[str, str], place_file: str) -> dict[str, str]:
        """The environment of the observer; ``place_file`` holds ``place``."""
        ours = {setting.name for setting in _OURS}
        told = {name: text for name, text in env.items() if not name.startswith("DMLC_") and name not in ours}
        told |= {ROLE.name: "observer", OBSERVE.name: place_file}
        if self.page is not None:
            told |= {DASHBOARD_FD.name: f"{self.page.listener.fileno()}", DASHBOARD_TOKEN.name: self.page.token}
        if self.trace is not None:
            told |= {TRACE_FILE.name: str(self.trace.file), TRACE.name: str(self.trace.rounds)}
        return processes.complete(told, processes.source_root())

    def execute(self, env: Mapping[str, str]) -> NoReturn:
        memory = os.memfd_create("observe.json", 0)  # the key in it is never in a file, and goes with the process
        os.fchmod(memory, 0o600)
        os.write(memory, json.dumps(self.place.described()).encode())
        if self.page is not None:
            self.page.listener.set_inheritable(True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the observer takes it
        words = processes.words(sys.executable, "servers")
        os.execve(words[0], words, self.variables(env, f"/proc/self/fd/{memory}"))  # noqa: S606 (no shell)


class StatusScreen:
    """Writes lines one below the other; ``in_place``, on a terminal, each text in place of the one before."""

    def __init__(self, out: TextIO, in_place: bool = False, env: Mapping[str, str] = os.environ) -> None:
        self._out = out
        terminal = out.isatty() and env.get("TERM", "") != "dumb"
        self._in_place = in_place and terminal
        self._colors = terminal and not NO_COLOR.read(env)
        self._written = 0

    def __enter__(self) -> StatusScreen:
        if self._in_place:
            self._out.write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place:
            self._out.write(_LEAVE)
            self._out.flush()

    def show(self, lines: Sequence[TextLine]) -> None:
        """Write ``lines``: below what was written before, or in its place."""
        if self._in_place:
            columns, rows = shutil.get_terminal_size()
            shown = [self._painted(line, columns) + _REST_OF_LINE for line in lines[:rows]]
            self._out.write(_HOME + "\n".join(shown) + _REST)
        else:
            before = "\n" if self._written else ""
            self._out.write(before + "".join(self._painted(line) + "\n" for line in lines))
        self._written += 1
        self._out.flush()

    def _painted(self, line: TextLine, width: int | None = None) -> str:
        text = printable(line.text)[:width]
        code = _CODES.get(line.style) if self._colors else None
        return text if code is None or not text else f"\x1b[{code}m{text}\x1b[0m"


def printable(text: str) -> str:
    """Return ``text`` without what a terminal would obey: names of keys and of functions may hold anything."""
    return "".join(character if character.isprintable() else "?" for character in text)


def main(args: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(args)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return _run(given, sys.stdout)
    except NoSuchJob as error:
        print(f"kvstore-status: {error}", file=sys.stderr)
        return NO_JOB
    except ConfigError as error:
        print(f"kvstore-status: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return SHOWN
    except BrokenPipeError:  # as into head; nothing more can be written at the exit, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SHOWN


@dataclass
class StatusReport:
    """One job, shown once or again and again; ``given`` is the command's options."""

    place: ObservingPlace
    given: argparse.Namespace
    out: TextIO
    open_session: Callable[[ObservingPlace, float], ObserverSession] = ObserverSession.of
    sleep: Callable[[float], None] = time.sleep

    def show(self) -> int:
        """Show the job, until it ends if it is watched; return the exit code."""
        every_s: float | None = self.given.watch
        seen = False
        with (
            StatusScreen(self.out, in_place=every_s is not None and not self.given.json) as screen,
            self.open_session(self.place, self.given.timeout) as session,
        ):
            while True:
                try:
                    code = self._show_once(session, screen)
                    seen = True
                except KVStoreError as error:
                    if seen and isinstance(error, NodeLost):
                        break  # it has ended
                    code = self._say_why(error, screen)
                    if every_s is None or not isinstance(error, DeadlineExceeded):
                        return code
                if every_s is None:
                    return code
                self.sleep(every_s)
        if not self.given.json:
            self.out.write("the job has ended\n")
        return SHOWN

    def _show_once(self, session: ObserverSession, screen: StatusScreen) -> int:
        view = session.look()
        located = _locate_all(session, view) if self.given.stacks else []
        if self.given.json:
            self._print({"job": as_json.described_job(self.place), "status": as_json.described_view(view)}, located)
        else:
            asked = awaited(view, AWAITED_S)[:MOST_AWAITED]
            places = {member.rank: member.place for member in _locate(session, "worker", asked)}
            parts = StatusParts(self.given.all, self.given.links, self._advice(session, view), places)
            screen.show([*status_lines(self.place, view, parts), *stacks_lines(located, self.given.all)])
        return SHOWN if view.failure is None else FAILED

    def _advice(self, session: ObserverSession, view: JobView) -> list[Advice]:
        """Return what holds the job up, and of a straggler at which place in its code it is most of the time."""
        advice = []
        for one in advise(view):
            seen = self._seen(session, one.rank) if one.straggler and one.kind != "straggler_network" else ""
            known = one.text.removesuffix(f". {SHOWN_BY}")
            advice.append(dataclasses.replace(one, text=f"{known}. {seen}") if seen else one)
        return advice

    def _seen(self, session: ObserverSession, rank: int) -> str:
        places: Counter[str] = Counter()
        for look in range(LOOKS):
            if look:
                self.sleep(LOOK_S)
            answers = [one.stacks for one in _locate(session, "worker", [rank])]
            places.update(each.place for each in answers if each is not None and doing_of(each) != "waits")
        if not places:
            return ""
        place, times = places.most_common(1)[0]
        return f"{times} of {LOOKS} looks found it at {place}"

    def _say_why(self, error: KVStoreError, screen: StatusScreen) -> int:
        if self.given.json:
            self._print({"job": as_json.described_job(self.place), "status": None, "error": str(error)}, [])
        else:
            screen.show(silent_scheduler_lines(self.place, str(error)))
        return NO_ANSWER

    def _print(self, described: dict[str, Any], located: Sequence[LocatedMember]) -> None:
        if self.given.stacks:
            described["stacks"] = as_json.described_stacks(located)
        print_json(described, self.out, one_line=self.given.watch is not None)


def print_json(described: dict[str, Any], out: TextIO, one_line: bool = False) -> None:
    """Write a document of this format; several of them each in a line of its own."""
    document = as_json.finite({"version": as_json.VERSION, **described})
    out.write(json.dumps(document, indent=None if one_line else 2, allow_nan=False) + "\n")
    out.flush()


def _run(given: argparse.Namespace, out: TextIO) -> int:
    places = _places(given)
    if given.page or given.trace is not None:
        _observe(places, given, os.environ)
    if len(places) == 1:
        return StatusReport(places[0], given, out).show()
    if given.json:
        print_json({"jobs": [as_json.described_job(place) for place in places]}, out)
    else:
        StatusScreen(out).show(job_lines([(place, _words(place)) for place in places]))
    return SHOWN


def _places(given: argparse.Namespace) -> list[ObservingPlace]:
    """Return the job that is meant; without a name, all of this user's on this host."""
    if given.at is not None:
        return [place_at(given.at, given.key_file)]
    places, refused = jobs_here(roots_here())
    for line in refused:
        print(f"kvstore-status: {line}", file=sys.stderr)
    if given.job is not None:
        return [place_named(given.job, places)]
    if not places:
        raise NoSuchJob(
            "no job of this user runs on this host. It finds those whose private directory is in TMPDIR or /tmp: on "
            "the host of launch.py or, under torchrun, mpirun and srun, of rank 0. In an allocation of Slurm that is "
            "the first node: srun --overlap --jobid=NUMBER -N1 -n1 kvstore-status"
        )
    return places


def _observe(places: Sequence[ObservingPlace], given: argparse.Namespace, env: Mapping[str, str]) -> NoReturn:
    """Serve the page of a job, or write its trace, until that ends."""
    if len(places) != 1:
        raise NoSuchJob(f"which job? Give its pid or name; running: {listed(places)}")
    page = None
    if given.trace is not None:
        given.trace.prepare()
    if given.page:
        page = PreparedPage(*page_address.prepared(env))
        for line in page_address.lines(page.listener.getsockname()[1], page.token, env):
            print(f"kvstore-status: {line}", file=sys.stderr, flush=True)
    ObserverProgram(places[0], page, given.trace).execute(env)


def _words(place: ObservingPlace) -> str:
    try:
        with ObserverSession.of(place, LISTED_S) as session:
            view = session.look()
    except KVStoreError:
        return "does not answer"
    if view.failure is not None:
        return "has failed"
    missing = awaited(view, AWAITED_S)
    if missing or view.waits:
        return f"waits for worker {missing[0]}" if missing else textwrap.shorten(view.waits, 48, placeholder=" …")
    per_s = job_rounds_per_s(view)
    return "runs" if per_s is None else f"{rate(per_s)} rounds a second"


def _locate_all(session: ObserverSession, view: JobView) -> list[LocatedMember]:
    ranks = {role: [member.rank for member in view.of_role(role) if member.rank >= 0] for role in ROLES}
    return [member for role in ROLES for member in _locate(session, role, ranks[role])]


def _locate(session: ObserverSession, role: str, ranks: Sequence[int]) -> list[LocatedMember]:
    if not ranks:
        return []
    located = session.locate(role, ranks)
    return located_members(role, dict(zip(located.ranks, located.places, strict=True)), stacks_in(located))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore-status",
        description="Show how this user's running jobs are: their members, which of them waits for which, where each "
        "is. It asks the scheduler, and changes nothing.",
        epilog="exit codes: 0 shown; 1 no such job; 2 wrong usage, or a file that is not to be trusted; 3 no answer of "
        "the scheduler; 4 the job has failed",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="which: its launcher's pid, its name, its private directory, or a copy of the observe.json in there "
        "(default: the only one; of several, all in short)",
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="a row for each of many members, short waits, all events"
    )
    parser.add_argument("-l", "--links", action="store_true", help="the bytes a second over each link of a worker")
    parser.add_argument(
        "-s", "--stacks", action="store_true", help="where all members are: the stacks of their threads"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="serve the page of the job at 127.0.0.1, and print its address, until Ctrl-C or the job's end",
    )
    parser.add_argument(
        "--trace",
        type=_trace,
        metavar="FILE[:ROUNDS]",
        help="have members note some rounds, and write them to FILE, for ui.perfetto.dev or chrome://tracing. ROUNDS: "
        f"how many from now on, or the first and the last, such as 500-600 (default: {TRACED})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs; with --watch a document a line")
    parser.add_argument(
        "-w",
        "--watch",
        nargs="?",
        type=seconds,
        const=2.0,
        metavar="S",
        help="show it again every S seconds (default: 2), until the job ends",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="S",
        help=f"how long the scheduler may take to answer, in seconds (default: {TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--at", metavar="ADDRESS", help="a scheduler's address, tcp://host:port?key=..., in place of JOB"
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="a file with the observers' key, for --at")
    return parser


def _trace(text: str) -> TraceTarget:
    try:
        return TraceTarget.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
