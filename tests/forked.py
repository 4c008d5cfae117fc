"""``pytest --processes N``: one process collects all tests, and the ``N`` that it forks run them. Plugin.

With pytest-xdist each process would collect all tests by itself, for some eight seconds of processor time.
"""

from __future__ import annotations

import os
import struct
import threading
import traceback
import warnings
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
import torch
from _pytest.runner import pytest_sessionfinish as tear_down
from _pytest.runner import runtestprotocol

PART = struct.Struct("=HH")  # where tests that one process runs in a row begin and end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, metavar="N", help="let N forked processes run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    processes = session.config.getoption("--processes")
    if not processes or session.testsfailed or session.config.option.collectonly:
        return None  # for pytest's own loop
    Runners(session, processes).run()
    return True


def parts(items: list[pytest.Item], processes: int) -> Iterator[tuple[int, int]]:
    """Yield what is run in a row: tests of one file, which may share fixtures, and the fewer the nearer the end.

    A long test is a part by itself. So all processes end at about the same time.
    """
    begin = 0
    for (_, long), group in groupby(items, key=lambda item: (item.path, bool(item.get_closest_marker("long")))):
        end = begin + len(list(group))
        while begin < end:
            size = 1 if long else 1 + (len(items) - begin) // (4 * processes)
            yield begin, min(begin + size, end)
            begin += size
        begin = end


class Runners:
    """Forks processes, and gives pytest what they say of each test, as if it had run here."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        assert threading.active_count() == 1, "only a process without threads can be forked"
        self._session, self._hooks = session, session.config.hook
        self._left = dict(enumerate(session.items))
        self._running: dict[Connection, int] = {}
        self._queue = os.memfd_create("parts")  # all processes have one position in it
        os.write(self._queue, b"".join(PART.pack(*part) for part in parts(session.items, processes)))
        os.lseek(self._queue, 0, os.SEEK_SET)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
        self._pids: dict[Connection, int] = {}
        for _ in range(processes):
            self._fork()

    def run(self) -> None:
        try:
            while self._pids:
                for pipe in wait(list(self._pids)):
                    assert isinstance(pipe, Connection)
                    try:
                        kind, number, what = pipe.recv()
                    except EOFError:
                        self._ended(pipe)
                        continue
                    if kind == "begin":
                        self._running[pipe] = number
                    elif kind == "end":
                        self._report(number, what)
                    else:
                        self._hooks.pytest_warning_recorded.call_historic(kwargs=what)
                if self._session.shouldfail:
                    os.truncate(self._queue, 0)
        finally:
            os.truncate(self._queue, 0)
            for pid in self._pids.values():
                os.waitpid(pid, 0)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        for number in list(self._left):
            self._lost(number, "it was not run: the process that was to run it had ended")

    def _fork(self) -> None:
        pipe, there = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the threads of libraries, too
            pid = os.fork()
        if pid:
            there.close()
            self._pids[pipe] = pid
            return
        code = 1
        try:
            # The first threads to use torch would make its pool of threads anew, each on its own, and some find none.
            torch.set_num_threads(torch.get_num_threads())
            for each in (*self._pids, pipe):  # who writes into one learns that the parent has ended
                each.close()
            Runner(self._session, self._queue, there).run()
            code = 0
        except KeyboardInterrupt:
            pass  # the parent says so
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # what is done at the parent's exit is not done here

    def _ended(self, pipe: Connection) -> None:
        status = os.waitpid(self._pids.pop(pipe), 0)[1]
        pipe.close()
        if status:
            self._lost(self._running.get(pipe, 0), f"its process ended with {os.waitstatus_to_exitcode(status)}")

    def _lost(self, number: int, why: str) -> None:
        item = self._session.items[number]
        self._report(number, [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")])

    def _report(self, number: int, reports: list[Any]) -> None:
        self._left.pop(number, None)
        item = self._session.items[number]
        self._hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            if isinstance(report, dict):
                report = self._hooks.pytest_report_from_serializable(config=self._session.config, data=report)
            self._hooks.pytest_runtest_logreport(report=report)
        self._hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


class Runner:
    """In a child: runs parts while there are any, and says what became of each test."""

    def __init__(self, session: pytest.Session, queue: int, pipe: Connection) -> None:
        self._session, self._queue, self._pipe = session, queue, pipe
        self._number = -1
        self._failures = 0

    def run(self) -> None:
        plugins = self._session.config.pluginmanager
        capture: Any = plugins.get_plugin("capturemanager")
        capture.stop_global_capturing()  # the parent's files have one position in all processes
        capture.start_global_capturing()
        plugins.register(self)
        items, enough = self._session.items, self._session.config.option.maxfail
        try:
            for number, following in pairwise(chain(self._numbers(), [None])):
                assert number is not None
                if enough and self._failures >= enough:
                    break  # the parent ends the others
                self._number = number
                self._pipe.send(("begin", number, None))
                after = None if following is None else items[following]
                self._session.config.hook.pytest_runtest_protocol(item=items[number], nextitem=after)
        finally:
            tear_down(self._session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        serialize = item.config.hook.pytest_report_to_serializable
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        self._failures += any(report.failed for report in reports)
        self._pipe.send(("end", self._number, [serialize(config=item.config, report=report) for report in reports]))
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if self._number < 0:
            return  # the parent has seen it
        text = UserWarning(f"{warning_message.category.__name__}: {warning_message.message}")
        message = warnings.WarningMessage(text, UserWarning, warning_message.filename, warning_message.lineno)
        what = {"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
        self._pipe.send(("warning", self._number, what))

    def _numbers(self) -> Iterator[int]:
        while part := os.read(self._queue, PART.size):
            for number in range(*PART.unpack(part)):
                if os.fstat(self._queue).st_size:  # else no more are wanted
                    yield number
