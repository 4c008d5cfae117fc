from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import called
import pytest

from launcher.calls import memory
from launcher.calls.handover import Handover
from launcher.calls.outcome import Unfinished
from launcher.errors import LaunchError


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_worker_has_a_start_of_its_own_and_one_call() -> None:
    handover = Handover(divmod, (7, 3), {}, 3)
    assert handover.name == "divmod"
    assert len({start.writer for start in handover.starts}) == 3
    for rank, start in enumerate(handover.starts):
        assert start.reader in start.pass_fds
        assert start.writer not in start.pass_fds
        assert handover.outcome(rank) == Unfinished(begun=False)
        for fd in start.pass_fds:
            os.fstat(fd)
    shared = set.intersection(*(set(start.pass_fds) for start in handover.starts))
    calls = [fd for fd in shared if os.fstat(fd).st_size]
    with memory.view(calls[0]) as pages:
        assert [pickle.load(pages), pickle.load(pages)] == ["divmod", (divmod, (7, 3), {})]
    handover.close()


def test_nothing_stays_open() -> None:
    before = open_files()
    handover = Handover(called.rank, (), {}, 2)
    handover.started()
    handover.close()
    handover.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (lambda: None, (), {}, r"cannot hand .*<lambda> itself \(a function has to have a name in a module"),
        (divmod, (1, [threading.Lock()]), {}, r"cannot hand args\[1\]\[0\] to the workers \(TypeError: .*lock"),
        (dict, (), {"a": {"b": threading.Lock()}}, r"cannot hand kwargs\['a'\]\['b'\] to the workers"),
    ],
)
def test_what_cannot_be_pickled_is_named_and_nothing_stays_open(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    before = open_files()
    with pytest.raises(LaunchError, match=message):
        Handover(function, args, kwargs, 2)
    assert open_files() == before
