"""With ``KVSTORE_TESTS_REQUIRE=all``, as in CI, a test fails that skips because the machine lacks something. Plugin."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

# Read before any test: tests do not see the variables of the project.
WHAT = os.environ.get("KVSTORE_TESTS_REQUIRE", "")
MAY_SKIP = (
    "CUDA device",  # not every machine can have one
    "vllm",  # it needs an environment of its own, with its versions of torch and much else
    "in one process",  # of the conformance suite, what one transport has not got
)


def pytest_configure() -> None:
    if WHAT not in ("", "all"):
        raise pytest.UsageError(f"KVSTORE_TESTS_REQUIRE={WHAT}: it can be all, or be left out")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if WHAT and report.skipped and call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
        reason = str(call.excinfo.value)
        if not any(allowed in reason for allowed in MAY_SKIP):
            report.outcome = "failed"
            report.longrepr = f"KVSTORE_TESTS_REQUIRE=all, but this would be skipped: {reason}"
    return report
