"""The facts about a machine."""

from __future__ import annotations

from benchmarks.machine import facts


def test_the_machines_facts():
    found = facts()
    assert found["torch"].startswith("2.")
    assert int(found["cores"]) >= 1
    assert all(found.values())
