"""Processes of a measurement: all end together, and what they say is quoted."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.jobs import JobFailed, Member, run, scratch


def python(script: str, name: str = "it", **env: str) -> Member:
    return Member(name, [sys.executable, "-c", script], env)


def test_the_report_comes_back():
    with scratch() as folder:
        path = folder / "report"
        script = f"import json, os; open({str(path)!r}, 'w').write(json.dumps(os.environ['GREETING']))"
        assert run([python(script, GREETING="hello")], path) == "hello"
    assert not folder.exists()


def test_one_that_fails_ends_the_others_and_is_quoted(tmp_path):
    path, draft = str(tmp_path / "pid"), str(tmp_path / "draft")
    script = (
        f"import os, time; open({draft!r}, 'w').write(str(os.getpid())); os.rename({draft!r}, {path!r}); time.sleep(60)"
    )
    failing = f"import os, sys, time\nwhile not os.path.exists({path!r}): time.sleep(.01)\nsys.exit('Boom')"
    start = time.monotonic()
    with pytest.raises(JobFailed, match="worker 1 exited with 1:\n    Boom"):
        run([python(script, "worker 0"), python(failing, "worker 1")], tmp_path / "report")
    assert time.monotonic() - start < 50
    pid = int(Path(path).read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_does_not_end_is_named(tmp_path):
    with pytest.raises(JobFailed, match=r"it had not ended after 0\.3 s"):
        run([python("import time; time.sleep(60)")], tmp_path / "report", timeout_s=0.3)


def test_no_report_is_a_failure(tmp_path):
    with pytest.raises(JobFailed, match="none left a report"):
        run([python("pass")], tmp_path / "report")


def test_members_are_in_no_job_but_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "server")
    path = tmp_path / "report"
    assert run([python(f"import os; open({str(path)!r}, 'w').write(str(int('DMLC_ROLE' in os.environ)))")], path) == 0
