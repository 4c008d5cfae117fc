"""What a worker of `launcher.run` does: it makes one call, and writes the outcome, which the caller reads at the end.

Processes share the memory by inheriting a file descriptor. It has no name and no size limit. Unlike a pipe, it has no
end to wait for, which a stray process could hold open.
"""

from __future__ import annotations

import builtins
import linecache
import mmap
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from kvstore.job.exit_report import is_verbose
from kvstore.job.settings import VERBOSE
from kvstore.job.tracebacks import described, shortened

MAX_DEPTH = 10
WHERE = 'define it at the top of a module, or of the script above its `if __name__ == "__main__":`'

# The first byte says how far the worker got. It is written last, so that no partial outcome is read.
_BEGUN, _RETURNED, _FAILED = b"b", b"r", b"f"


def make_memory() -> int:
    """Return a file descriptor of empty memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvstore-call")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def view_memory(fd: int) -> mmap.mmap:
    """The content as a file to read, with a position of its own."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)


@dataclass(frozen=True)
class Returned:
    """The call has returned this."""

    value: Any


class Failed(NamedTuple):
    """The call has failed."""

    when: float  # the time, by a clock that all processes of the machine share
    how: str  # what happened: `raised ValueError: no data`
    details: str
    error: bytes | None  # the exception, pickled; None if it cannot be


@dataclass(frozen=True)
class Unfinished:
    """The worker has ended without an outcome, in the call or before it."""

    begun: bool


Outcome = Returned | Failed | Unfinished


def begin(fd: int) -> None:
    os.pwrite(fd, _BEGUN, 0)


def put_value(fd: int, value: object) -> None:
    """Write what the call has returned. Raises Exception: it cannot be pickled."""
    # With multiprocessing's pickler, tensors would stay in the memory of the worker, which ends.
    _put(fd, _RETURNED, value)


def put_error(fd: int, error: BaseException, how: str | None = None) -> None:
    """Write how the call has failed. `how`: what happened, if the call itself has not raised it."""
    when = time.monotonic()
    text = described(error)
    details = (
        "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if is_verbose(os.environ)
        else shortened(error, f"{VERBOSE.name}=1 shows all")
    )
    pickled = _round_trip(error) if how is None and isinstance(error, Exception) else None
    failed = Failed(when, f"raised {text}" if how is None else f"{how}: {text}", details, pickled)
    _put(fd, _FAILED, tuple(failed))


def get(fd: int) -> Outcome:
    """Read the outcome. Raises Exception: it cannot be unpickled here."""
    state = os.pread(fd, 1, 0)
    if state not in (_RETURNED, _FAILED):
        return Unfinished(begun=state == _BEGUN)
    with view_memory(fd) as pages:
        pages.seek(1)
        value = pickle.load(pages)  # noqa: S301 (from our own child, through a descriptor that only it has)
    return Returned(value) if state == _RETURNED else Failed(*value)


def culprit(name: str, value: object, dump: Callable[[object], object], depth: int = MAX_DEPTH) -> tuple[str, object]:
    """The part of a value that cannot be pickled, as an expression (`args[0]['lock']`), and the part itself.

    `value`: a value that `dump` refuses. `dump`: pickles a value, or raises. `depth`: the number of levels to search.
    """
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    for key, part in parts if depth else []:
        try:
            dump(part)
        except Exception:
            return culprit(f"{name}[{key!r}]", part, dump, depth - 1)
    return name, value


def _put(fd: int, state: bytes, value: object) -> None:
    with os.fdopen(os.dup(fd), "r+b") as file:
        file.seek(1)
        pickle.Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    os.pwrite(fd, state, 0)


def _round_trip(error: Exception) -> bytes | None:
    """The pickled exception; None if it cannot be unpickled, as many that want other arguments than they keep."""
    try:
        pickled = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        return pickled if type(pickle.loads(pickled)) is type(error) else None  # noqa: S301 (made the line before)
    except Exception:
        return None


class Surroundings(NamedTuple):
    """What a function of a notebook finds around it, and a new process lacks."""

    names: dict[str, Any]  # functions and classes by their names in `__main__`
    builtins: dict[str, Any]  # functions that IPython has added to the builtins
    sources: dict[str, Any]  # entries of `linecache`, so that tracebacks show the lines of cells

    def enter(self) -> None:
        vars(sys.modules["__main__"]).update(self.names)
        vars(builtins).update(self.builtins)
        linecache.cache.update(self.sources)


def work(call: int, result: int) -> None:
    """Make the call, and write its outcome.

    `call`: the memory with the call: the name of the function, the function, its arguments, and its surroundings.
    `result`: the memory for the outcome.
    """
    for fd in (call, result):
        os.set_inheritable(fd, False)
    begin(result)
    with view_memory(call) as pages:
        name = pickle.load(pages)  # noqa: S301 (from our parent, by inheritance: no other process can write there)
        try:
            function, args, kwargs, surroundings = pickle.load(pages)  # noqa: S301 (likewise)
            surroundings.enter()
        except Exception as error:
            _fail(result, error, f"could not load {name} or its arguments; {WHERE}")
    try:
        value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    except BaseException as error:
        # The traceback begins in the user's code.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        _fail(result, error)
    try:
        put_value(result, value)
    except Exception as error:
        where, _ = culprit("result", value, pickle.dumps)
        _fail(result, error, f"returned a {type(value).__name__} that cannot be pickled: {where}")


def _fail(result: int, error: BaseException, how: str | None = None) -> NoReturn:
    put_error(result, error, how)
    sys.last_value = error  # as after an exception that ends a script: at exit, the store tells the other members
    sys.exit(1)
