"""The agent as a program."""

from __future__ import annotations

import sys
from pathlib import Path

from launched import ROOT
from programs_of_ours import run

import kvstore
from kvstore import wire
from launcher.agents import boot
from launcher.agents.links.framing import Unframer
from launcher.agents.links.protocol import Hello


def test_an_agent_over_pipes_ends_with_its_link(tmp_path: Path) -> None:
    code, out, err = run(boot.argv(sys.executable, str(ROOT)), tmp_path)
    assert (code, err) == (1, "")
    hello, *rest = [wire.decode(frames) for frames in Unframer().feed(out)]
    assert isinstance(hello, Hello)
    assert (hello.version, hello.rank, rest) == (kvstore.__version__, -1, [])
