from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.release
def test_a_whole_run_with_real_processes(tmp_path):
    words = "pushpull --net tiny --rounds 2 --repeats 1 --peers gloo --out"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words.split(), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "pushpull.json").read_text())
    (result,) = record["results"]
    assert {row["name"]: len(row["samples"]) for row in result["rows"]} == {"kvstore": 2, "gloo": 2}
    assert "kvstore" in result["rows"][0]["name"]
    assert (tmp_path / "pushpull.png").read_bytes().startswith(b"\x89PNG")
    assert "tiny-none" in done.stdout
