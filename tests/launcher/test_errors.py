from __future__ import annotations

import pickle

from launcher.errors import CANNOT_EXECUTE, NOT_FOUND, USAGE, LaunchError, WorkerFailed


def test_a_job_that_cannot_be_started_has_the_exit_code_of_a_shell() -> None:
    assert LaunchError("no hosts").exit_code == USAGE == 2
    assert LaunchError("no such command", NOT_FOUND).exit_code == 127
    assert (str(LaunchError("no hosts", CANNOT_EXECUTE)), CANNOT_EXECUTE) == ("no hosts", 126)


def test_a_failure_says_which_process_and_how() -> None:
    assert str(WorkerFailed("server 0", "was killed by SIGKILL")) == "server 0 was killed by SIGKILL"
    failure = WorkerFailed("worker 1", "raised ValueError: no data", "Traceback ...")
    assert str(failure) == "worker 1 raised ValueError: no data\n\nTraceback ..."
    assert (failure.process, failure.how, failure.details) == failure.args


def test_a_failure_can_be_handed_on_to_another_process() -> None:
    failure = pickle.loads(pickle.dumps(WorkerFailed("worker 1", "exited with code 7", "details")))
    assert str(failure) == "worker 1 exited with code 7\n\ndetails"
