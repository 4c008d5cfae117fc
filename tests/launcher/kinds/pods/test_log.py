"""The output of a pod whose log is cut."""

from __future__ import annotations

import pytest

from launcher.kinds.pods.log import PodLog


@pytest.mark.parametrize("fraction", [".5", ".500000000", ""])
def test_a_log_that_was_cut_goes_on_where_it_was(fraction: str) -> None:
    zone = "+08:00" if fraction else "Z"
    log = PodLog()
    one, two = f"2024-01-01T00:00:01{fraction}{zone}".encode(), f"2024-01-01T00:00:02.25{zone}".encode()
    assert log.since == ""
    assert log.feed(one + b" a\n" + two + b" half") == b"a\n"
    assert log.since == one.decode()
    log.resume()
    assert log.feed(one + b" a\n" + two + b" half a line\n") == b"half a line\n"
    assert log.feed(two + b" \nno stamp\n" + two + b" end") == b"\nno stamp\n"
    assert log.finish() == b"end"
