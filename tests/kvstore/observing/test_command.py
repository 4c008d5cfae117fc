"""``kvstore-status``, and its observer's links."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from observed_job import ObservedJob
from played import Played
from viewed_job import PLACE, server, view_of, worker

from kvstore import wire
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, NodeLost, UsageError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, pair, with_key
from kvstore.job.directory import make_private
from kvstore.job.place import FILE
from kvstore.job.trace_target import TraceTarget
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.choice import NoSuchJob, jobs_here, place_at, place_named
from kvstore.observing.columns import TextLine
from kvstore.observing.observer_session import GONE_S, ObserverSession, stacks_in
from kvstore.observing.status_command import (
    FAILED,
    NO_ANSWER,
    NO_JOB,
    SHOWN,
    USAGE,
    ObserverProgram,
    PreparedPage,
    StatusReport,
    StatusScreen,
    main,
    printable,
)
from kvstore.observing.view import JobView
from kvstore.wire.guests import MOST_EVENTS, MOST_LOCATED

# ---- ``kvstore-status``: its exit codes and what it prints, of played sessions and of jobs in this process


OPTIONS = {"all": False, "links": False, "stacks": False, "json": False, "watch": None, "timeout": 5.0}


class PlayedSession:
    """A session that looks at views, or fails, in turn; the last one stays."""

    def __init__(self, *looks: JobView | KVStoreError, frame: str = "a.py:1 in f") -> None:
        self.looks = list(looks)
        self.frame = frame
        self.located: list[tuple[str, list[int]]] = []

    def look(self) -> JobView:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, KVStoreError):
            raise look
        return look

    def locate(self, role: str, ranks: list[int]) -> wire.Located:
        self.located.append((role, ranks))
        stacks = [
            wire.Stacks(wire.Node(role, rank, 1), 1, "a.py:1 in f", "", [["MainThread", [self.frame]]])
            for rank in ranks
        ]
        buffers = [bytes(wire.encode(one)[0]) for one in stacks]
        return wire.Located(0, ranks, ["is at a.py:1 in f" for _ in ranks], buffers)

    def __enter__(self) -> PlayedSession:
        return self

    def __exit__(self, *_: object) -> None: ...


def run(*looks: JobView | KVStoreError, frame: str = "a.py:1 in f", **options: Any) -> tuple[int, str, PlayedSession]:
    session, out = PlayedSession(*looks, frame=frame), io.StringIO()
    given = argparse.Namespace(**OPTIONS | options)
    opened: Callable[..., Any] = lambda _place, _timeout: session  # noqa: E731
    code = StatusReport(PLACE, given, out, opened, sleep=lambda _: None).show()
    return code, out.getvalue(), session


WAITS = {
    "waiting": [0],
    "missing": [1],
    "oldest_us": 12_000_000,
    "why": "waits for worker 1, whose push 7 of 'w' is missing",
}
HANGING = view_of([worker(0), worker(1), server(0, **WAITS)])
GONE = NodeLost("nobody listens at x: the job has not begun, or has ended")
STOPPED = DeadlineExceeded("the scheduler at x has not answered within 5 s", ("the scheduler",))


def test_who_is_awaited_is_asked_where_it_is() -> None:
    code, text, session = run(HANGING)
    assert code == SHOWN
    assert session.located == [("worker", [1])]
    assert "server 0: worker 0 has waited 12 s for worker 1, whose push 7 of 'w' is missing" in text
    assert "  worker 1 is at a.py:1 in f\n" in text


def test_nobody_is_asked_in_a_job_that_goes_on() -> None:
    assert run(view_of([worker(0), worker(1), server(0)]))[2].located == []


def test_a_straggler_is_asked_several_times_where_it_is() -> None:
    seconds = 10_000_000
    waves = {"waves": 100, "came_last": [0, 100], "alone_us": [0, 6 * seconds // 10]}
    before = {"waves": 0, "came_last": [0, 0], "alone_us": [0, 0], "rounds": 0}
    workers = [
        worker(rank, before={"blocked_us": 0, "rounds": 0}, rounds=100, blocked_us=blocked)
        for rank, blocked in enumerate((7 * seconds // 10, 0))
    ]
    view = view_of([*workers, server(0, before=before, rounds=100, **waves)])
    _, text, session = run(view)
    assert session.located == [("worker", [1])] * 5
    assert "5 of 5 looks found it at a.py:1 in f" in " ".join(text.split())
    _, text, _ = run(view, frame="kvstore/client/dist.py:184 in pull")
    assert "looks found it" not in text, "where it waits as all do is no news"


def test_stacks_are_those_of_all_members() -> None:
    code, text, session = run(view_of([worker(0), worker(1), server(0)]), stacks=True)
    assert session.located == [("worker", [0, 1]), ("server", [0])]
    assert "workers 0, 1: each is at a.py:1 in f\n  MainThread\n    a.py:1 in f\n" in text
    assert code == SHOWN


def test_a_job_that_has_failed_has_an_exit_code_of_its_own() -> None:
    code, text, _ = run(view_of([], failure="worker 1 was killed by SIGKILL"))
    assert (code, "the job has failed: worker 1 was killed by SIGKILL" in text) == (FAILED, True)


@pytest.mark.parametrize("error", [GONE, STOPPED], ids=["gone", "stopped"])
def test_a_scheduler_that_does_not_answer_has_one_too(error: KVStoreError) -> None:
    code, text, _ = run(error)
    assert (code, str(error) in text, PLACE.command in text) == (NO_ANSWER, True, True)
    code, text, _ = run(error, json=True)
    assert (code, json.loads(text)["error"], json.loads(text)["status"]) == (NO_ANSWER, str(error), None)


def test_json_is_one_document() -> None:
    _, text, _ = run(HANGING, json=True, stacks=True)
    document = json.loads(text)
    assert document.keys() == {"version", "job", "status", "stacks"}
    assert (document["version"], document["status"]["waits"][0]["missing"]) == (1, [1])
    assert document["stacks"][0]["threads"] == [{"name": "MainThread", "frames": ["a.py:1 in f"]}]


def test_a_job_is_watched_until_it_ends_whatever_pauses_it_makes() -> None:
    view = view_of([worker(0)])
    code, text, _ = run(view, STOPPED, view, GONE, watch=1.0)
    assert (code, text.count("workers\n"), text.count("not answered")) == (SHOWN, 2, 1)
    assert text.endswith("the job has ended\n")
    code, text, _ = run(view, view, GONE, watch=1.0, json=True)
    assert (code, len(text.splitlines()), json.loads(text.splitlines()[1])["version"]) == (SHOWN, 2, 1)


def test_a_job_that_is_not_there_is_not_watched() -> None:
    assert run(GONE, watch=1.0)[0] == NO_ANSWER


# ---- the command


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvstore.observing.status_command.roots_here", lambda: [tmp_path])
    return tmp_path


def test_without_a_job_that_is_said(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_JOB
    assert "no job of this user runs on this host" in capsys.readouterr().err
    assert main(["17"]) == NO_JOB
    assert main(["--at", "http://x"]) == USAGE
    with pytest.raises(SystemExit) as ended:
        main(["--watch", "0"])
    assert ended.value.code == USAGE


def test_a_job_that_has_ended_does_not_answer(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = dataclasses.replace(PLACE, address=f"ipc://{jobs}/scheduler", pid=os.getpid())
    place.write(make_private(jobs) / FILE)
    assert main(["--timeout", "0.1"]) == NO_ANSWER
    assert "nobody listens" in capsys.readouterr().out


def test_the_only_job_is_shown_and_of_several_all_in_short(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.chmod(0o700)
    with ObservedJob(1, 1, directory=jobs) as job:
        place = dataclasses.replace(PLACE, address=job.config("observer").root, pid=os.getpid())
        place.write(make_private(jobs) / FILE)
        assert main([]) == SHOWN
        shown = capsys.readouterr().out
        assert "1 of 1 worker, 1 of 1 server" in shown
        assert "all 2 members have joined" in shown
        dataclasses.replace(place, job="k").write(make_private(jobs) / FILE)
        assert main([]) == SHOWN
        listed = capsys.readouterr().out
        assert (listed.count("python train.py"), "does not answer" in listed) == (2, False)
        assert main(["--json"]) == SHOWN
        assert [one["name"] for one in json.loads(capsys.readouterr().out)["jobs"]] == ["j", "k"]
        assert main(["k", "--json"]) == SHOWN
        assert json.loads(capsys.readouterr().out)["job"]["name"] == "k"


LINES = [TextLine("head", "title"), TextLine("all is well"), TextLine("", "bad")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_there_is_no_terminal_lines_are_plain_and_one_below_the_other() -> None:
    out = io.StringIO()
    with StatusScreen(out, in_place=True, env={}) as screen:
        screen.show(LINES)
        screen.show([TextLine("again")])
    assert out.getvalue() == "head\nall is well\n\n\nagain\n"


def test_colors_are_for_terminals_that_want_them() -> None:
    texts = []
    for env in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
        out = Terminal()
        StatusScreen(out, env=env).show(LINES[:1])
        texts.append(out.getvalue())
    assert texts == ["\x1b[1mhead\x1b[0m\n", "head\n", "head\n"]


def test_what_is_watched_is_rewritten_in_place_and_the_terminal_is_left_as_it_was() -> None:
    out = Terminal()
    with StatusScreen(out, in_place=True, env={"NO_COLOR": "1"}) as screen:
        screen.show(LINES[:1])
        screen.show([TextLine("x" * 1000)] * 500)
    first, _, second = out.getvalue().partition("\x1b[H")[2].partition("\x1b[H")
    assert first == "head\x1b[K\x1b[J"
    assert len(second.split("\n")) < 500, "what does not fit is cut"
    assert max(len(line.partition("\x1b")[0]) for line in second.split("\n")) < 1000
    assert out.getvalue().startswith("\x1b[?1049h")
    assert out.getvalue().endswith("\x1b[?1049l")


def test_what_a_terminal_would_obey_is_not_written() -> None:
    assert printable("key '\x1b[2J\x07\u202e' · ok") == "key '?[2J??' · ok"


TOKEN = "t" * 43
FOREIGN = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "x",
    "KVSTORE_TRACE": "1-3",
    "KVSTORE_TRACE_FILE": "/elsewhere",
    "KVSTORE_LIFELINE": "1",
    "KVSTORE_TIMEOUT_S": "7",
}


def test_a_page_is_told_its_socket_and_token_and_nothing_of_a_job_around_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = ObserverProgram(PLACE, PreparedPage(listener, TOKEN)).variables(FOREIGN, "/proc/self/fd/9")
        ours = {name: text for name, text in told.items() if name.startswith(("DMLC_", "KVSTORE_"))}
        assert ours == {
            "DMLC_ROLE": "observer",
            "KVSTORE_OBSERVE": "/proc/self/fd/9",
            "KVSTORE_DASHBOARD_FD": f"{listener.fileno()}",
            "KVSTORE_DASHBOARD_TOKEN": TOKEN,
            "KVSTORE_TIMEOUT_S": "7",
        }


def test_a_trace_is_told_its_file_and_rounds() -> None:
    told = ObserverProgram(PLACE, trace=TraceTarget(Path("/t/a.json"), RoundWindow(5, 9))).variables({}, "/p")
    assert (told["KVSTORE_TRACE_FILE"], told["KVSTORE_TRACE"]) == ("/t/a.json", "5-9")
    assert "KVSTORE_DASHBOARD_FD" not in told


def test_the_token_is_not_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert TOKEN not in repr(PreparedPage(listener, TOKEN))


OTHER = dataclasses.replace(PLACE, job="k", pid=43)


@pytest.mark.parametrize("wanted", ["43", "k"])
def test_a_job_is_named_by_its_pid_or_its_name(wanted: str) -> None:
    assert place_named(wanted, [PLACE, OTHER]) == OTHER


def test_the_running_jobs_are_listed_if_none_is_meant() -> None:
    with pytest.raises(NoSuchJob, match=r"no job here is '7'; running: 42 \(j\), 43 \(k\)"):
        place_named("7", [PLACE, OTHER])
    with pytest.raises(NoSuchJob, match="more than one job here is '43'"):
        place_named("43", [OTHER, OTHER])


def test_a_directory_or_a_copy_of_its_file_will_do(tmp_path: Path) -> None:
    PLACE.write(tmp_path / FILE)
    assert place_named(str(tmp_path), []) == PLACE
    assert place_named(str(tmp_path / FILE), []) == PLACE
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        place_named(str(tmp_path), [])


def test_this_users_jobs_are_found_where_temporary_files_are(tmp_path: Path) -> None:
    for place in (PLACE, dataclasses.replace(OTHER, started=5.0)):
        place.write(make_private(tmp_path) / FILE)
    untrusted = make_private(tmp_path)
    PLACE.write(untrusted / FILE)
    untrusted.chmod(0o750)
    places, refused = jobs_here([tmp_path])
    assert [place.pid for place in places] == [43, 42], "the latest first"
    assert [line.partition(":")[0] for line in refused] == [str(untrusted)]


def test_a_job_elsewhere_takes_an_address_and_a_key(tmp_path: Path) -> None:
    root, own = pair(), pair()
    file = tmp_path / "key"
    file.write_text(f"{own[1]}\n")
    file.chmod(0o600)
    address = with_key("tcp://10.0.0.1:5555", root[0])
    assert place_at(address, file).key == own[1]
    assert place_at("tcp://10.0.0.1:5555", None).key == ""
    with pytest.raises(ConfigError, match="both are needed"):
        place_at(address, None)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        place_at(address, file)


def test_a_file_without_a_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    address = with_key("tcp://10.0.0.1:5555", pair()[0])
    with pytest.raises(ConfigError, match="cannot be read"):
        place_at(address, file)
    for content in (b"hunter2", b"\xff\xfe"):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match="40 characters") as refused:
            place_at(address, file)
        assert "hunter2" not in str(refused.value)


# ---- an observer of real jobs over each kind of link, and of schedulers that do not answer, with a clock that moves


KINDS = ["unix", "tcp", "zeromq", "curve"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_seen_and_does_not_wait_for_who_looks(kind: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    directory = tmp_path if kind == "unix" else None
    with ObservedJob(1, 1, kind, directory=directory) as job, job.observe() as observer:
        view, later = observer.look(), observer.look()
    assert {(member.name, member.state) for member in view.members} == {("worker 0", "ready"), ("server 0", "ready")}
    assert [event.text for event in later.events] == ["all 2 members have joined"]
    assert later.at >= view.at >= view.started
    assert job.exit_codes == {"scheduler": 0, "server 0": 0}


def test_another_key_or_another_members_key_sees_nothing() -> None:
    with ObservedJob(1, 1, "curve") as job:
        config = job.config("observer")
        assert config.keys is not None
        stranger = dataclasses.replace(config, keys=CurveKeys.of_observer(pair()[1], config.keys.root))
        with job.observe(0.3, stranger) as observer, pytest.raises(DeadlineExceeded, match="key is another job's"):
            observer.look()
        member = dataclasses.replace(config, keys=job.config("worker", 0).keys)
        with job.observe(config=member) as observer, pytest.raises(UsageError, match="another key than observers have"):
            observer.look()
        with job.observe() as observer:
            assert len(observer.look().members) == 2


# ---- without a job

ROOT = "tcp://10.0.0.1:5555"


class PlayedScheduler(Played):
    """One that tells of these events, or, without any, says nothing."""

    def __init__(self, events: Sequence[str] | None = None) -> None:
        super().__init__(self._answer)
        self.first = 1
        self.events = events

    def _answer(self, _peer: bytes, request: Any) -> list[wire.Message]:
        if self.events is None:
            return []
        if isinstance(request, wire.Observe):
            skipped = max(0, request.after + 1 - self.first) if request.after < self.first + len(self.events) else 0
            lines = [[0.0, line] for line in self.events[skipped:]]
            first = self.first + skipped
            return [wire.Observed(request.seq, 1.0, 0.0, [1, 1, 0, 0], [], None, "", first, lines, [])]
        if isinstance(request, wire.Locate):
            places = [f"is at train.py:{rank}" for rank in request.ranks]
            return [wire.Located(request.seq, request.ranks, places)]
        return []

    def recv(self, timeout: float) -> Any:
        return super().recv(timeout) or None

    def interrupt(self) -> None:
        self.inbox.append(())  # type: ignore[arg-type]  # what ends one wait


def session_of(transport: Any, listens: bool | None = True) -> ObserverSession:
    config = dataclasses.replace(Config(), role="observer", root=ROOT)
    return ObserverSession(config, 5.0, lambda: transport, lambda: transport.now, lambda _: listens)


def texts(session: ObserverSession) -> list[str]:
    return [event.text for event in session.look().events]


def test_a_scheduler_that_is_stopped_is_waited_for_until_the_deadline() -> None:
    transport = PlayedScheduler()
    with pytest.raises(DeadlineExceeded, match="not answered within 5 s: it is stopped") as late:
        session_of(transport).look()
    assert late.value.silent == ("the scheduler",)
    assert 5.0 <= transport.now < 7.0


def test_where_nobody_listens_the_job_has_ended() -> None:
    transport = PlayedScheduler()
    with pytest.raises(NodeLost, match=r"nobody listens at tcp://10\.0\.0\.1:5555"):
        session_of(transport, listens=False).look()
    assert GONE_S <= transport.now < 5.0


def test_events_are_asked_for_once_and_kept() -> None:
    transport = PlayedScheduler(["a", "b"])
    session = session_of(transport)
    assert texts(session) == ["a", "b"]
    transport.events = ["a", "b", "c"]
    assert texts(session) == ["a", "b", "c"]
    assert [asked.after for _, asked in transport.asked if isinstance(asked, wire.Observe)] == [0, 2]


def test_a_pause_ends_by_itself_by_word_of_a_death_and_by_who_ends_it() -> None:
    transport = PlayedScheduler(["a"])
    session = session_of(transport)
    session.wait(3.0)
    assert transport.now == 3.0
    transport.arrive(ROOT.encode(), wire.Ack(0))
    session.wait(3.0)
    session.wake()
    session.wait(3.0)
    assert transport.now == 3.0
    transport.arrive(ROOT.encode(), wire.Ack(0))  # once more, while it asks
    assert texts(session) == ["a"]


def test_a_scheduler_that_was_started_again_tells_its_events_anew() -> None:
    transport = PlayedScheduler(["a", "b", "c"])
    session = session_of(transport)
    assert len(texts(session)) == 3
    transport.events = ["A"]
    assert texts(session) == ["A"]


def test_only_the_latest_events_are_kept() -> None:
    transport = PlayedScheduler([str(number) for number in range(MOST_EVENTS)])
    session = session_of(transport)
    session.look()
    transport.first, transport.events = 1 + MOST_EVENTS, ["new"]
    assert texts(session) == [*map(str, range(1, MOST_EVENTS)), "new"]


def test_many_members_are_located_in_several_questions() -> None:
    transport = PlayedScheduler([])
    ranks = range(MOST_LOCATED + 3)
    located = session_of(transport).locate("worker", [*ranks, 0])
    assert (located.ranks, located.places[1]) == (list(ranks), "is at train.py:1")
    assert [len(asked.ranks) for _, asked in transport.asked if isinstance(asked, wire.Locate)] == [MOST_LOCATED, 3]


def test_stacks_are_read_and_nothing_else_is() -> None:
    stacks = wire.Stacks(
        wire.Node("worker", 0, 1), 1, "train.py:3 in main", "sleeps", [["MainThread", ["train.py:3 in main"]]]
    )
    located = wire.Located(0, [0], ["is at train.py:3 in main"], [bytes(wire.encode(stacks)[0])])
    assert [one.place for one in stacks_in(located)] == ["train.py:3 in main"]
    other = wire.Located(0, [0], [""], [bytes(wire.encode(wire.Beat(wire.Node("worker", 0, 1)))[0])])
    with pytest.raises(Exception, match="expected stacks, got a Beat"):
        list(stacks_in(other))


def test_closing_twice_is_once() -> None:
    transport = PlayedScheduler([])
    session = session_of(transport)
    session.close()
    session.close()
    assert len(transport.asked) == 1
