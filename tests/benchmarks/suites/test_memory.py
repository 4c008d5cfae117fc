"""How much memory servers may hold, and whether it grows."""

from __future__ import annotations

import pytest

from benchmarks.contenders import Work
from benchmarks.suites.memory import allowed_mb


def test_allowed_are_weights_a_rounds_gradients_and_what_python_needs():
    assert allowed_mb(Work("100MB", workers=2, servers=2)) == pytest.approx(50 + 2 * 50 + 300)
