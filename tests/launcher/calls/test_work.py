from __future__ import annotations

import linecache
import os
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.calls import outcome
from launcher.calls.outcome import Failed, Outcome, Returned, Unfinished
from launcher.calls.work import Adjusted, Defined, Imported, Valued, named, take, work

Work = Callable[..., Outcome]


@pytest.fixture
def made() -> Iterator[Work]:
    """Make a call as a worker does, and return what became of it."""
    fds: list[int] = []

    def make(function: Any, *args: Any, code: int | None = None, call: bytes | None = None) -> Outcome:
        fds.extend([outcome.make_memory(), outcome.make_memory()])
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
    call, result = outcome.make_memory(), outcome.make_memory()
    for fd in (call, result):
        os.set_inheritable(fd, True)
    os.write(call, pickle.dumps("x") + pickle.dumps((int, (), {})))
    work(call, result)
    assert not os.get_inheritable(call)
    assert not os.get_inheritable(result)
    os.close(call)
    os.close(result)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    return module


def test_each_step(main: Any) -> None:
    take(Imported("p", "os.path"))
    take(Valued("n", 3))
    take(Defined("add", "n = 0\nadd = lambda x, y=2: x + y + n\n", "<cell>", 2))
    take(Adjusted("add", {"__defaults__": (10,)}))
    assert main.p.join("a", "b") == "a/b"
    assert main.add(1) == 14  # of the cell that statement alone was executed
    assert named("add") is main.add
    assert named("p.join") is main.p.join


def test_a_traceback_shows_the_line_of_the_cell(main: Any) -> None:
    take(Defined("fail", "import os\n\ndef fail():\n    raise ValueError('no data')\n", "<cell>", 3))
    with pytest.raises(ValueError, match="no data") as caught:
        main.fail()
    lines = "".join(traceback.format_exception(caught.value))
    assert "File \"<cell>\", line 4, in fail\n    raise ValueError('no data')" in lines


def test_a_definition_that_is_not_there(main: Any) -> None:
    with pytest.raises(LookupError, match="<cell> does not define train in line 2"):
        take(Defined("train", "def train(): pass\n", "<cell>", 2))
