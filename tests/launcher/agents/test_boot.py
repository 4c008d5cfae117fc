"""Our programs start wherever they are, and whatever the working directory holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launched import ROOT
from programs_of_ours import run

from launcher.agents import boot
from launcher.agents.links.ticket import ENLIST


@pytest.mark.parametrize(
    ("path", "root"),
    [("", ROOT), ("{}", ROOT), ("./:{}/none", ROOT), (f"{{}}:{ROOT}", ROOT), ("{}", None)],
)
def test_an_agent_is_ours_whatever_the_working_directory_and_the_path_hold(
    shadowed: Path, path: str, root: Path | None
) -> None:
    environ = {ENLIST: "hunter2"} | ({"PYTHONPATH": path.format(shadowed)} if path else {})
    code, out, err = run(boot.argv(sys.executable, root and str(root)), shadowed, **environ)
    assert (code, out) == (1, b"")
    assert err.startswith(f"the agent cannot start: {ENLIST} is not a ticket")
    assert "hunter2" not in err


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    clone = tmp_path / 'a clone\'s "place" {x}'
    (clone / "ours").mkdir(parents=True)
    (clone / "ours" / "__init__.py").write_text("def main():\n    print('here')\n    return 3\n")
    assert run(boot.run(sys.executable, "ours", str(clone)), tmp_path) == (3, b"here\n", "")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "wanted.py").write_text("def main():\n    print('there')\n")
    theirs = {"PYTHONPATH": str(tmp_path / "theirs")}
    assert run(boot.run(sys.executable, "wanted", str(clone)), tmp_path, **theirs) == (0, b"there\n", "")
    assert boot.run("py", "ours") == ["py", "-c", boot.CODE.format(first="", module="ours")]
