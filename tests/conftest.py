"""Shared fixtures. ``threaded.py`` beside this file makes whole jobs inside one process."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from waiting import PROMPT

# Hosts, and the MPI, Slurm and Grid Engine that run on them; each begins with the first test that asks for it.
pytest_plugins = ["cluster.fixtures", "defaults", "forked", "required"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Three times a test, pytest adds its handler to each logger that keeps its records from the root's, as torch's 40 do.
for _logger in list(logging.root.manager.loggerDict.values()):
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True

# What hypothesis tries is the same in every run, however long it takes; ``make test-all`` tries twice as much.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("thorough", settings.get_profile("repeatable"), max_examples=100)
settings.load_profile("repeatable")


_PROCESSES = {"integration", "cluster", "launcher", "examples", "benchmarks", "faults", "interrupts"}


@pytest.hookimpl(trylast=True)  # when cluster.fixtures has marked its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with long tests, then those that start processes: as the last ones they would leave processors idle."""
    alone = {path: _PROCESSES.isdisjoint(path.parent.parts) for path in {item.path for item in items}}
    items.sort(key=lambda item: (not any(map(item.get_closest_marker, ("long", "release"))), alone[item.path]))


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of each ``gc.collect``: a million objects, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the environment of a job that the tests themselves may run in."""
    for name in list(os.environ):
        if name.startswith(("DMLC_", "KVSTORE_", "MXNET_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _time_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is asked what a late call waits for can say it, however busy the machine. Tests of silence set it back."""
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", PROMPT)


@pytest.fixture
def none_ignored() -> Iterator[None]:
    """Signals end a process that has not been told to ignore them, even in `nohup make test &`, where all have been."""
    handlers = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ignored = [signum for signum in handlers if signal.getsignal(signum) is signal.SIG_IGN]
    for signum in ignored:
        signal.signal(signum, handlers[signum])
    yield
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
