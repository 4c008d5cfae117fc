"""The observer that ``kvstore-status`` becomes: what it is told, and what not."""

from __future__ import annotations

import socket
from pathlib import Path

from viewed_job import PLACE

from kvstore.job.trace_target import TraceTarget
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.command import ObserverProgram, PreparedPage

TOKEN = "t" * 43
FOREIGN = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "x",
    "KVSTORE_TRACE": "1-3",
    "KVSTORE_TRACE_FILE": "/elsewhere",
    "KVSTORE_LIFELINE": "1",
    "KVSTORE_TIMEOUT_S": "7",
}


def test_a_page_is_told_its_socket_and_token_and_nothing_of_a_job_around_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = ObserverProgram(PLACE, PreparedPage(listener, TOKEN)).variables(FOREIGN, "/proc/self/fd/9")
        ours = {name: text for name, text in told.items() if name.startswith(("DMLC_", "KVSTORE_"))}
        assert ours == {
            "DMLC_ROLE": "observer",
            "KVSTORE_OBSERVE": "/proc/self/fd/9",
            "KVSTORE_DASHBOARD_FD": f"{listener.fileno()}",
            "KVSTORE_DASHBOARD_TOKEN": TOKEN,
            "KVSTORE_TIMEOUT_S": "7",
        }


def test_a_trace_is_told_its_file_and_rounds() -> None:
    told = ObserverProgram(PLACE, trace=TraceTarget(Path("/t/a.json"), RoundWindow(5, 9))).variables({}, "/p")
    assert (told["KVSTORE_TRACE_FILE"], told["KVSTORE_TRACE"]) == ("/t/a.json", "5-9")
    assert "KVSTORE_DASHBOARD_FD" not in told


def test_the_token_is_not_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert TOKEN not in repr(PreparedPage(listener, TOKEN))
