from __future__ import annotations

import pytest

from launcher.errors import LaunchError
from launcher.kinds.managers.units import mebibytes, seconds


@pytest.mark.parametrize(("size", "expected"), [("", 0), ("500m", 500), ("1m", 1), ("4g", 4096)])
def test_sizes(size: str, expected: int) -> None:
    assert mebibytes(size) == expected


@pytest.mark.parametrize(
    ("time", "expected"), [("2:00:00", 7200), ("30:00", 1800), ("0:01", 1), ("100:00:01", 360_001), ("1:2:03", 3723)]
)
def test_times(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize("time", ["", "90", "0:00", "0:00:00", "1:2", "2h", "1-02:00:00", "-1:00", "²:00"])
def test_what_is_no_time_is_an_error_that_shows_one(time: str) -> None:
    with pytest.raises(LaunchError, match="2:00:00") as caught:
        seconds(time)
    assert f"--time {time}" in str(caught.value)
