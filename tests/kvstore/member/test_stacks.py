"""Where threads are, in words: their files, lines and functions, and nothing else."""

from __future__ import annotations

import gc
import queue
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import kvstore
from kvstore import wire
from kvstore.member.stacks import Place, described, only_these_act, place_of, where
from kvstore.wire.guests import MAX_PLACE, MOST_FRAMES, MOST_THREADS

NODE = wire.Node("worker", 1, 1)
STANDARD = Path(sysconfig.get_paths()["stdlib"])
INSTALLED = Path(sysconfig.get_paths()["purelib"])
OURS = Path(kvstore.__file__).parent


def at(path: Path | str, line: int = 1, function: str = "f", root: Path | None = None) -> Place:
    file = str(path) if root is None else str(Path(path).relative_to(root))
    return Place(file, line, function, str(path))


MAIN = at("/home/me/train.py", 90, "main")
LOAD = at("/home/me/data/images.py", 41, "load_batch")
PULL = at(OURS / "client" / "store.py", 7, "pull", OURS.parent)
CLIENT = at(OURS / "member" / "client.py", 9, "wait", OURS.parent)
FIT = at(OURS.parent / "workers/training/fit.py", 7, "fit", OURS.parent)
QUEUE = at(STANDARD / "queue.py", 171, "get", STANDARD)
WAIT = at(STANDARD / "threading.py", 320, "wait", STANDARD)
JOIN = at(STANDARD / "threading.py", 1100, "join", STANDARD)
JSON = at(STANDARD / "json" / "decoder.py", 3, "decode", STANDARD)
LOGGED = at(INSTALLED / "torch/distributed/c10d_logger.py", 81, "wrapper", INSTALLED)
BARRIER = at(INSTALLED / "torch/distributed/distributed_c10d.py", 4159, "barrier", INSTALLED)
LOADER = at(INSTALLED / "torch/utils/data/dataloader.py", 631, "__next__", INSTALLED)
BACKWARD = at(INSTALLED / "torch/autograd/__init__.py", 347, "backward", INSTALLED)
SCRIPT = at(Path(sysconfig.get_paths()["scripts"]) / "train-images", 8, "<module>")
CLI = at(INSTALLED / "images/cli.py", 30, "main", INSTALLED)
CLI_LOAD = at(INSTALLED / "images/input.py", 31, "load", INSTALLED)
COMPILED = at("<eval_with_key>.0", 7, "forward")
GENERATED = at("/tmp/torchinductor_me/xy/cxyz.py", 70, "forward")
FROZEN = at("<frozen importlib._bootstrap>", 1, "_call")


@pytest.mark.parametrize(
    ("stack", "place", "doing"),
    [
        ([], "", ""),
        ([MAIN, LOAD], LOAD, ""),
        ([MAIN, LOAD, WAIT], LOAD, f"waits for a lock ({WAIT})"),
        ([MAIN, LOAD, QUEUE, WAIT], LOAD, f"waits for a queue ({QUEUE})"),
        ([MAIN, JOIN, WAIT], MAIN, f"waits for a thread to end ({WAIT})"),
        ([MAIN, LOGGED, BARRIER], MAIN, f"is in torch.distributed ({BARRIER})"),
        ([MAIN, LOADER, QUEUE, WAIT], MAIN, f"reads input ({LOADER})"),
        ([MAIN, PULL, CLIENT, WAIT], MAIN, "is inside pull() of kvstore"),
        ([MAIN, FIT, PULL, CLIENT], MAIN, "is inside pull() of kvstore"),
        ([MAIN, FIT, WAIT], MAIN, "is inside fit() of workers"),
        ([MAIN, FIT, LOADER, QUEUE], MAIN, f"reads input ({LOADER})"),
        ([MAIN, BACKWARD, FIT, PULL, WAIT], MAIN, "is inside pull() of kvstore"),
        ([MAIN, FIT, LOAD, WAIT], LOAD, f"waits for a lock ({WAIT})"),
        ([MAIN, FROZEN, JSON], MAIN, f"calls decode ({JSON})"),
        ([MAIN, FROZEN], MAIN, ""),
        ([PULL, CLIENT, WAIT], CLIENT, f"waits for a lock ({WAIT})"),
        ([QUEUE, WAIT], WAIT, ""),
        ([SCRIPT, CLI, CLI_LOAD, LOADER, QUEUE], CLI_LOAD, f"reads input ({LOADER})"),
        ([SCRIPT, CLI, PULL, WAIT], CLI, "is inside pull() of kvstore"),
        ([MAIN, COMPILED, GENERATED], MAIN, f"calls forward ({GENERATED})"),
        ([at("<stdin>", 3, "<module>"), WAIT], at("<stdin>", 3, "<module>"), f"waits for a lock ({WAIT})"),
    ],
)
def test_the_place_is_the_programs_innermost_and_what_is_called_from_there_is_told(stack, place, doing):
    assert described(stack) == (str(place) if place else "", doing)


def test_a_long_name_loses_its_beginning():
    text = str(at("/home/" + "x" * 1000 + "/train.py", 41, "load"))
    assert len(text) == MAX_PLACE
    assert text.startswith("...xxx")
    assert text.endswith("x/train.py:41 in load")


@contextmanager
def thread_in(target: Callable[[queue.Queue[int]], object], name: str = "held") -> Iterator[threading.Thread]:
    """A thread that is inside ``target`` when this begins, and is let go when it ends."""
    inside = threading.Event()
    held: queue.Queue[int] = queue.Queue()

    def run() -> None:
        inside.set()
        target(held)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    assert inside.wait(60.0)
    yield thread
    held.put(1)
    thread.join()


def until_it_waits(thread: threading.Thread, program: threading.Thread | None) -> wire.Stacks:
    """The answer once ``thread`` waits, which it does soon."""
    while True:
        stacks = where(NODE, 7, program)
        if any(name == thread.name and "threading.py" in frames[-1] for name, frames in stacks.threads):
            return stacks


def test_a_process_tells_where_its_threads_are_and_the_answer_can_be_sent():
    secret = "a value that must stay here"

    def held_up(held: queue.Queue[int], password: str = secret) -> int:
        return held.get()

    with thread_in(held_up) as thread:
        stacks = until_it_waits(thread, thread)
    line = held_up.__code__.co_firstlineno + 1
    assert (stacks.node, stacks.number) == (NODE, 7)
    assert stacks.place.endswith(f"test_stacks.py:{line} in held_up")
    assert stacks.doing.startswith("waits for a queue (queue.py:")
    name, frames = stacks.threads[0]
    assert name == "held", "the program's thread comes first"
    assert stacks.place in frames
    frame = wire.encode(stacks)[0]
    assert wire.decode([frame]) == stacks
    assert secret.encode() not in bytes(frame)
    assert b"held.get()" not in bytes(frame)


def test_the_main_thread_counts_where_the_joining_thread_has_ended():
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    answers: list[wire.Stacks] = []
    for program in (ended, None):
        asking = threading.Thread(target=lambda program=program: answers.append(where(NODE, 1, program)))
        asking.start()
        asking.join()
    for stacks in answers:
        assert "in test_the_main_thread_counts_where_the_joining_thread_has_ended" in stacks.place
        assert stacks.threads[0][0] == threading.main_thread().name


def test_a_deep_stack_and_many_threads_fit_into_an_answer():
    def deep(held: queue.Queue[int], more: int = MOST_FRAMES) -> int:
        return deep(held, more - 1) if more else held.get()

    with thread_in(deep, "x" * 1000) as thread:
        stacks = where(NODE, 1, thread)
    assert len(stacks.threads) <= MOST_THREADS
    assert max(len(frames) for _, frames in stacks.threads) <= MOST_FRAMES
    assert wire.decode(wire.encode(stacks)) == stacks


def test_files_are_named_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "inside").mkdir()
    path = tmp_path / "inside" / "train_here.py"
    path.write_text("def load(held):\n    return held.get()\n")
    scope: dict[str, Callable[[queue.Queue[int]], object]] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    monkeypatch.chdir(tmp_path)
    with thread_in(scope["load"]) as thread:
        assert until_it_waits(thread, thread).place == "inside/train_here.py:2 in load"
        monkeypatch.chdir("/")
        assert where(NODE, 1, thread).place.endswith("inside/train_here.py:2 in load")


def test_a_thread_of_the_program_and_a_timer_may_act_and_a_thread_of_a_library_may_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(signal, "getitimer", lambda _: (0.0, 0.0))
    held: queue.Queue[int] = queue.Queue()
    library = threading.Thread(target=held.get)
    library.start()
    assert only_these_act(everyone() - {library.ident})
    held.put(1)
    library.join()
    with thread_in(queue.Queue.get) as program:
        assert not only_these_act(everyone() - {program.ident})
    monkeypatch.setattr(signal, "getitimer", lambda _: (1.0, 0.0))
    assert not only_these_act(everyone())


def everyone() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.ident is not None}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected between instructions only")
@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_the_interpreter_lists_its_threads(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    frames, seen = sys._current_frames(), list[bool]()

    def listed() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return frames

    monkeypatch.setattr(sys, "_current_frames", listed)
    if not collects:
        gc.disable()
    try:
        place_of(None)
        where(NODE, 1)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert seen == [False, False]
