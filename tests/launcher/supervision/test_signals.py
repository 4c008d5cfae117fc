from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator

import pytest

from launcher.supervision.signals import CHILD, SignalQueue


@pytest.fixture
def signals() -> Iterator[SignalQueue]:
    with SignalQueue() as entered:
        yield entered


def raised(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


def test_signals_are_taken_in_their_order_once() -> None:
    with SignalQueue() as signals:
        assert signals.take() == []
        raised(signal.SIGTERM, CHILD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        assert signals.take() == [signal.SIGTERM, CHILD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
        assert signals.take() == []


def test_a_selector_wakes_up(signals: SignalQueue) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        assert selector.select(0) == []
        raised(signal.SIGTERM)
        assert len(selector.select(60)) == 1
        signals.take()
        assert selector.select(0) == []


def test_afterwards_all_is_as_it_was() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, CHILD)}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with SignalQueue():
        assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
    assert {signum: signal.getsignal(signum) for signum in before} == before
    assert signal.set_wakeup_fd(wakeup) == wakeup


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_at_the_start_stays_ignored(ignored: signal.Signals) -> None:
    before = signal.signal(ignored, signal.SIG_IGN)  # `nohup launch.py ...`, and `launch.py ... &` in a script
    try:
        with SignalQueue() as signals:
            raised(ignored, signal.SIGTERM)
            assert signals.take() == [signal.SIGTERM]
            assert signal.getsignal(ignored) is signal.SIG_IGN
    finally:
        signal.signal(ignored, before)
