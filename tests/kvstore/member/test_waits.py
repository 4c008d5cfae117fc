"""What a late call asks, what is said of calls that may wait in vain, and where threads are."""

from __future__ import annotations

import gc
import queue
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from played import BARRIER, Played, ask, client_of

import kvstore
from kvstore import wire
from kvstore.errors import DeadlineExceeded
from kvstore.member import client as client_module
from kvstore.member.client import MOST_PLACES, MOST_RANGES, Client, Explanations, find_out, grouped
from kvstore.member.mutual_waits import LOOK_S, BlockedTime, Findings
from kvstore.member.outstanding import Question
from kvstore.member.stacks import Place, described, only_these_act, place_of, where
from kvstore.ticket import Operation
from kvstore.wire.guests import MAX_PLACE, MOST_FRAMES, MOST_THREADS

# ---- what is asked when a call is late, in which order, and how long for


GUIDE = b"the scheduler"
Answer = Callable[[bytes, Any], Any]


class PlayedAsker:
    """Asks nobody: ``answer`` has what comes back, None for nothing."""

    def __init__(self, answer: Answer, guide: bytes | None = GUIDE) -> None:
        self.guide = guide
        self.node = wire.Node("worker", 0, 1)
        self.asked: list[tuple[bytes, Any]] = []
        self.waited: list[float] = []
        self.given_up: list[str] = []
        self._answer = answer

    def ask(self, operation: Operation, *questions: Question) -> None:
        for question in questions:
            message = question.message(wire.Sender(self.node, len(self.asked) + 1, 0))
            self.asked.append((question.peer, message))
            operation.open.add(len(self.asked))
            reply = self._answer(question.peer, message)
            if reply is not None:
                question.take(reply)
                operation.open.discard(len(self.asked))

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        if not condition():
            self.waited.append(timeout)
        return condition()

    def give_up(self, operation: Operation) -> None:
        self.given_up.append(operation.what)


def late() -> Operation:
    operation = Operation("push", ["w"])
    operation.open.add(7)
    return operation


def answers(_peer: bytes, message: Any) -> Any:
    if isinstance(message, wire.Explain):
        return wire.Explanation(message.seq, f"waits for {message.about}", [message.about])
    return wire.Located(message.seq, message.ranks, ["is at train.py:41 in load"] * len(message.ranks))


def test_every_peer_is_asked_what_and_then_the_scheduler_where() -> None:
    client = PlayedAsker(answers)
    found = find_out(client, late(), {b"server 0": 1, b"server 1": 2})
    assert found.known == ("server 0 waits for 1; server 1 waits for 2; workers 1-2 are at train.py:41 in load")
    me = client.node
    assert client.asked == [
        (b"server 0", wire.Explain(wire.Sender(me, 1, 0), 1)),
        (b"server 1", wire.Explain(wire.Sender(me, 2, 0), 2)),
        (GUIDE, wire.Locate(wire.Sender(me, 3, 0), "worker", [1, 2])),
    ]
    assert client.waited == []


def test_each_question_has_its_time() -> None:
    client = PlayedAsker(lambda _, message: None)
    found = find_out(client, late(), {b"server 0": 1})
    assert (found.known, found.silent) == ("server 0 does not answer", ("server 0",))
    assert client.waited == [client_module.EXPLAIN_S, client_module.LOCATE_S]
    assert [message.role for _, message in client.asked[1:]] == ["server"]
    assert client.given_up == ["question where others are"]


def test_where_there_is_no_scheduler_to_ask_or_it_is_silent_nobody_is_looked_for() -> None:
    for guide, peer in ((None, b"server 0"), (GUIDE, GUIDE)):
        client = PlayedAsker(lambda _, message: None, guide)
        find_out(client, late(), {peer: 1})
        assert len(client.asked) == 1


def test_a_call_that_is_answered_meanwhile_waits_for_no_places() -> None:
    def answered(peer: bytes, message: Any) -> Any:
        operation.open.clear()
        return answers(peer, message) if isinstance(message, wire.Explain) else None

    operation, client = late(), PlayedAsker(answered)
    assert find_out(client, operation, {b"server 0": 1}).known == "server 0 waits for 1"
    assert client.waited == []


def test_each_peer_is_named_once_with_what_it_said() -> None:
    explanations = Explanations([b"server 1", b"server 0", b"server 1", b"the scheduler"])
    explanations.take(b"server 0", wire.Explanation(1, "waits for worker 2"))
    explanations.take(b"the scheduler", wire.Explanation(2, ""))
    assert explanations.known == (
        "server 1 does not answer; server 0 waits for worker 2; the scheduler has not answered yet"
    )
    assert explanations.silent == ("server 1",)


def test_places_come_after_the_reasons() -> None:
    explanations = Explanations([b"server 0"])
    explanations.take(b"server 0", wire.Explanation(1, "waits for worker 2", [2]))
    explanations.take_places("worker", wire.Located(2, [2], ["is at train.py:41 in load"]))
    assert explanations.known == "server 0 waits for worker 2; worker 2 is at train.py:41 in load"


def test_a_peer_that_says_nothing_is_said_to_once() -> None:
    explanations = Explanations([b"server 0", b"server 1"])
    explanations.take_places(
        "server", wire.Located(2, [0, 1], ["does not answer: no sign of life", "is at a.py:1 in f"])
    )
    assert explanations.known == (
        "server 1 does not answer; server 0 does not answer: no sign of life; server 1 is at a.py:1 in f"
    )
    assert explanations.silent == ("server 0", "server 1")


def test_who_is_waited_for_are_the_missing_workers_and_the_peers_that_say_nothing() -> None:
    explanations = Explanations([b"server 0", b"server 1", b"server 12", b"aggregator 3", b"the scheduler"])
    explanations.take(b"server 0", wire.Explanation(1, "waits", [1, 4]))
    explanations.take(b"server 1", wire.Explanation(2, "waits", [0, 4]))
    everybody = {"worker": [0, 1, 4], "server": [12], "aggregator": [3]}
    assert explanations.awaited(wire.Node("worker", 1, 1)) == {**everybody, "worker": [0, 4]}, "not the one who asks"
    assert explanations.awaited(wire.Node("aggregator", 1, 1)) == everybody
    assert Explanations([b"the scheduler"]).awaited(wire.Node("worker", 0, 1)) == {}


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        ({1: "is at a.py:1 in f"}, "worker 1 is at a.py:1 in f"),
        (dict.fromkeys(range(1, 8), "is at a.py:1 in f"), "workers 1-7 are at a.py:1 in f"),
        (dict.fromkeys((1, 2, 3, 5, 8, 9), "has left the job"), "workers 1-3, 5, 8-9 have left the job"),
        (dict.fromkeys((0, 1), "does not answer: x"), "workers 0-1 do not answer: x"),
        (
            dict.fromkeys(range(0, 2 * MOST_RANGES + 6, 2), "waits for it"),
            "workers 0, 2, 4, 6, 8, 10, 12, 14 and 3 more waits for it",
        ),
    ],
)
def test_members_at_one_place_are_named_together(places, sentence) -> None:
    assert grouped("worker", [*places], [*places.values()]) == [sentence]


def test_sixty_four_members_at_as_many_places_make_a_short_message() -> None:
    said = grouped("worker", [*range(64)], [f"is at train.py:{rank} in f" for rank in range(64)])
    assert said[0] == "worker 0 is at train.py:0 in f"
    assert said[MOST_PLACES:] == ["60 more workers are elsewhere"]


# ---- what a worker says of calls that may wait in vain, and what it does when that is proven


LONG_S = 100.0


def waiting(
    explained: Callable[[bytes, wire.Explain], Sequence[wire.Message]],
    calm: Callable[[Collection[int]], bool] = lambda _: True,
) -> tuple[Client, bytes, bytes, Played, list[tuple[float, int, Findings]]]:
    """A client, its servers, its transport, and what it has said so far, with when."""
    said: list[tuple[float, int, Findings]] = []

    def answers(peer: bytes, request: wire.Request) -> Sequence[wire.Message]:
        return explained(peer, request) if isinstance(request, wire.Explain) else []

    transport = Played(answers)
    transport.now = 1000.0
    client, a, b = client_of(transport, LONG_S, LONG_S)
    client.mutual.say = lambda prompt, found: said.append((transport.now, prompt, found))
    client.mutual.only_these_act = calm
    return client, a, b, transport, said


def of_workers(_peer: bytes, request: wire.Explain) -> list[wire.Message]:
    """Each request waits for the worker of its number."""
    return [wire.Explanation(request.seq, f"waits for worker {request.about}", [request.about])]


def test_a_worker_says_what_it_waits_for_after_five_seconds_and_rarely_again():
    client, a, b, _, said = waiting(of_workers)
    operation = Operation("pushpull", ["w"], client)
    ask(client, a, operation)
    ask(client, b, operation)
    with pytest.raises(DeadlineExceeded, match="after 100 s"):
        operation.wait()
    *looks, last = said
    assert [now - 1000.0 for now, _, _ in looks] == [LOOK_S, 2 * LOOK_S, 4 * LOOK_S, 8 * LOOK_S, 16 * LOOK_S]
    assert {prompt for _, prompt, _ in looks} == {0}
    found = looks[0][2]
    assert (found.missing, len(found.waits)) == ([1, 2], 1)
    assert found.text.startswith("pushpull of 'w' at ")
    assert found.text.endswith(": server 0 waits for worker 1; server 1 waits for worker 2")
    assert last[2] == Findings(), "it waits no more"


def test_pushes_that_nobody_waits_for_must_have_arrived_and_are_not_needed():
    client, a, b, _, said = waiting(of_workers)
    ask(client, b, Operation("push", ["x"], client))
    with pytest.raises(DeadlineExceeded):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert said[0][2].missing == [2]


@pytest.mark.parametrize(
    "explained",
    [
        lambda _, request: [wire.Explanation(request.seq, "", [])],
        lambda _, request: [wire.Explanation(request.seq, "is writing checkpoint 3", [])],
        lambda peer, request: of_workers(peer, request) if request.about == 1 else [],
    ],
    ids=["not known", "waits for no worker", "one is not explained"],
)
def test_a_worker_says_nothing_of_what_it_is_not_sure_of(
    explained: Callable[[bytes, wire.Explain], Sequence[wire.Message]],
):
    client, a, b, _, said = waiting(explained)
    operation = Operation("pushpull", ["w"], client)
    ask(client, a, operation)
    ask(client, b, operation)
    with pytest.raises(DeadlineExceeded):
        operation.wait()
    assert said == []


def test_a_worker_says_nothing_where_another_thread_may_go_on():
    client, a, _, _, said = waiting(of_workers, lambda _: False)
    with pytest.raises(DeadlineExceeded):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert said == []


def test_a_call_with_a_timeout_of_its_own_ends_by_itself():
    client, a, _, transport, said = waiting(of_workers)
    with pytest.raises(DeadlineExceeded, match="after 30 s"):
        client.call(a, "barrier", wire.Barrier, 30.0, **BARRIER)
    assert said == []
    assert transport.now == 1030.0


def test_a_worker_that_is_prompted_says_it_again_at_once_with_the_number():
    def explained(peer: bytes, request: wire.Explain) -> list[wire.Message]:
        if not said:
            client.prompt(7)
        return of_workers(peer, request)

    client, a, _, _, said = waiting(explained)
    with pytest.raises(DeadlineExceeded):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert [(now - 1000.0, prompt) for now, prompt, _ in said[:2]] == [(LOOK_S, 0), (LOOK_S, 7)]
    assert said[0][2] == said[1][2]


def test_a_wait_that_is_proven_to_be_in_vain_ends_with_the_reason():
    client, a, _, transport, _ = waiting(of_workers)
    say = client.mutual.say
    assert say is not None

    def proven(prompt: int, found: Findings) -> None:
        client.condemn([0], "another wait")
        client.condemn(list(found.waits), "workers 0, 1 wait for each other")
        say(prompt, found)

    client.mutual.say = proven
    with pytest.raises(DeadlineExceeded, match=r"^barrier never ends: workers 0, 1 wait for each other$"):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert transport.now == 1000.0 + LOOK_S
    client.mutual.say = say
    transport.answers = lambda peer, request: [] if isinstance(request, wire.Explain) else [wire.Ack(request.seq)]
    assert client.call(a, "barrier", wire.Barrier, None, **BARRIER) is not None, "the next one is another wait"


def wait(blocked: BlockedTime, began: float, ended: float) -> None:
    waits = blocked.here()
    waits.over_s += ended - began


def test_waits_add_up_and_one_that_goes_on_counts():
    blocked = BlockedTime()
    assert blocked.total(5.0) == 0.0
    wait(blocked, 10.0, 13.0)
    assert blocked.total(20.0) == 3.0
    blocked.here().since = 21.0
    assert blocked.total(25.0) == 7.0


def test_each_thread_waits_for_itself():
    blocked = BlockedTime()
    blocked.here().since = 1.0
    other = threading.Thread(target=wait, args=(blocked, 2.0, 5.0))
    other.start()
    other.join()
    assert blocked.total(6.0) == 5.0 + 3.0
    blocked.here().since = 0.0
    assert blocked.total(9.0) == 3.0


def test_a_wait_that_begins_while_it_is_counted_is_not_counted_below_zero() -> None:
    blocked = BlockedTime()
    blocked.here().since = 7.5
    assert blocked.total(7.0) == 0.0


# ---- where threads are, in words: their files, lines and functions, and nothing else


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
MEETING = at(INSTALLED / "torch/distributed/distributed_c10d.py", 4159, "barrier", INSTALLED)
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
        ([MAIN, LOGGED, MEETING], MAIN, f"is in torch.distributed ({MEETING})"),
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
    assert stacks.place.endswith(f"test_waits.py:{line} in held_up")
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


def test_a_thread_of_the_program_and_a_timer_may_act_and_a_thread_of_a_library_may_not(monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_and_no_thread_goes_on_while_frames_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    frames, seen = sys._current_frames(), list[tuple[bool, bool]]()
    interval = sys.getswitchinterval()

    def listed() -> dict[int, FrameType]:
        seen.append((gc.isenabled(), sys.getswitchinterval() > 1.0))
        return frames

    monkeypatch.setattr(sys, "_current_frames", listed)
    if not collects:
        gc.disable()
    try:
        place_of(None)
        where(NODE, 1)
        assert (gc.isenabled(), sys.getswitchinterval()) == (collects, interval)
    finally:
        gc.enable()
    assert seen == [(False, True)] * 2
