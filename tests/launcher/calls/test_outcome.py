from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from called import Odd

import kvstore
from launcher.calls import outcome
from launcher.calls.outcome import Failed, Outcome, Returned, Surroundings, Unfinished, work


@pytest.fixture
def fd() -> Iterator[int]:
    made = outcome.make_memory()
    yield made
    os.close(made)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_how_far_the_worker_came(fd: int) -> None:
    assert outcome.get(fd) == Unfinished(begun=False)
    outcome.begin(fd)
    assert outcome.get(fd) == Unfinished(begun=True)
    outcome.put_value(fd, {"rank": 1})
    assert outcome.get(fd) == Returned({"rank": 1})


def test_a_value_that_cannot_be_pickled_leaves_the_call_unfinished(fd: int) -> None:
    outcome.begin(fd)
    with pytest.raises(TypeError, match="lock"):
        outcome.put_value(fd, threading.Lock())
    assert outcome.get(fd) == Unfinished(begun=True)


def test_an_error_arrives_with_its_traceback(fd: int) -> None:
    outcome.put_error(fd, raised(ValueError("no data")))
    failed = outcome.get(fd)
    assert isinstance(failed, Failed)
    assert failed.how == "raised ValueError: no data"
    assert failed.details.startswith("Traceback")
    assert "in raised" in failed.details
    assert failed.error is not None
    error = pickle.loads(failed.error)
    assert (type(error), str(error)) == (ValueError, "no data")


def test_our_frames_are_left_out_unless_they_are_asked_for(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvstore.UnknownName) as caught:
        kvstore.create("dist_snyc")
    details = []
    for verbose in ("0", "1"):
        monkeypatch.setenv("KVSTORE_VERBOSE", verbose)
        outcome.put_error(fd, caught.value)
        failed = outcome.get(fd)
        assert isinstance(failed, Failed)
        details.append(failed.details)
    assert "KVSTORE_VERBOSE=1 shows all" in details[0]
    assert ["registry.py" in text for text in details] == [False, True]


@pytest.mark.parametrize("error", [Odd("x", "y"), KeyboardInterrupt(), ValueError(threading.Lock())])
def test_an_error_that_would_not_come_out_again_is_told_in_words(fd: int, error: BaseException) -> None:
    outcome.put_error(fd, error)
    failed = outcome.get(fd)
    assert isinstance(failed, Failed)
    assert failed.error is None
    assert failed.how.startswith(f"raised {'called.' if type(error) is Odd else ''}{type(error).__name__}")


def test_an_error_of_ours_says_what_it_is_about(fd: int) -> None:
    outcome.put_error(fd, ValueError("x"), "could not load train")
    failed = outcome.get(fd)
    assert isinstance(failed, Failed)
    assert (failed.how, failed.error) == ("could not load train: ValueError: x", None)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (LOCK, "args"),
        ([1, LOCK], "args[1]"),
        ({"a": 1, "b": {"c": (0, LOCK)}}, "args['b']['c'][1]"),
        ([[[LOCK]]], "args[0][0][0]"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named(value: Any, where: str) -> None:
    assert outcome.culprit("args", value, pickle.dumps) == (where, LOCK)


def test_what_is_deeper_than_anybody_looks_is_named_as_far_as_that() -> None:
    assert outcome.culprit("args", [[[LOCK]]], pickle.dumps, depth=2) == ("args[0][0]", [LOCK])


def test_what_was_written_is_read_from_the_beginning_by_each_reader(fd: int) -> None:
    os.write(fd, b"one two")
    with outcome.view_memory(fd) as first, outcome.view_memory(fd) as second:
        assert first.read(3) == b"one"
        assert second.read() == b"one two"
        assert first.read() == b" two"


def test_it_is_for_those_alone_who_inherit_it(fd: int) -> None:
    code = "import os, sys; os.pwrite(int(sys.argv[1]), b'theirs', 0)"
    argv = [sys.executable, "-S", "-c", code, str(fd)]
    assert subprocess.run(argv, stderr=subprocess.DEVNULL).returncode == 1
    subprocess.run(argv, pass_fds=(fd,), check=True)
    with outcome.view_memory(fd) as pages:
        assert pages.read() == b"theirs"


def test_where_the_system_has_no_such_memory_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = outcome.make_memory()
    os.write(fd, b"x")
    with outcome.view_memory(fd) as pages:
        assert pages.read() == b"x"
    os.close(fd)


Work = Callable[..., Outcome]
NOTHING = Surroundings({}, {}, {})


@pytest.fixture
def made() -> Iterator[Work]:
    """Make a call as a worker does, and return what became of it."""
    fds: list[int] = []

    def make(function: Any, *args: Any, code: int | None = None, call: bytes | None = None) -> Outcome:
        fds.extend([outcome.make_memory(), outcome.make_memory()])
        os.write(fds[-2], pickle.dumps("train"))
        os.write(fds[-2], pickle.dumps((function, args, {}, NOTHING)) if call is None else call)
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
    assert "calls/outcome.py" not in failed.details
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
    os.write(call, pickle.dumps("x") + pickle.dumps((int, (), {}, NOTHING)))
    work(call, result)
    assert not os.get_inheritable(call)
    assert not os.get_inheritable(result)
    os.close(call)
    os.close(result)
