"""What is done when its maker dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launched import ROOT
from waiting import until

from launcher.processes.last_will import LastWill

# Makes a will: to touch the first file and remove the others. Then waits, or leaves.
MAKER = """
import signal, sys
from pathlib import Path
from launcher.processes.last_will import LastWill
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
