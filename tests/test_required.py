from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_that_skips():
    pytest.skip("no teapot here")

@pytest.mark.skipif(True, reason="no kettle here")
def test_that_is_marked():
    pass

@pytest.fixture
def cup():
    pytest.skip("no cup here")

def test_with_a_fixture_that_skips(cup):
    pass

def test_on_a_gpu():
    pytest.skip("there is no CUDA device")

@pytest.mark.xfail
def test_known_to_fail():
    assert False

def test_that_passes():
    pass
"""


def run(tmp_path: Path, require: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "required", "-p", "no:cacheprovider", "--rootdir", tmp_path, path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "KVSTORE_TESTS_REQUIRE": require},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_where_all_is_required_what_the_machine_lacks_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "all")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in done.stdout  # what is lacking before a test: errors
    for thing in ("teapot", "kettle", "cup"):
        assert f"KVSTORE_TESTS_REQUIRE=all, but this would be skipped: no {thing} here" in done.stdout


def test_elsewhere_it_is_skipped(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 4 skipped, 1 xfailed" in done.stdout


def test_what_cannot_be_required_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "cluster")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "KVSTORE_TESTS_REQUIRE=cluster: it can be all, or be left out" in done.stderr
