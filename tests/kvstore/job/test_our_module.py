"""Processes of the project are the project's, whatever the user's modules are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.job import our_module
from kvstore.job.processes import words

THEIRS = "print('theirs')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose modules have the names of all our packages, and of the program's neighbors."""
    for name in our_module.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(THEIRS)
        (tmp_path / name / "__main__.py").write_text(THEIRS)
    (tmp_path / "files.py").write_text(THEIRS)
    return tmp_path


@pytest.mark.parametrize("on_path", [False, True])
def test_servers_are_ours(folder: Path, on_path: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "PYTHONPATH"))}
    env["DMLC_ROLE"] = "server"
    if on_path:
        env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        words(sys.executable, "servers"), cwd=folder, env=env, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert done.stdout == ""


def test_only_our_packages_are_found_in_our_directory() -> None:
    finder = our_module.OurPackages()
    for name in our_module.PACKAGES:
        spec = finder.find_spec(name, None)
        assert spec is not None
        assert spec.origin == f"{our_module.ROOT}/{name}/__init__.py"
    assert finder.find_spec("tests", None) is None
    assert finder.find_spec("kvstore.job", ["/nowhere"]) is None
