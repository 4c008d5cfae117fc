"""What the server supervisor says of a job that has failed."""

from __future__ import annotations

from kvstore.bootstrap.root_cause import MemberEnd, root_cause
from kvstore.job.exit_report import ExitReport

HEARD = ExitReport("worker 1 failed: ValueError: no data", consequence=True)


def end(name: str, report: ExitReport | None = None, *, how: str = "", blameless: bool = True) -> MemberEnd:
    return MemberEnd(name, how, report, blameless)


def test_a_job_that_has_not_failed_needs_no_words() -> None:
    assert root_cause([]) == root_cause([end("server 0"), end("scheduler")]) == ""


def test_what_the_scheduler_has_heard_is_the_cause() -> None:
    late = ExitReport("the scheduler has not answered", consequence=True)
    ends = [end("server 0", late), end("scheduler", HEARD), end("server 1", HEARD)]
    assert root_cause(ends) == "the job has failed: worker 1 failed: ValueError: no data"
    assert root_cause(ends[2:]) == ""  # on another host


def test_ctrl_c_needs_no_words() -> None:
    assert root_cause([end("scheduler", ExitReport("worker 1 failed: KeyboardInterrupt", consequence=True))]) == ""


def test_who_fails_by_itself_is_the_cause() -> None:
    killed = end("server 1", how="was killed by SIGKILL", blameless=False)
    later = end("server 0", how="exited with code 1", blameless=False)
    assert root_cause([end("scheduler", HEARD), killed, later]) == "server 1 was killed by SIGKILL"


def test_a_traceback_is_shown_with_the_process_that_it_is_of() -> None:
    report = ExitReport("OSError: no room", details="Traceback:\nOSError: no room\n")
    fails = end("server 1", report, how="exited with code 1", blameless=False)
    assert root_cause([fails]) == "server 1 exited with code 1:\nTraceback:\nOSError: no room"


def test_who_has_printed_its_traceback_is_named_with_the_error() -> None:
    fails = end("server 1", ExitReport("OSError: no room", printed=True), how="exited with code 1", blameless=False)
    assert root_cause([fails]) == "server 1 exited with code 1:\nOSError: no room"


def test_who_ends_by_an_error_about_another_is_not_the_cause() -> None:
    fails = end("server 0", HEARD, how="exited with code 1", blameless=False)
    assert root_cause([fails, end("scheduler", HEARD)]) == "the job has failed: worker 1 failed: ValueError: no data"


def test_who_has_failed_and_still_runs_is_the_cause_of_what_others_have_heard() -> None:
    fails = MemberEnd.expected("server 1", ExitReport("OSError: no room", details="OSError: no room\n"))
    others = [MemberEnd.expected("scheduler", HEARD), end("server 0", HEARD)]
    assert root_cause([*others, fails]) == "server 1 has failed:\nOSError: no room"
    assert root_cause(others) == "the job has failed: worker 1 failed: ValueError: no data"
