"""Training steps."""

from __future__ import annotations

from benchmarks.session import Case
from benchmarks.suites.training import note_efficiency


def test_efficiency_is_what_is_left_of_a_processs_speed(session, fake):
    made = session("train", "--repeats", "1")
    contenders = [fake("kvstore", [125.0]), fake("ddp", [200.0]), fake("alone", [100.0])]
    result = made.measure(Case("train-resnet8", "Steps", contenders, finish=note_efficiency))
    assert [row.note for row in result.rows] == ["efficiency 0.80", "efficiency 0.50", ""]
