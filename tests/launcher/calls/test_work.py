from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.calls import memory, outcome
from launcher.calls.outcome import Failed, Outcome, Returned, Unfinished
from launcher.calls.work import work

Work = Callable[..., Outcome]


@pytest.fixture
def made() -> Iterator[Work]:
    """Make a call as a worker does, and return what became of it."""
    fds: list[int] = []

    def make(function: Any, *args: Any, code: int | None = None, call: bytes | None = None) -> Outcome:
        fds.extend([memory.make(), memory.make()])
        os.write(fds[-2], pickle.dumps("train"))
        os.write(fds[-2], pickle.dumps((function, args, {})) if call is None else call)
        if code is None:
            work(fds[-2], fds[-1])
        else:
            with pytest.raises(SystemExit) as left:
                work(fds[-2], fds[-1])
            assert left.value.code == code
        return outcome.get(fds[-1])

    yield make
    for fd in fds:
        os.close(fd)


def failing(text: str) -> None:
    raise ValueError(text)


def locked() -> dict[str, Any]:
    return {"lock": threading.Lock()}


def test_what_the_call_returns(made: Work) -> None:
    assert made(divmod, 7, 3) == Returned((2, 1))


def test_what_it_raises_begins_at_the_users_own_lines_and_is_known_at_exit(
    made: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    failed = made(failing, "no data", code=1)
    assert isinstance(failed, Failed)
    assert failed.how == "raised ValueError: no data"
    assert "in failing" in failed.details
    assert "calls/work.py" not in failed.details
    assert str(sys.last_value) == "no data"


def test_leaving_with_success_is_to_return_nothing(made: Work) -> None:
    assert made(sys.exit) == made(sys.exit, 0) == Returned(None)


def test_leaving_with_a_code_is_for_launcher_run_to_see(made: Work) -> None:
    assert made(sys.exit, 7, code=7) == Unfinished(begun=True)


def test_what_cannot_be_loaded_is_said_and_what_would_do(made: Work) -> None:
    failed = made(None, code=1, call=b"\x80\x05cno_such_module\nf\n.")
    assert isinstance(failed, Failed)
    assert failed.how.startswith("could not load train or its arguments; define it at the top of a module")
    assert "No module named 'no_such_module'" in failed.how


def test_what_cannot_be_sent_back_is_named(made: Work) -> None:
    failed = made(locked, code=1)
    assert isinstance(failed, Failed)
    assert failed.how.startswith("returned a dict that cannot be pickled: result['lock']")


def test_its_programs_do_not_inherit_the_memory(made: Work) -> None:
    call, result = memory.make(), memory.make()
    for fd in (call, result):
        os.set_inheritable(fd, True)
    os.write(call, pickle.dumps("x") + pickle.dumps((int, (), {})))
    work(call, result)
    assert not os.get_inheritable(call)
    assert not os.get_inheritable(result)
    os.close(call)
    os.close(result)
