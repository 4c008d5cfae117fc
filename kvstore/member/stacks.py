"""Where the threads of this process are in their code, as texts: files, lines and functions, and nothing else.

No values and no lines of the source, so nothing secret leaves the process. Files are named relative to the working
directory, or to the directory that Python imports them from.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from kvstore import wire
from kvstore.wire.guests import MAX_PLACE, MOST_FRAMES, MOST_THREADS

_OURS = ("kvstore", "workers", "servers", "launcher")
_SOURCE = Path(__file__).parents[2]  # where these lie
_INSTALLED = ("site-packages", "dist-packages")
_TYPED = ("<stdin>", "<string>", "<console>", "<ipython-input")  # code of the program that is in no file
_GENERATED = f"{os.sep}torchinductor_"
_DEEPEST = 2000  # frames of a thread that are looked at
_MOST_FILES = 4096  # whose names are remembered; each cell of a notebook is one
_LONGEST_NAME = 128
_LONGEST_DOING = 256
_NEVER_S = 10.0  # between two switches of threads
_ALONE = threading.Lock()  # else one thread would let the others go on while another one must not
# What calls of a library do: the file or the directory that they are in, functions (empty for all), and words.
# The outermost call that matches counts: a queue says more than the lock inside it.
_DOINGS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("queue.py", ("get", "put", "join"), "waits for a queue"),
    ("concurrent/futures/", ("result", "wait", "as_completed"), "waits for a future"),
    ("threading.py", ("join", "_wait_for_tstate_lock"), "waits for a thread to end"),
    ("threading.py", ("wait", "acquire", "__enter__"), "waits for a lock"),
    ("subprocess.py", (), "waits for a program"),
    ("multiprocessing/", (), "waits for another process"),
    ("selectors.py", (), "waits for files or sockets"),
    ("socket.py", (), "waits for a socket"),
    ("ssl.py", (), "waits for a socket"),
    ("torch/distributed/", (), "is in torch.distributed"),
    ("torch/utils/data/", (), "reads input"),
    ("torch/autograd/", (), "computes gradients"),
    ("torch/optim/", (), "updates weights"),
    ("torch/nn/", (), "computes"),
)


class Place(NamedTuple):
    """A line of code that a thread is at. ``file`` is for messages, ``path`` Python's; ``line`` is 0 if unknown."""

    file: str
    line: int
    function: str
    path: str

    def __str__(self) -> str:
        text = f"{self.file}:{self.line} in {self.function}"
        return text if len(text) <= MAX_PLACE else "..." + text[3 - MAX_PLACE :]


def where(node: wire.Node, number: int, program: threading.Thread | None = None) -> wire.Stacks:
    """Return where this process is, without the calling thread: the answer of ``node`` to question ``number``.

    Args:
        program: the thread whose place counts; without one that is alive, the main thread.
    """
    stacks = _stacks()
    stacks.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
    first = (program if program is not None and program.is_alive() else threading.main_thread()).ident
    place, doing = described(stacks.get(first or 0, ()))
    return wire.Stacks(node, number, place, doing, _listed(stacks, names, first))


def place_of(program: threading.Thread | None) -> str:
    """Return the place of ``where`` alone, which takes some ten microseconds; empty if it is not known."""
    return place_of_thread(
        (program if program is not None and program.is_alive() else threading.main_thread()).ident or 0
    )


def place_of_thread(ident: int) -> str:
    return described(_stacks(ident).get(ident, ()))[0]


def only_these_act(idents: Collection[int]) -> bool:
    """Return whether nothing happens in the program unless one of these threads goes on.

    Threads of libraries, and ours, do what the program's threads give them to do. A thread is the program's if one of
    its frames is; where the program is an installed package, if one of its frames is that package's. The handler of a
    timer's signal runs in a thread that waits, and may raise.
    """
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        return False
    stacks = _stacks()
    programs = {_package(place) for ident in idents for place in _installed(stacks.get(ident, ()))[:1]}
    return not any(
        _kind(place.path) in ("own", "generated") or (_kind(place.path) == "installed" and _package(place) in programs)
        for ident, stack in stacks.items()
        if ident not in idents
        for place in stack
    )


def _installed(stack: Sequence[Place]) -> list[Place]:
    kinds = [_kind(place.path) for place in stack]
    return [] if "own" in kinds else [place for place, kind in zip(stack, kinds, strict=True) if kind == "installed"]


def _stacks(only: int | None = None) -> dict[int, list[Place]]:
    """Return where each thread is, or ``only`` this one: the innermost place last.

    Nothing is collected meanwhile. Before Python 3.12, garbage may be collected within ``sys._current_frames``,
    which holds a lock of the interpreter's, and hand the interpreter to a thread that needs the same lock. Then the
    process stands still for ever (https://github.com/python/cpython/issues/106883).

    Nor does another thread run. Its frames end while this one walks over them, and where torch's compiler had been used
    the process crashed, with Python 3.11.7 and torch 2.13.0.
    """
    lines: dict[int, list[tuple[CodeType, int]]] = {}
    with _ALONE:
        collects, interval = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(_NEVER_S)
        try:
            for ident, frame in sys._current_frames().items():
                if only in (None, ident):
                    lines[ident] = _lines(frame)
        finally:
            sys.setswitchinterval(interval)
            if collects:
                gc.enable()
    directory = _working_directory()
    return {
        ident: [
            Place(_shown(code.co_filename, directory), line, code.co_name, code.co_filename)
            for code, line in reversed(found)
        ]
        for ident, found in lines.items()
    }


def _lines(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return found


def described(stack: Sequence[Place]) -> tuple[str, str]:
    """Return where a thread is, and what it does there.

    Returns:
        The innermost place in the program's own code; if the program is an installed package, in that package; and if
        there is neither, the innermost that is not the standard library's. And what is called from there, in words:
        ``waits for a lock (threading.py:320 in wait)``. Empty texts if nothing is known.
    """
    if not stack:
        return "", ""
    kinds = [_kind(place.path) for place in stack]
    own = [number for number, kind in enumerate(kinds) if kind == "own"]
    others = [number for number, kind in enumerate(kinds) if kind not in ("standard", "nowhere")]
    if not own and others and kinds[others[0]] == "installed":
        program = _package(stack[others[0]])
        own = [number for number in others if _package(stack[number]) == program]
    number = (own or others or [len(stack) - 1])[-1]
    return str(stack[number]), _doing(stack[number + 1 :])


def _doing(called: Sequence[Place]) -> str:
    """Say in words what the calls do that lead on from a place in the program's code."""
    called = [place for place in called if _kind(place.path) != "nowhere"]
    ours = [number for number, place in enumerate(called) if _kind(place.path) == "ours"]
    beyond = called[ours[-1] + 1 :] if ours else called
    if ours and not any(_kind(place.path) == "installed" for place in beyond):
        return _inside([called[number] for number in ours])
    for place in beyond:
        for part, functions, words in _DOINGS:
            if _named(place, part) and (not functions or place.function in functions):
                inside = [other for other in beyond if _named(other, part)][-1]
                return f"{words} ({inside})"[:_LONGEST_DOING]
    return f"calls {beyond[0].function} ({beyond[-1]})"[:_LONGEST_DOING] if beyond else ""


def _inside(ours: Sequence[Place]) -> str:
    """Say which call of this project a thread is in: of a store, rather than of what calls the store."""
    call = next((place for place in ours if place.file.startswith("kvstore/")), ours[0])
    return f"is inside {call.function}() of {call.file.partition('/')[0]}"


def _package(place: Place) -> str:
    return place.file.partition(os.sep)[0]


def _named(place: Place, part: str) -> bool:
    if part.endswith("/"):
        return place.file.startswith(part) and _kind(place.path) != "own"
    return place.file == part and _kind(place.path) == "standard"


def _listed(stacks: Mapping[int, Sequence[Place]], names: Mapping[int, str], first: int | None) -> list[list[object]]:
    """Return names and places of the threads: ``first``, the program's own, and then ours."""

    def rank(ident: int) -> tuple[int, str]:
        if ident == first:
            return 0, ""
        return 2 if _is_ours(stacks[ident]) else 1, names.get(ident, "")

    chosen = sorted(stacks, key=rank)[:MOST_THREADS]
    return [
        [names.get(ident, f"thread {ident}")[:_LONGEST_NAME], [str(place) for place in stacks[ident][-MOST_FRAMES:]]]
        for ident in chosen
    ]


def _is_ours(stack: Iterable[Place]) -> bool:
    """Whether a thread is one that this package has started: its outermost code beyond the library's is ours."""
    first = next((place for place in stack if _kind(place.path) != "standard"), None)
    return first is not None and _kind(first.path) == "ours"


# ---- files


@lru_cache(_MOST_FILES)
def _kind(path: str) -> str:
    """Whose code this is: ``own`` is the program's. Without a file, code is ``nowhere``."""
    if path.startswith("<") and not path.startswith(_TYPED):
        return "nowhere"
    return next((kind for kind, directory in _directories() if path.startswith(directory)), _elsewhere(path))


def _elsewhere(path: str) -> str:
    if any(f"{os.sep}{name}{os.sep}" in path for name in _INSTALLED):
        return "installed"
    return "generated" if _GENERATED in path else "own"


@cache
def _directories() -> Sequence[tuple[str, str]]:
    """Return where files lie that are not the program's, and whose they are. Longer paths come first."""
    named = sysconfig.get_paths()
    found = {("ours", str(_SOURCE / name)) for name in _OURS}
    found |= {("installed", named[scheme]) for scheme in ("purelib", "platlib")}
    found |= {("installed", str(Path(named["stdlib"]) / name)) for name in _INSTALLED}
    found |= {("standard", named[scheme]) for scheme in ("stdlib", "platstdlib", "scripts")}
    found |= {(kind, os.path.realpath(path)) for kind, path in found}
    return sorted(((kind, path + os.sep) for kind, path in found), key=lambda entry: -len(entry[1]))


@lru_cache(_MOST_FILES)
def _shown(path: str, working_directory: str) -> str:
    """Return the name of a file for messages."""
    kind = _kind(path)
    if kind == "own":
        return _relative(path, working_directory)
    if kind == "ours":
        return _relative(path, str(_SOURCE))
    directory = next((directory for _, directory in _directories() if path.startswith(directory)), "")
    if directory or kind in ("nowhere", "generated"):
        return path[len(directory) :]
    return max((path.partition(f"{os.sep}{name}{os.sep}")[2] for name in _INSTALLED), key=len)


def _relative(path: str, directory: str) -> str:
    inside = directory and path.startswith(directory.rstrip(os.sep) + os.sep)
    return os.path.relpath(path, directory) if inside else path


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return ""
