"""What a failed job says at its end. Times are numbers."""

from __future__ import annotations

import pytest

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.tasks import Task
from launcher.supervision.postmortem import HOLD_S, Line, Postmortem

TASKS = [
    Task("scheduler", 0, ("x",), {}),
    Task("server", 0, ("x",), {}),
    *(Task("worker", rank, ("x",), {}, host="node7" if rank == 1 else "") for rank in range(5)),
]
SCHEDULER, SERVER, W0, W1, W2, W3, W4 = range(len(TASKS))
CAUSE = ExitReport("ValueError: no data", "train.py:7, in load", "Traceback:\nValueError: no data\n")
LOST = ExitReport("NodeLost: worker 1 failed", "train.py:9, in step", "Traceback:\nNodeLost\n", consequence=True)
JOB = ExitReport("worker 1 is lost: silent for 30 s", consequence=True)


@pytest.fixture
def postmortem() -> Postmortem:
    return Postmortem(TASKS)


def report(postmortem: Postmortem, **reports: ExitReport) -> None:
    for name, one in reports.items():
        postmortem.reported(globals()[name], one, 0.0)


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def test_without_reports_there_is_only_how(postmortem: Postmortem) -> None:
    postmortem.exited(W0, Exit(signum=9))
    assert postmortem.lines(W0, "was killed by SIGKILL") == [Line(None, "worker 0 was killed by SIGKILL")]
    assert texts(postmortem.lines(W1, "exited with code 1", "ImportError: x")) == [
        "worker 1 on node7 exited with code 1; the last that it printed: ImportError: x"
    ]


def test_the_cause_comes_last_and_in_full(postmortem: Postmortem) -> None:
    report(postmortem, W1=CAUSE, SCHEDULER=JOB, SERVER=JOB, W0=LOST, W3=LOST, W4=LOST, W2=LOST)
    assert postmortem.lines(W1, "exited with code 1", "not needed") == [
        Line(None, "workers 0, 2 to 4 ended because worker 1 on node7 has failed (at train.py:9, in step)"),
        Line(None, "worker 1 on node7 exited with code 1:"),
        Line(W1, "Traceback:"),
        Line(W1, "ValueError: no data"),
    ]


def test_others_that_fail_by_themselves_have_a_line(postmortem: Postmortem) -> None:
    another = ExitReport("KeyError: 3\nand more", "train.py:8")
    report(postmortem, W0=CAUSE, W1=another, W2=CAUSE, W3=CAUSE)
    assert texts(postmortem.lines(W0, "exited with code 1"))[:3] == [
        "worker 1 on node7 failed, too: KeyError: 3 (at train.py:8)",
        "workers 2, 3 failed with the same error (at train.py:7, in load)",
        "worker 0 exited with code 1:",
    ]


def test_whoever_has_only_exited_first_is_not_the_cause(postmortem: Postmortem) -> None:
    report(postmortem, W0=LOST, W2=CAUSE)
    postmortem.exited(W0, Exit(code=1))
    assert texts(postmortem.lines(W0, "exited with code 1")) == [
        "worker 0 ended because worker 2 has failed (at train.py:9, in step)",
        "worker 2 failed:",
        "Traceback:",
        "ValueError: no data",
    ]
    postmortem.exited(W2, Exit(code=5))
    assert "worker 2 exited with code 5:" in texts(postmortem.lines(W0, "exited with code 1"))


def test_an_error_that_all_get_names_its_cause(postmortem: Postmortem) -> None:
    error = ExitReport("NotFinite: push 3 by worker 2 has NaN", "train.py:9", "T\nN\n")
    report(postmortem, W0=error, W2=error)
    assert texts(postmortem.lines(W0, "exited with code 1")) == [
        "worker 0 failed with the same error (at train.py:9)",
        "worker 2 failed:",
        "T",
        "N",
    ]


@pytest.mark.parametrize("first", ["W0", "SERVER", "SCHEDULER"])
def test_an_error_that_all_get_names_its_cause_whoever_ends_first(postmortem: Postmortem, first: str) -> None:
    error = "NotFinite: push 3 of 'w' by worker 1 has NaN"
    own = ExitReport(error, "train.py:9", "Traceback of 1\n")
    report(postmortem, SERVER=JOB, W0=ExitReport(error, "train.py:9", "Traceback of 0\n"), W1=own, SCHEDULER=JOB)
    assert postmortem.root(globals()[first]) == W1


def test_a_killed_process_has_no_report_and_is_the_cause(postmortem: Postmortem) -> None:
    report(postmortem, W0=LOST, SERVER=JOB)
    assert texts(postmortem.lines(W1, "was killed by SIGKILL")) == [
        "worker 0 ended because worker 1 on node7 was killed by SIGKILL (at train.py:9, in step)",
        "worker 1 on node7 was killed by SIGKILL",
    ]


def test_if_no_process_has_failed_visibly_the_scheduler_knows_why(postmortem: Postmortem) -> None:
    report(postmortem, SERVER=JOB, SCHEDULER=JOB, W0=LOST)
    assert texts(postmortem.lines(SERVER, "ended because the job had failed")) == [
        "worker 0 ended because the job has failed (at train.py:9, in step)",
        "the job has failed: worker 1 is lost: silent for 30 s",
    ]
    report(postmortem, W4=CAUSE)  # whose process hangs at its exit
    assert texts(postmortem.lines(SERVER, "ended because the job had failed"))[-3:] == [
        "worker 4 failed:",
        "Traceback:",
        "ValueError: no data",
    ]


def test_a_consequence_without_a_cause_is_shown_in_full(postmortem: Postmortem) -> None:
    report(postmortem, W0=LOST)
    postmortem.exited(W0, Exit(code=1))
    assert texts(postmortem.lines(W0, "exited with code 1"))[0] == "worker 0 exited with code 1:"


def test_what_processes_have_printed_themselves_is_not_repeated(postmortem: Postmortem) -> None:
    report(postmortem, W1=ExitReport("ValueError: no", "t.py:1", printed=True), W0=ExitReport("E", printed=True))
    assert texts(postmortem.lines(W1, "exited with code 1")) == [
        "worker 1 on node7 exited with code 1: ValueError: no (at t.py:1)"
    ]


def test_a_report_is_not_held_back_for_long(postmortem: Postmortem) -> None:
    report(postmortem, W1=CAUSE, W0=LOST, SCHEDULER=JOB)
    assert postmortem.overdue(HOLD_S - 0.1) == []
    assert texts(postmortem.overdue(HOLD_S)) == [
        "worker 1 on node7 has failed, and has not ended yet:",
        "Traceback:",
        "ValueError: no data",
    ]
    assert postmortem.overdue(2 * HOLD_S) == []
    assert texts(postmortem.lines(W1, "exited with code 1"))[-1] == (
        "worker 1 on node7 exited with code 1: ValueError: no data (at train.py:7, in load)"
    )


def test_nor_is_that_of_a_scheduler_that_alone_knows(postmortem: Postmortem) -> None:
    report(postmortem, SCHEDULER=JOB, W0=LOST)
    postmortem.exited(W0, Exit(code=1))
    assert texts(postmortem.overdue(HOLD_S)) == ["the job has failed: worker 1 is lost: silent for 30 s"]


def test_after_a_signal_there_are_failures_and_no_cause(postmortem: Postmortem) -> None:
    report(postmortem, W0=LOST, W2=CAUSE)
    assert texts(postmortem.leftover()) == ["worker 2 failed: ValueError: no data (at train.py:7, in load)"]


def test_what_was_lost_before_is_no_cause_of_what_fails_later(postmortem: Postmortem) -> None:
    postmortem.exited(SERVER, Exit(1))
    report(postmortem, SERVER=CAUSE)
    assert texts(postmortem.lost(SERVER, "exited with code 1")) == [
        "server 0 exited with code 1:",
        "Traceback:",
        "ValueError: no data",
    ]
    report(postmortem, W0=LOST)
    assert texts(postmortem.lines(W0, "exited with code 1"))[0] == "worker 0 exited with code 1:"


@pytest.mark.parametrize("quiet", [None, JOB, ExitReport("x", printed=True)])
def test_a_loss_that_is_explained_elsewhere_has_no_lines(postmortem: Postmortem, quiet: ExitReport | None) -> None:
    if quiet is not None:
        report(postmortem, SERVER=quiet)
    assert postmortem.lost(SERVER, "was killed by SIGKILL") == []


def test_why_a_loss_was_fatal_the_scheduler_knows(postmortem: Postmortem) -> None:
    postmortem.exited(SERVER, Exit(signum=9))
    postmortem.lost(SERVER, "was killed by SIGKILL")
    why = ExitReport("server 0 was lost before its standby was in step", consequence=True)
    report(postmortem, SCHEDULER=why, W0=LOST)
    assert texts(postmortem.lines(SERVER, "was killed by SIGKILL")) == [
        "worker 0 ended because server 0 was killed by SIGKILL (at train.py:9, in step)",
        "server 0 was killed by SIGKILL",
        "the job has failed: server 0 was lost before its standby was in step",
    ]
