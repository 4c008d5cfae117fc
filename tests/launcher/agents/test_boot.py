"""Our programs start wherever they are, and whatever the working directory holds."""

from __future__ import annotations

import sys
from pathlib import Path

from launched import ROOT
from programs_of_ours import run

from launcher.agents import boot
from launcher.agents.links.ticket import ENLIST


def test_an_agent_is_ours_whatever_the_working_directory_holds(shadowed: Path) -> None:
    code, out, err = run(boot.argv(sys.executable, str(ROOT)), shadowed, **{ENLIST: "hunter2"})
    assert (code, out) == (1, b"")
    assert err.startswith(f"the agent cannot start: {ENLIST} is not a ticket")
    assert "hunter2" not in err


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    clone = tmp_path / 'a clone\'s "place" {x}'
    (clone / "ours").mkdir(parents=True)
    (clone / "ours" / "__init__.py").write_text("def main():\n    print('here')\n    return 3\n")
    assert run(boot.run(sys.executable, "ours", str(clone)), tmp_path) == (3, b"here\n", "")
    assert boot.run("py", "ours") == ["py", "-c", boot.CODE.format(more="", module="ours")]
