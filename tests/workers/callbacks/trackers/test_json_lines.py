"""Lines of JSON."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers.callbacks import JSONLines


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_line_is_an_object_also_of_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tracker = JSONLines(path)
    tracker.log({"loss": 0.1, "epoch": 3, 'a"b': 1e-300}, 50)
    tracker.log({"nan": math.nan, "up": math.inf, "down": -math.inf}, 51)
    tracker.close()
    first, second = rows(path)
    assert first.pop("wall_time") > second.pop("wall_time") - 60
    assert first == {"step": 50, "loss": 0.1, "epoch": 3, 'a"b': 1e-300}
    assert second == {"step": 51, "nan": None, "up": math.inf, "down": -math.inf}


WRITER = """
import sys
from workers.callbacks import CSVRows, JSONLines
tracker = {"jsonl": JSONLines, "csv": CSVRows}[sys.argv[1]](sys.argv[2])
for step in range(10**9):
    tracker.log({"loss": step / 7, f"value {step // 50 % 40}": step}, step)
    if step == 300:
        print("on", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_writer_that_is_killed_leaves_whole_lines(tmp_path: Path, kind: str) -> None:
    """The other is here for the program's sake."""
    path = tmp_path / f"run.{kind}"
    with subprocess.Popen([sys.executable, "-c", WRITER, kind, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGKILL)
    text = path.read_text()
    assert text.endswith("\n")
    if kind == "jsonl":
        steps = [int(row["step"]) for row in rows(path)]
    else:
        fields = [line.split(",") for line in text.splitlines()]
        assert {len(row) for row in fields} == {len(fields[0])}
        steps = [int(row[0]) for row in fields[1:]]
    assert steps == list(range(len(steps)))
    assert len(steps) > 300
