"""All measurements in one run of some minutes, for ``make bench``."""

from __future__ import annotations

from benchmarks.session import Session
from benchmarks.suites.encryption import encryption
from benchmarks.suites.exchange import asynchronous, pushpull, small
from benchmarks.suites.memory import memory
from benchmarks.suites.network import network
from benchmarks.suites.scaling import scale
from benchmarks.suites.training import train


def everything(session: Session) -> None:
    """Run each measurement once, with peers only where a target names them."""
    once = session.with_options(repeats=session.options.repeats or 1)
    for measurement in (pushpull, small, asynchronous, train, encryption, memory):
        measurement(once)
    gloo = [name for name in once.options.peers if name == "gloo"]
    fewer = once.options.rounds or 4
    network(once.with_options(peers=gloo, rounds=fewer), brief=True)
    scale(once.with_options(peers=(), rounds=fewer), counts=(1, 2, 4), sizes=("1KB", "100KB", "10MB", "100MB"))
