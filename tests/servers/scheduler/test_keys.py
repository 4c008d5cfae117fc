from __future__ import annotations

import itertools

import pytest
from asking import sender

from kvstore import wire
from kvstore.errors import AlreadyInitialized, Mismatch, UsageError
from kvstore.placement import BLOCK
from kvstore.spec import MAX_SEGMENTS, Spec
from servers.scheduler.keys import Columns, DeclaredKeys, Placements, first_other


class Said:
    """Declares as a worker, and keeps what everybody was told."""

    def __init__(self, servers: int = 2) -> None:
        self.loads = [0] * servers
        self.keys = DeclaredKeys(self.loads)
        self.heard: dict[int, list[object]] = {}
        self.seq = itertools.count(1)
        self.fault: Exception | None = None

    def declare(
        self, rank: int, bound: int = 1000, longest: int = 2**40, **shapes: list[int] | tuple[list[int], str]
    ) -> int:
        seq = next(self.seq)
        specs = [shape if isinstance(shape, tuple) else (shape, "float32") for shape in shapes.values()]
        request = wire.Declare(
            sender(rank, seq),
            store=0,
            keys=list(shapes),
            kinds=list(range(len(specs))),
            shapes=[shape for shape, _ in specs],
            dtypes=[dtype for _, dtype in specs],
            bound=bound,
            longest=longest,
        )
        outcomes, self.fault = self.keys.declare(b"peer %d" % rank, request)
        self._hear(outcomes)
        return seq

    def ready(self, *keys: str) -> None:
        self._hear(self.keys.ready(keys))

    def _hear(self, outcomes: list) -> None:
        for asker, outcome in outcomes:
            assert asker.peer == b"peer %d" % asker.request.node.rank
            told = listed(outcome) if isinstance(outcome, Columns) else outcome
            self.heard.setdefault(asker.request.node.rank, []).append(told)


def listed(columns: Columns) -> list[list[list[int]]]:
    """Return, for each key, its segments: id, server, start and stop."""
    counts, *numbers = columns
    segments = iter(zip(*numbers, strict=True))
    return [[list(next(segments)) for _ in range(count)] for count in counts]


A = [[[0, 0, 0, 4]]]  # one key, one segment: id 0 on server 0, elements 0 to 4


ORDERS = itertools.permutations(["declare 0", "declare 1", "declare 2", "ready"])


@pytest.mark.parametrize("order", [order for order in ORDERS if order.index("declare 0") < order.index("ready")])
def test_in_any_order_all_learn_the_same_and_none_before_the_value_is_there(order: tuple[str, ...]):
    said = Said()
    for step in order:
        if step == "ready":
            said.ready("a")
        else:
            said.declare(int(step[-1]), a=[2, 2])
        if "ready" not in order[: order.index(step) + 1]:
            assert said.heard.keys() <= {0}
    assert said.heard == {0: [A], 1: [A], 2: [A]}


def test_who_asks_for_several_waits_for_all_of_them():
    said = Said()
    said.declare(0, a=[4])
    said.declare(0, b=[1])
    said.declare(1, b=[1], a=[4])
    said.ready("b")
    assert 1 not in said.heard
    said.ready("a")
    assert said.heard[1] == [[[[1, 1, 0, 1]], [[0, 0, 0, 4]]]]


def test_large_arrays_are_cut_by_rank_0s_bound_and_ids_go_on():
    said = Said(servers=2)
    said.declare(1, bound=1, a=[500], b=[300])
    said.declare(0, bound=400, a=[500], b=[300])
    said.ready("a", "b")
    assert said.heard[0] == said.heard[1] == [[[[0, 0, 0, 256], [1, 1, 256, 500]], [[2, 1, 0, 300]]]]


def test_stores_share_the_servers_loads():
    loads = [0, 0]
    one, two = Said(), Said()
    one.keys, two.keys = DeclaredKeys(loads), DeclaredKeys(loads)
    one.declare(0, a=[4])
    two.declare(0, a=[4])
    assert [said.heard[0] for said in (one, two)] == [[[[[0, 0, 0, 4]]]], [[[[0, 1, 0, 4]]]]]
    assert loads == [16, 16]


def test_a_second_init_by_rank_0_is_refused_whole():
    said = Said()
    said.declare(0, a=[4])
    said.ready("a")
    said.declare(0, b=[1], a=[4])
    assert isinstance(said.heard[0][1], AlreadyInitialized)
    said.declare(0, b=[1])
    assert said.heard[0][2] == [[[1, 1, 0, 1]]], "b was not placed by the call that failed"


def test_rank_0_may_declare_again_what_has_no_value_yet():
    """Its init was interrupted: the same call finds the same places, another one of that key takes it anew."""
    said = Said()
    said.declare(0, a=[4], b=[1])
    said.declare(0, a=[4], b=[1])
    assert said.heard[0][0] == said.heard[0][1] == [[[0, 0, 0, 4]], [[1, 1, 0, 1]]]
    said.declare(0, b=[8])
    assert said.heard[0][2] == [[[2, 1, 0, 8]]]
    assert said.loads == [16, 32], "what is not there any more weighs nothing"


@pytest.mark.parametrize("other", [[2], ([4], "float64"), [2, 2]])
def test_two_who_contradict_each_other_while_they_wait_both_learn_it(other):
    said = Said()
    said.declare(1, a=[4])
    said.declare(2, a=other)
    for rank in (1, 2):
        (error,) = said.heard[rank]
        assert isinstance(error, Mismatch)
        assert str(error).startswith("key 'a' is float32[4] on worker 1, but float")
        assert str(error).endswith("on worker 2")
    said.declare(0, a=[4])
    said.ready("a")
    assert said.heard[0] == [A]
    assert len(said.heard[1]) == 1, "who was told does not wait any more"


def test_rank_0_that_contradicts_those_who_wait_places_nothing():
    said = Said()
    said.declare(1, a=[4])
    said.declare(2, a=[4])
    said.declare(3, b=[1])
    said.declare(0, a=[3], b=[1])
    assert {rank for rank, heard in said.heard.items() if isinstance(heard[0], Mismatch)} == {0, 1, 2}
    said.declare(0, a=[3], b=[1])
    said.ready("a", "b")
    assert said.heard[0][1] == [[[0, 0, 0, 3]], [[1, 1, 0, 1]]]
    assert said.heard[3] == [[[[1, 1, 0, 1]]]]


@pytest.mark.parametrize("ready", [True, False])
def test_who_contradicts_rank_0_later_learns_it_and_so_does_rank_0(ready: bool):
    said = Said()
    said.declare(0, a=[4])
    if ready:
        said.ready("a")
    said.declare(1, a=[2])
    (error,) = said.heard[1]
    assert isinstance(error, Mismatch)
    assert str(error) == "key 'a' is float32[4] on worker 0, but float32[2] on worker 1"
    assert said.fault is error


def test_a_key_twice_in_one_call_is_refused():
    keys = DeclaredKeys([0])
    request = wire.Declare(
        sender(), store=0, keys=["a", "a"], kinds=[0, 0], shapes=[[1]], dtypes=["int8"], bound=1, longest=2**40
    )
    outcomes, fault = keys.declare(b"", request)
    assert [type(outcome) for _, outcome in outcomes] == [UsageError]
    assert fault is None


def test_explain_names_the_keys_that_are_not_there():
    said = Said()
    said.declare(0, a=[4], b=[1])
    said.ready("a")
    seq = said.declare(1, a=[4], b=[1], c=[1])
    assert said.keys.explain(1, seq) == "waits for worker 0 to init 'b', 'c'"
    assert said.keys.explain(2, seq) == said.keys.explain(1, seq + 1) == ""


def test_declarations_that_say_the_same_wait_and_are_answered_together():
    said = Said()
    seqs = {rank: said.declare(rank, a=[4], b=[1]) for rank in (3, 1, 2)}
    said.declare(4, b=[1])
    assert {said.keys.explain(rank, seq) for rank, seq in seqs.items()} == {"waits for worker 0 to init 'a', 'b'"}
    said.declare(0, a=[4], b=[1])
    said.ready("b", "b")
    assert said.heard.keys() == {0, 4}
    assert [said.keys.waits(rank) for rank in (1, 2, 3, 4)] == [True, True, True, False]
    said.ready("a")
    assert said.heard[1] == said.heard[2] == said.heard[3] == [[*A, [[1, 1, 0, 1]]]]
    assert not any(said.keys.waits(rank) for rank in range(5))


def test_two_declarations_of_one_worker_wait_apart():
    said = Said()
    first, second = said.declare(1, a=[4]), said.declare(1, b=[1])
    said.declare(0, a=[4], b=[1])
    said.ready("a")
    assert (said.keys.explain(1, first), said.keys.explain(1, second)) == ("", "waits for worker 0 to init 'b'")
    assert said.keys.waits(1)


def test_what_was_declared_last_is_not_the_answer_to_something_else():
    said = Said()
    said.declare(0, a=[4], b=[1])
    said.ready("a", "b")
    for rank, shapes in ((1, {"a": [4]}), (2, {"a": [4]}), (3, {"b": [1]}), (4, {"a": [4], "b": [1]})):
        said.declare(rank, **shapes)
    assert said.heard[1] == said.heard[2] == [A]
    assert said.heard[3] == [[[[1, 1, 0, 1]]]]
    assert said.heard[4] == [[*A, [[1, 1, 0, 1]]]]
    said.declare(5, a=[2, 2])
    assert isinstance(said.heard[5][0], Mismatch)


def test_ready_of_a_key_nobody_placed_is_nothing():
    said = Said()
    said.ready("nothing")
    assert said.heard == {}


def test_those_who_wait_in_vain_are_let_go():
    said = Said()
    said.declare(1, a=[4])
    said.declare(2, a=[4])
    assert [asker.request.node.rank for asker in said.keys.abandon()] == [1, 2]
    assert said.keys.abandon() == []


def test_who_asks_for_too_many_segments_is_told_and_nothing_is_placed():
    said = Said()
    said.declare(0, longest=1, a=[2**40])
    said.declare(0, longest=1, a=[MAX_SEGMENTS // 2 * BLOCK], b=[MAX_SEGMENTS // 2 * BLOCK + 1])
    for error in said.heard[0]:
        assert isinstance(error, UsageError)
        assert "one call of init may have" in str(error)
    said.declare(0, a=[4])
    assert said.heard[0][2] == A


def test_what_was_placed_call_by_call_may_be_too_much_for_one(monkeypatch: pytest.MonkeyPatch):
    most = 1 << 10
    monkeypatch.setattr("kvstore.placement.MAX_SEGMENTS", most)
    said = Said()
    half = most // 2 * BLOCK + 1
    said.declare(0, longest=1, a=([half], "int8"))
    said.declare(0, longest=1, b=([half], "int8"))
    said.declare(1, a=([half], "int8"), b=([half], "int8"))
    said.ready("a", "b")
    said.declare(2, a=([half], "int8"), b=([half], "int8"))
    for rank in (1, 2):
        (error,) = said.heard[rank]
        assert isinstance(error, UsageError)
    said.declare(1, a=([half], "int8"))
    assert len(said.heard[1][1][0]) == most // 2 + 1


BOUND, LONGEST = 1000, 2**40
SMALL, LARGE = Spec((10,), "float32"), Spec((3000,), "int8")


def test_loads_are_shared_and_given_back() -> None:
    loads = [0, 0]
    one, other = Placements(loads), Placements(loads)
    one.add({"small": SMALL}, BOUND, LONGEST)
    other.add({"small": SMALL, "large": LARGE}, BOUND, LONGEST)
    assert sum(loads) == 2 * SMALL.nbytes + LARGE.nbytes
    other.clear()
    assert loads == [SMALL.nbytes, 0]
    assert other.specs == {}


def test_the_first_key_with_another_spec_is_found() -> None:
    specs = {"a": SMALL, "b": LARGE, "c": SMALL}
    assert first_other(specs, {"x": LARGE, "c": Spec((10,), "float32")}) is None
    assert first_other(specs, {"c": LARGE, "b": SMALL}) == "b"
    placements = Placements([0])
    placements.add({"a": LARGE}, BOUND, LONGEST)
    assert placements.contradicted(specs) == "a"
