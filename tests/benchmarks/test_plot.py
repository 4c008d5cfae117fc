"""The picture of a session."""

from __future__ import annotations

from benchmarks import plot
from benchmarks.figures import Curve, Result, Row
from benchmarks.machine import facts


def test_the_picture_is_a_png(tmp_path, result):
    empty = Result("none", "Nothing ran", [Row("ours", note="failed")])
    other = Result("memory", "Memory", [Row("largest", [500.0]), Row("allowed", [450.0])], unit="MB")
    curves = [
        Curve("sizes", "Sizes", "bytes", "ms", {"ours": [(1e3, 0.5), (1e6, 2.0)]}),
        Curve("rounds", "Rounds", "round", "MB", {"server 0": [(0, 300.0), (9, 310.0)]}, logarithmic=False),
    ]
    path = tmp_path / "new" / "picture.png"
    plot.draw([result, empty, other], curves, facts(), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    plot.draw([empty], [], facts(), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
