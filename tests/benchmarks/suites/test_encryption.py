"""The same rounds, plain and with keys."""

from __future__ import annotations

from benchmarks.figures import Result, Row
from benchmarks.suites.encryption import PLAIN, encryption


def test_one_contender_has_keys_and_none_shares_memory(session):
    cases = []
    made = session("encryption", "--net", "10MB", "-n", "3")
    made.measure = cases.append
    encryption(made)
    (case,) = cases
    assert [contender.name for contender in case.contenders] == [PLAIN, "kvstore, encrypted"]
    assert "3 workers, 2 servers" in case.title
    result = Result(case.name, case.title, [Row(PLAIN, [60.0]), Row("kvstore, encrypted", [])])
    case.finish(result)
    assert [row.note for row in result.rows] == ["1.00 GB/s", ""], "10 MB both ways for each of 3 in 60 ms"
