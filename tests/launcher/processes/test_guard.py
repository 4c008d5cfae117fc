"""launch.py's side of the keeper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import open_files
import pytest
from launched import ROOT
from waiting import until

from launcher.processes.guard import Guard, LastWill
from launcher.processes.jobdir import JobDir


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody looks")
def test_where_no_file_can_be_opened_all_that_is_known_goes_and_the_rest_is_told(
    short: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = JobDir.make(short)
    guard = Guard(job.path, job.path.name)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        guard.add(process.pid)
        with open_files.at_most(3):  # strangers at a port of launch.py's, say, have taken what there were
            assert not guard.leftovers()
            guard.kill()
            job.remove()
        assert process.wait() == -9
    guard.dismiss()
    said = "launch.py: cannot see whether processes of the job are left: Too many open files\n"
    assert capfd.readouterr().err == said
    job.remove()
    assert list(short.iterdir()) == []


# Makes a will: to touch the first file and remove the others. Then waits, or leaves.
MAKER = """
import signal, sys
from pathlib import Path
from launcher.processes.guard import LastWill
will = LastWill(["touch", sys.argv[1]], [Path(path) for path in sys.argv[3:]])
print("made", flush=True)
if sys.argv[2] == "stay":
    signal.pause()
if sys.argv[2] == "revoke":
    will.revoke()
"""


def maker(tmp_path: Path, how: str, *remove: Path) -> subprocess.Popen[bytes]:
    made = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(tmp_path / "it's\n done"), how, *map(str, remove)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == b"made\n"
    made.stdout.close()
    return made


def test_a_will_is_executed_when_its_maker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "-r dir").mkdir()
    (tmp_path / "-r dir" / "ticket").touch()
    made = maker(tmp_path, "stay", tmp_path / "-r dir", tmp_path / "none")
    assert not (tmp_path / "it's\n done").exists()
    made.kill()
    made.wait()
    until(lambda: (tmp_path / "it's\n done").exists() and not (tmp_path / "-r dir").exists())


def test_or_leaves_without_a_word(tmp_path: Path) -> None:
    maker(tmp_path, "leave").wait()
    until(lambda: (tmp_path / "it's\n done").exists())


def test_a_signal_for_its_group_is_not_for_its_will(tmp_path: Path) -> None:
    will = LastWill(["touch", str(tmp_path / "done")])
    assert os.getsid(will.process.pid) == will.process.pid
    will.revoke()


def test_a_will_that_is_revoked_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    will = LastWill(["touch", str(tmp_path / "done")], [tmp_path / "kept"])
    will.revoke()
    will.revoke()
    assert will.process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_revoking_what_has_died_is_fine(tmp_path: Path) -> None:
    will = LastWill(["touch", str(tmp_path / "done")])
    will.process.kill()
    will.process.wait()
    will.revoke()
    assert list(tmp_path.iterdir()) == []
