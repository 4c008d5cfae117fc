"""Curves against the numbers of workers and servers, and the size of an array."""

from __future__ import annotations

from benchmarks.figures import Result, Row
from benchmarks.suites.scaling import scale


def test_three_curves_of_as_many_points_as_there_are_choices(session):
    made = session("scale", "--peers", "none")
    works = []

    def measure(case, show=True):
        work = case.contenders[0].work
        works.append((work.workers, work.servers, work.net))
        return Result(case.name, case.title, [Row("kvstore", [float(len(works))])])

    made.measure = measure
    scale(made, counts=(1, 2), sizes=("1KB", "10KB", "1MB"))
    assert [curve.name for curve in made.curves] == ["scale-workers", "scale-servers", "scale-bytes"]
    assert [len(curve.lines["kvstore"]) for curve in made.curves] == [2, 2, 3]
    assert [work[:2] for work in works[:4]] == [(1, 2), (2, 2), (2, 1), (2, 2)]
    assert [net for _, _, net in works[4:]] == ["1KB", "10KB", "1MB"]
