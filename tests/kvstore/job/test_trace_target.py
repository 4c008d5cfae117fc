"""The file of a trace, and the rounds that it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.job.trace_target import TraceTarget


@pytest.mark.parametrize(
    ("given", "name", "rounds"),
    [("t.json", "t.json", "1-100"), ("t.json:500-600", "t.json", "500-600"), ("a:b.json:7", "a:b.json", "1-7")],
)
def test_rounds_come_behind_the_last_colon(given: str, name: str, rounds: str) -> None:
    target = TraceTarget.parse(given)
    assert (target.file, str(target.rounds)) == (Path(name).absolute(), rounds)


@pytest.mark.parametrize(
    ("given", "said"),
    [("t.json:0", "'0' is not valid"), ("t.json:9-8", "'9-8' is not valid"), (":7", "no file"), (".", "directory")],
)
def test_without_a_file_or_rounds_it_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TraceTarget.parse(given)


def test_the_file_is_a_trace_from_the_beginning_or_cannot_be_written(tmp_path: Path) -> None:
    TraceTarget.parse(f"{tmp_path}/t.json").prepare()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
    with pytest.raises(ConfigError, match=r"cannot write .*none/t\.json"):
        TraceTarget.parse(f"{tmp_path}/none/t.json").prepare()
