"""Which connection an event of ZeroMQ's is about."""

from __future__ import annotations

import pytest

from kvstore.transport.zeromq.losses import may_be


@pytest.mark.parametrize(
    ("endpoint", "there"),
    [
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000"),
        ("tcp://10.0.0.1:5000", "tcp://[::ffff:10.0.0.1]:5000"),
        ("tcp://[fd00::1]:5000", "tcp://[fd00::1]:5000"),
        ("tcp://node-7:5000", "tcp://[::ffff:10.0.0.1]:5000"),
        ("tcp://node-7:5000", "tcp://node-7:5000"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_an_endpoint_is_recognized(endpoint: str, there: str):
    assert may_be(endpoint, there)


@pytest.mark.parametrize(
    ("endpoint", "there"),
    [
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"),
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5001"),
        ("tcp://10.0.0.1:5000", "tcp://[::ffff:10.0.0.2]:5000"),
        ("tcp://[fd00::1]:5000", "tcp://[fd00::2]:5000"),
        ("tcp://node-7:5000", "tcp://10.0.0.1:5001"),
        ("ipc:///tmp/x", "ipc:///tmp/y"),
    ],
)
def test_another_is_not(endpoint: str, there: str):
    assert not may_be(endpoint, there)
