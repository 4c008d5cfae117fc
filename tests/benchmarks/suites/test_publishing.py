from __future__ import annotations

import time
import zlib
from argparse import Namespace
from contextlib import nullcontext

import numpy as np
import pytest

from benchmarks.figures import Result, Row
from benchmarks.programs.versions import published
from benchmarks.suites import publishing
from benchmarks.targets import TARGETS, judge


def test_bytes_are_counted_beside_the_ideal_and_readers_beside_peers(session, monkeypatch):
    monkeypatch.setattr(publishing, "COUNTED", 600_000)
    cases = []
    made = session("publish", "--peers", "gloo", "--rounds", "2")

    monkeypatch.setattr(publishing, "hosts", lambda *_: nullcontext(["a place", "another"]))
    monkeypatch.setattr(publishing.ssh, "logins", nullcontext)

    def measure(case, show=True):
        cases.append(case)
        names = [one.name for one in case.contenders] + ["kvstore, publish_state"]
        rows = [Row(first + name, [1.0]) for name in names for first in ("", "first: ")]
        result = Result(case.name, case.title, rows)
        if show:
            made.results.append(result)
        return result

    made.measure = measure
    publishing.publish(made)
    rows = {result.name: {row.name: row.median for row in result.rows} for result in made.results[:4]}
    assert list(rows) == ["publish-bytes-1", "publish-bytes-3", "publish-bytes-10", "publish-bytes-1-behind"]
    for row in rows.values():
        assert row["ideal"] < row["kvstore"] < 1.1 * row["ideal"]
    assert rows["publish-bytes-1-behind"]["ideal"] == pytest.approx(10.2, abs=0.3)  # 1 - 0.99^8 of the elements
    steps = made.results[4]
    assert [row.name for row in steps.rows] == ["step 1", "step 10", "step 100"]
    assert steps.rows[0].median > 2 * steps.rows[2].median
    assert [case.name for case in cases] == ["publish-1", "publish-4", "publish-line"]
    assert [one.name for one in cases[0].contenders] == ["kvstore", "gloo", "safetensors"]
    assert [one.hosts for one in cases[2].contenders] == [["a place", "another"]] * 2
    asked = [target for target in TARGETS if target.result.startswith("publish-")]
    assert len(judge(made.results)) == len(asked)
    assert all(verdict.ratio is not None for verdict in judge(made.results))


def test_a_version_is_visible_when_the_last_reader_has_it(tmp_path):
    args = Namespace(rounds=1, readers=2, share=0.5, folder=tmp_path)
    bits = np.zeros(100, np.int16)
    seen = []
    for reader in range(2):
        (tmp_path / f"reader{reader}").write_text("0 0\n")

    def publish(number: int) -> None:
        seen.append(bits.copy())
        for reader, late in enumerate((0.0, 5.0)):
            with (tmp_path / f"reader{reader}").open("a") as notes:
                notes.write(f"{number} {time.monotonic() + late}\n")
                if number == 2:
                    notes.write(f"3 {zlib.crc32(bits)}\n")

    figures = published(args, bits, publish)
    assert figures["whole"][0] == pytest.approx(5000, rel=0.1)
    assert not np.array_equal(*seen)
