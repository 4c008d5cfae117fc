"""What the lines between hosts allow."""

from __future__ import annotations

import pytest

from benchmarks.wire import bytes_a_ms, host_bytes, wire_ms


@pytest.mark.parametrize(
    ("rate", "expected"), [("1gbit", 125_000), ("200mbit", 25_000), ("2.5gbit", 312_500), ("64kbit", 8), ("8000bit", 1)]
)
def test_rates_are_bits_a_second(rate, expected):
    assert bytes_a_ms(rate) == pytest.approx(expected)


@pytest.mark.parametrize("rate", ["200", "200 mbit", "25mbps", "0mbit", "-1mbit", ".5gbit", "fast", ""])
def test_nonsense_is_told_what_would_work(rate):
    with pytest.raises(ValueError, match="is not a rate; write bits a second, as in 200mbit or 1gbit"):
        bytes_a_ms(rate)


@pytest.mark.parametrize(("hosts", "parts"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_a_host_sends_one_gradient_for_the_parts_of_others_and_its_own_values_to_them(hosts, parts):
    assert host_bytes(10_000_000, hosts) == pytest.approx(parts * 10_000_000)


@pytest.mark.parametrize(
    ("nbytes", "hosts", "rate", "expected"),
    [
        (10_000_000, 2, "200mbit", 400),
        (10_000_000, 4, "200mbit", 600),
        (102_228_128, 4, "1gbit", 1227),
    ],
)
def test_what_the_wire_allows(nbytes, hosts, rate, expected):
    assert wire_ms(nbytes, hosts, rate) == pytest.approx(expected, abs=1)


def test_what_the_wire_allows_where_servers_have_hosts_of_their_own():
    assert wire_ms(102_228_128, 4, servers_apart=True) == pytest.approx(818, abs=1)
