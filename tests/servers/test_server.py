"""The server and the scheduler as processes: what they return when a job ends, and what is left of one that fails."""

from __future__ import annotations

import pytest
from threaded import ThreadedJob

from kvstore.errors import JOB_FAILED_EXIT


def test_of_a_job_that_ends_in_order_both_return_0() -> None:
    with ThreadedJob(1, 1) as job:
        pass
    assert job.exit_codes == {"scheduler": 0, "server 0": 0}


def test_of_a_job_that_fails_both_return_the_code_for_that(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedJob(1, 1) as job:
        job.run_sessions(lambda session: session.leave("it diverged"))
    assert job.exit_codes == {"scheduler": JOB_FAILED_EXIT, "server 0": JOB_FAILED_EXIT}
    assert "server 0 ends: worker 0 failed: it diverged" in caplog.messages
