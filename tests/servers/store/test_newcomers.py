"""Workers that were started again: which rounds they are in, and what servers know of them in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Desk, Door, Worker, floats, optimized, sent, text_of
from asking_rows import init_tables, push_rows
from hypothesis import given
from hypothesis import strategies as st
from pairs import Pair, copied, state

from kvstore import wire
from kvstore.table import Table
from servers.shard import Shard
from servers.store.first_sums import MOST_BYTES, MOST_ROUNDS
from servers.store.hyperparameters import Contributed, UpdateHyperparameters, strays
from servers.store.rounds import Rounds, WorkerClocks

# ---- rounds


def closed(rounds: Rounds[Any]) -> list[list[Any]]:
    return list(iter(rounds.complete, None))


def contributed(rounds: Rounds[str], clock: int, *ranks: int) -> list[list[str]]:
    for rank in ranks:
        assert rounds.contribute((rank,), clock, f"{rank} in {clock}")
    return closed(rounds)


def without(rank: int, workers: int = 3, **how: Any) -> Rounds[str]:
    rounds: Rounds[str] = Rounds(range(workers), **how)
    rounds.lose([rank])
    return rounds


def test_it_is_in_the_rounds_after_those_that_its_sponsor_has_pushed() -> None:
    rounds = without(2)
    contributed(rounds, 1, 0)
    rounds.admit(2, 1)
    assert rounds.missing(2) == {0: 2, 1: 1, 2: 2}
    assert contributed(rounds, 1, 1) == [["0 in 1", "1 in 1"]], "nobody waits for it yet"
    assert (rounds.partial, rounds.share, rounds.factor(2)) == (True, 3, 1.5), "the last round without it"
    assert contributed(rounds, 2, 0, 1) == []
    assert rounds.missing(2) == {2: 2}
    assert contributed(rounds, 2, 2) == [["0 in 2", "1 in 2", "2 in 2"]]
    assert (rounds.partial, rounds.factor(3)) == (False, 1.0)


def test_it_may_push_before_the_last_round_without_it_is_over() -> None:
    rounds = without(2)
    contributed(rounds, 1, 0)
    rounds.admit(2, 1)
    assert rounds.expects((2,), 2)
    assert contributed(rounds, 2, 2, 0) == []
    assert contributed(rounds, 1, 1) == [["0 in 1", "1 in 1"]]
    assert contributed(rounds, 2, 1) == [["0 in 2", "1 in 2", "2 in 2"]]


def test_let_in_where_all_rounds_are_over_it_is_in_the_next_one() -> None:
    rounds = without(2)
    contributed(rounds, 1, 0, 1)
    rounds.admit(2, 1)
    assert contributed(rounds, 2, 0, 1) == []
    assert contributed(rounds, 2, 2) == [["0 in 2", "1 in 2", "2 in 2"]]
    assert (rounds.partial, rounds.factor(3)) == (False, 1.0)


def test_what_the_dead_process_had_pushed_counts_up_to_there_and_not_beyond() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    assert contributed(rounds, 1, 2) == contributed(rounds, 2, 2) == contributed(rounds, 3, 2) == []
    rounds.lose([2])
    contributed(rounds, 1, 0)
    rounds.admit(2, 1)
    assert rounds.missing(3) == {0: 2, 1: 1, 2: 2}
    assert contributed(rounds, 1, 1) == [["0 in 1", "1 in 1", "2 in 1"]]
    assert (rounds.partial, rounds.factor(3)) == (True, 1.0)
    assert rounds.contribute((2,), 2, "anew")
    assert contributed(rounds, 2, 0, 1) == [["0 in 2", "1 in 2", "anew"]]
    assert contributed(rounds, 3, 0, 1) == []


def test_what_the_dead_process_had_pushed_does_not_stand_for_one_that_lives() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    contributed(rounds, 1, 2)
    rounds.lose([2])
    contributed(rounds, 1, 0)
    rounds.admit(2, 1)
    assert closed(rounds) == [], "worker 1 is in round 1"


def test_a_sum_of_a_host_stays_though_one_of_its_workers_has_died() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.contribute((1, 2), 1, "host")
    rounds.lose([2])
    rounds.admit(2, 0)
    assert not rounds.expects((2,), 1)
    assert contributed(rounds, 1, 0) == [["0 in 1", "host"]]
    rounds.contribute((1, 2), 2, "host")
    rounds.lose([1])
    rounds.admit(1, 1)
    assert contributed(rounds, 2, 0) == [["0 in 2", "host"]]


def test_one_that_is_lost_again_before_its_first_round_is_waited_for_no_more() -> None:
    rounds = without(2)
    contributed(rounds, 1, 0)
    rounds.admit(2, 1)
    rounds.lose([2])
    assert contributed(rounds, 1, 1) == [["0 in 1", "1 in 1"]]
    assert contributed(rounds, 2, 0, 1) == [["0 in 2", "1 in 2"]]
    assert (rounds.partial, rounds.factor(2)) == (True, 1.5)
    rounds.admit(2, 3)
    assert contributed(rounds, 3, 0, 1) == [["0 in 3", "1 in 3"]]
    assert contributed(rounds, 4, 0, 1) == []


def test_its_seat_pauses_no_more() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.pause(2, 0)
    rounds.lose([2])
    rounds.admit(2, 0)
    assert contributed(rounds, 1, 0, 1) == []
    assert rounds.share == 3
    assert contributed(rounds, 1, 2) != []
    assert rounds.share == 3


def test_others_that_pause_are_not_in_the_last_round_without_it() -> None:
    rounds = without(2)
    contributed(rounds, 1, 0)
    rounds.pause(1, 0)
    rounds.admit(2, 1)
    assert closed(rounds) == [["0 in 1"]]
    assert rounds.share == 2
    assert contributed(rounds, 2, 0) == []
    assert contributed(rounds, 2, 2) == [["0 in 2", "2 in 2"]]
    assert rounds.share == 2


def test_a_copy_lets_in_whom_the_original_does() -> None:
    rounds = without(2)
    rounds.admit(2, 1)
    made = rounds.copy()
    assert made.state == rounds.state
    assert contributed(made, 1, 0, 1) == [["0 in 1", "1 in 1"]]
    assert contributed(made, 2, 0, 1) == []
    assert made.state != rounds.state


def test_buckets_into_whose_rounds_it_comes_at_other_places_are_not_merged() -> None:
    one, other = without(2), without(2)
    one.admit(2, 1)
    other.admit(2, 2)
    assert one.state != other.state


def test_a_standby_that_follows_is_where_its_primary_is() -> None:
    follows = without(2)
    follows.admit(2, 1)
    follows.follow(1, [])
    assert contributed(follows, 2, 0, 1) == [], "it takes over, and waits"
    skips = without(2)
    skips.admit(2, 1)
    skips.reach(2)
    assert not skips.partial
    assert contributed(skips, 3, 0, 1) == []
    assert contributed(skips, 3, 2) != []


def test_passed_rounds_are_those_without_it() -> None:
    rounds = without(2)
    rounds.admit(2, 1)
    rounds.pass_to(2)
    assert not rounds.partial
    assert contributed(rounds, 3, 0, 1) == []


def test_a_stranger_is_not_let_in() -> None:
    rounds: Rounds[str] = Rounds(range(2))
    rounds.admit(2, 1)
    assert contributed(rounds, 1, 0, 1) == [["0 in 1", "1 in 1"]]


def test_with_a_quorum_its_pushes_up_to_there_are_no_late_ones() -> None:
    rounds = without(2, quorum=2, keep=True)
    contributed(rounds, 1, 0, 1)
    contributed(rounds, 2, 0, 1)
    contributed(rounds, 3, 0)
    rounds.admit(2, 3)
    rounds.follow(3, [0, 1])
    assert rounds.counts((2,), 3)
    assert not rounds.is_late((2,), 3)
    assert not rounds.counts((2,), 4)
    assert contributed(rounds, 4, 2, 0) == [["0 in 4", "2 in 4"]]
    assert rounds.contributors == [0, 2]
    rounds.lose([2])
    rounds.admit(2, 2)
    assert rounds.clocks[2] == 4, "what has counted, has"


def test_with_a_quorum_a_round_does_not_wait_for_its_seat_before_it_comes() -> None:
    rounds = without(1, 2, quorum=2)
    rounds.admit(1, 1)
    assert contributed(rounds, 1, 0) == [["0 in 1"]]
    assert contributed(rounds, 2, 0) == []
    assert contributed(rounds, 2, 1) == [["0 in 2", "1 in 2"]]


def test_clocks_count_it_from_its_sponsors_place_on() -> None:
    clocks: WorkerClocks[None] = WorkerClocks(range(3))
    for rank, clock in ((0, 3), (1, 2), (2, 1)):
        clocks.contribute((rank,), clock, None)
    clocks.lose([2])
    assert clocks.version == 2
    clocks.admit(2, 3)
    assert (clocks.version, dict(clocks.clocks)) == (2, {0: 3, 1: 2, 2: 3})
    clocks.contribute((1,), 4, None)
    clocks.contribute((0,), 4, None)
    assert (clocks.version, clocks.missing(4)) == (3, {2: 4})
    clocks.contribute((2,), 4, None)
    clocks.admit(2, 3)
    assert clocks.version == 4, "it may be said again"
    assert list(clocks.clocks) == [0, 1, 2]


ORDERS = st.lists(st.sampled_from(["0", "1", "2", "admit"]), min_size=20, max_size=40)


@given(st.integers(0, 3), ORDERS)
def test_whenever_it_comes_each_round_has_all_who_are_in_it_once(ahead: int, order: list[str]) -> None:
    """Worker 2 has pushed ``ahead`` times before it died; worker 0 lets it in."""
    rounds: Rounds[tuple[int, int, bool]] = Rounds(range(3))
    for clock in range(1, ahead + 1):
        rounds.contribute((2,), clock, (2, clock, False))
    rounds.lose([2])
    pushed, entered, completed = [0, 0], None, []
    newest = 0
    for step in order:
        if step == "admit" and entered is None:
            entered = newest = pushed[0]
            rounds.admit(2, entered)
        elif step == "2" and entered is not None:
            newest += 1
            assert rounds.expects((2,), newest)
            assert rounds.contribute((2,), newest, (2, newest, True))
        elif step in ("0", "1"):
            rank = int(step)
            pushed[rank] += 1
            assert rounds.contribute((rank,), pushed[rank], (rank, pushed[rank], True))
        for contributions in closed(rounds):
            number = rounds.version
            wanted = [(0, number, True), (1, number, True)]
            if entered is not None and number > entered:
                wanted.append((2, number, True))
            elif number <= ahead:
                wanted.append((2, number, False))
            assert contributions == wanted
            assert rounds.factor(len(contributions)) == 3 / len(contributions)
            completed.append(number)
    assert completed == list(range(1, len(completed) + 1))
    assert rounds.version == min(
        *pushed,
        *([newest] if entered is not None and newest > entered else []),
        *([entered] if entered is not None and newest == entered else []),
    )


# ---- requests, told through a shard


def admit(sponsor: Worker, rank: int, clocks: dict[int, int], incarnation: int = 2, store: int = 0) -> wire.Admit:
    return wire.Admit(sponsor.me(), store, rank, incarnation, list(clocks), list(clocks.values()))


class Returning:
    """What a desk is told when its last worker dies, is started again as ``again``, and is let in by worker 0."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self.sponsor, self.rank = desk.workers[0], len(desk.workers) - 1
        self.again = self.start(2)

    def start(self, incarnation: int) -> Worker:
        worker = Worker(self.rank, incarnation)
        self.desk.names[worker.peer] = self.rank
        return worker

    def told(self, lost: int = 0, came: int = 0) -> dict[tuple[int | str, int], Any]:
        """A roster: which incarnation was lost last, and which has come; 0 for none."""
        rank = self.rank
        return self.desk.named(self.desk.shard.depart([], {rank: lost} if lost else {}, {rank: came} if came else {}))  # type: ignore[no-any-return]

    def at_once(self) -> Returning:
        """Be lost, come back, and be let in, all before the first push."""
        self.told(lost=1)
        self.told(lost=1, came=2)
        self.let_in({1: 0})
        return self

    def let_in(self, clocks: dict[int, int], incarnation: int = 2) -> dict[tuple[int | str, int], Any]:
        asked = admit(self.sponsor, self.rank, clocks, incarnation)
        replies = self.desk.ask(self.sponsor, asked)
        assert replies.pop((0, asked.seq)) == wire.Ack(asked.seq)
        return replies  # type: ignore[no-any-return]


def desk_of(workers: int = 3, *numbers: int) -> Desk:
    return optimized(Desk(workers, values={n: floats(0) for n in numbers or (1,)}, min_workers=1), lr=1.0)


def push(desk: Desk, clock: int, *workers: Worker, ids: tuple[int, ...] = (1,), value: float = 1) -> list[Any]:
    """Ask for a push of each, and return who is answered."""
    answered: list[Any] = []
    for worker in workers:
        replies = desk.ask(worker, worker.push({n: floats(value) for n in ids}, clock, want=True))
        assert all(isinstance(reply, wire.Values) for reply in replies.values()), replies
        answered += [rank for rank, _ in replies]
    return answered


def test_its_other_learning_rate_is_its_own_error_and_the_round_is_over_without_it() -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk).at_once()
    pushes = [(w, w.push({1: floats(1)}, 1, lr=lr, want=True)) for w, lr in ((back.again, 1.0), (w0, 0.5), (w1, 0.5))]
    replies = [desk.ask(*each) for each in pushes][-1]
    told = text_of(replies[2, pushes[0][1].seq], "Mismatch")
    for words in ("learning rate", "0.5 on worker 1, 1 on worker 2", "Worker 2 was started again"):
        assert words in told
    assert {type(replies[0, pushes[1][1].seq]), type(replies[1, w1.seq])} == {wire.Values}
    assert desk.value(1, 1).tolist() == [-0.5 * 3], "scaled as if each of the three had contributed"
    for worker in (w0, w1, back.again):
        replies = desk.ask(worker, worker.push({1: floats(1)}, 2, lr=0.5))
    assert set(map(type, replies.values())) == {wire.Ack}, "and the next one counts again"
    assert desk.value(1, 2).tolist() == [-0.5 * 6]


def test_those_who_were_there_first_still_fail_together() -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk).at_once()
    for worker, lr in ((back.again, 0.5), (w0, 0.5), (w1, 0.25)):
        replies = desk.ask(worker, worker.push({1: floats(1)}, 1, lr=lr))
    assert [text_of(reply, "Mismatch")[:7] for reply in replies.values()] == ["workers"] * 3
    assert desk.value(1, 1).tolist() == [0]


def test_a_newcomer_gives_way_to_one_that_came_before_it() -> None:
    class Pushed(Contributed):
        def __init__(self, rank: int, lr: float) -> None:
            self.ranks, self.clock, self.hyper = (rank,), 1, UpdateHyperparameters(lr)

    items = [Pushed(0, 1.0), Pushed(1, 2.0), Pushed(2, 2.0)]
    assert strays(items, [2, 1, 0], ["w"]).keys() == {0}
    assert strays(items, [1, 0, 2], ["w"]).keys() == {0}
    assert strays(items, [0, 1, 2], ["w"]).keys() == {1, 2}
    assert strays(items, [1, 2], ["w"]).keys() == {1, 2}
    assert strays(items, [0], ["w"]).keys() == {0}
    assert strays(items, [2], ["w"]) == {}, "0 and 1 disagree"
    assert strays(items[1:], [1, 2], ["w"]) == {}


def test_the_others_wait_for_it_from_there_on() -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk)
    back.told(lost=1)
    assert push(desk, 1, w0, w1) == [0, 1]
    assert desk.value(1, 1).tolist() == [-3]
    back.told(lost=1, came=2)
    assert "let it in" in text_of(desk.reply(back.again, back.again.push({1: floats(1)}, 1)), "UsageError")
    assert push(desk, 2, w0, w1) == [0, 1], "it is there, and not in yet"
    assert push(desk, 3, w0) == []
    assert back.let_in({1: 3}) == {}
    assert push(desk, 3, w1) == [0, 1]
    back.told(came=2)
    assert push(desk, 4, w0, w1) == []
    assert push(desk, 4, back.again) == [0, 1, 2]
    assert desk.value(1, 4).tolist() == [-12]


def test_whoever_waited_for_the_seat_alone_is_answered_when_it_is_let_in() -> None:
    """A server that has not heard of the death yet, but of the return."""
    desk, w0, w1, w2 = desk_of().and_workers()
    back = Returning(desk)
    assert push(desk, 1, w0, w1) == []
    assert {rank for rank, _ in back.let_in({1: 1})} == {0, 1}
    assert desk.value(1, 1).tolist() == [-3]
    back.told(lost=1, came=2)
    assert push(desk, 2, w0, w1) == []
    assert push(desk, 2, back.again) == [0, 1, 2]
    assert "given up" in text_of(desk.reply(w2, w2.push({1: floats(1)}, 3)), "NodeLost")


def test_once_its_successor_is_in_nothing_comes_of_the_dead_process_any_more() -> None:
    """Its last push may be on its way over a slow link, to a server that has not heard of its death either."""
    desk, w0, w1, w2 = desk_of().and_workers()
    back = Returning(desk)
    back.let_in({1: 0})
    assert text_of(desk.reply(w2, w2.push({1: floats(100)})), "NodeLost")
    back.told(lost=1, came=2)
    assert push(desk, 1, w0, w1, back.again) == [0, 1, 2]
    assert desk.value(1, 1).tolist() == [-3]


def test_segments_are_apart_where_its_sponsor_has_pushed_them_differently() -> None:
    desk, w0, w1, _ = desk_of(3, 1, 2, 3).and_workers()
    back = Returning(desk)
    back.told(1)
    assert push(desk, 1, w0, w1, ids=(1, 2)) == [0, 1]
    back.told(1, 2)
    back.let_in({1: 2, 2: 1})
    push(desk, 2, w0, ids=(1,))
    assert push(desk, 2, w1, ids=(1,)) == [0, 1], "not in round 2 of segment 1"
    assert push(desk, 2, w0, w1, ids=(2,)) == []
    assert push(desk, 1, w0, w1, ids=(3,)) == [], "which its sponsor does not know: it is in all rounds"
    assert push(desk, 2, back.again, ids=(2,)) == [0, 1, 2]
    assert push(desk, 1, back.again, ids=(3,)) == [0, 1, 2]


def test_tables_wait_for_it_from_there_on_too() -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk)
    desk.ask(w0, init_tables(w0, {5: Table(shape=(4, 1)), 6: Table(shape=(4, 1))}))
    back.told(1)

    def both(worker: Worker, clock: int) -> list[Any]:
        wanted = {5: [0], 6: [0]}
        return [rank for rank, _ in desk.ask(worker, push_rows(worker, {5: {0: [1.0]}, 6: {0: [1.0]}}, clock, wanted))]

    assert both(w0, 1) + both(w1, 1) == [0, 1]
    back.told(1, 2)
    assert "before another worker has let it in" in text_of(
        desk.reply(back.again, push_rows(back.again, {5: {0: [1.0]}}, 2)), "UsageError"
    )
    assert both(w0, 2) == []
    back.let_in({1: 0, 5: 2, 6: 2})
    assert both(w1, 2) == [0, 1]
    assert both(w0, 3) + both(w1, 3) == []
    assert both(back.again, 3) == [0, 1, 2]


def test_without_rounds_reads_wait_for_it_from_its_sponsors_place_on() -> None:
    desk = Desk(3, "async", values={1: floats(0)}, staleness=1, min_workers=1)
    for worker in reversed(desk.workers):
        desk.ask(worker, worker.set_optimizer("sgd", lr=1.0))
    w0, w1, _ = desk.workers
    back = Returning(desk)
    back.told(1)
    for clock in (1, 2, 3):
        assert push(desk, clock, w0, w1) == [0, 1]
    back.told(1, 2)
    assert "let it in" in text_of(desk.reply(back.again, back.again.push({1: floats(1)}, 1)), "UsageError")
    back.let_in({1: 3})
    assert push(desk, 4, w0, w1) == [0, 1]
    assert push(desk, 5, w0, w1) == []
    assert push(desk, 4, back.again) == [2, 0, 1]


@pytest.mark.parametrize("first", [True, False])
def test_one_that_dies_before_it_is_let_in_stays_out_whatever_comes_first(first: bool) -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk)
    back.told(1, 2)
    steps = [lambda: back.told(lost=2), lambda: back.let_in({1: 0})]
    for step in steps if first else reversed(steps):
        step()
    assert push(desk, 1, w0, w1) == [0, 1]
    assert "given up" in text_of(desk.reply(back.again, back.again.push({1: floats(1)}, 1)), "NodeLost")
    third = back.start(3)
    back.told(2, 3)
    assert push(desk, 2, w0, w1) == [0, 1]
    back.let_in({1: 1}, 2)
    assert push(desk, 3, w0, w1) == [0, 1], "that was for the one before"
    back.let_in({1: 3}, 3)
    back.let_in({1: 9}, 2)
    assert push(desk, 4, w0, w1) == []
    assert push(desk, 4, third) == [0, 1, 2]


def test_one_that_dies_after_it_was_let_in_counts_up_to_what_it_has_pushed() -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk)
    back.told(1, 2)
    back.let_in({1: 0})
    back.told(0, 2)
    assert push(desk, 1, back.again, w0, w1) == [2, 0, 1]
    push(desk, 2, back.again)
    back.told(2)
    assert push(desk, 2, w0, w1)[-2:] == [0, 1]
    assert push(desk, 3, w0, w1) == [0, 1]
    assert desk.value(1, 3).tolist() == [-9]


def test_what_it_sends_before_the_server_knows_of_it_is_kept_and_then_answered() -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk)
    asked = [back.again.open(), back.again.pull([1])]
    assert [desk.ask(back.again, each) for each in asked] == [{}, {}]
    assert desk.shard.handle(back.again.peer, wire.Here(back.again.node)) == []
    back.told(1)
    assert push(desk, 1, w0, w1) == [0, 1]
    replies = back.told(1, 2)
    assert replies[2, asked[0].seq] == wire.Ack(asked[0].seq)
    assert isinstance(replies[2, asked[1].seq], wire.Values)
    assert back.told(1, 2) == {}, "once"


def test_nobody_comes_early_to_a_job_that_ends_with_a_worker_nor_with_another_key_nor_after_its_death() -> None:
    fixed = Desk(2, values={1: floats(0)})
    again = Returning(fixed).again
    assert "neither a worker" in text_of(fixed.reply(again, again.pull([1])), "UsageError")
    assert "--min-workers" in text_of(fixed.reply(fixed.workers[0], admit(fixed.workers[0], 1, {1: 0})), "UsageError")
    door = Door({b"link of worker 0 2": b"x"} and {b"link of worker 1.2": "other", b"right": "one"})
    desk = Desk(2, min_workers=1)
    desk.shard = Shard(0, 2, admission=door, keys=["zero", "one"], min_workers=1)
    second = Worker(1, 2)
    ((_, reply),) = desk.shard.handle(b"link of worker 1.2", second.open())
    assert "neither a worker" in text_of(reply, "UsageError")
    assert desk.shard.handle(b"right", second.open()) == []
    desk.shard.depart([], {1: 1}, {1: 2})
    assert desk.shard.handle(b"link of worker 1.2", second.open()) != [], (
        "the key is that of its rank from then on, too"
    )
    desk.shard.depart([], {1: 2})
    ((_, reply),) = desk.shard.handle(b"right", second.open())
    assert "given up" in text_of(reply, "NodeLost")
    desk.shard.depart([], {1: 2}, {1: 2})
    ((_, reply),) = desk.shard.handle(b"right", second.open())
    assert "given up" in text_of(reply, "NodeLost"), "an old roster brings nobody back"
    for nobody in (Worker(7, 2), Worker(-1, 2), Worker(0, 2, role="server")):
        ((_, reply),) = desk.shard.handle(b"right", sent(nobody.pull([1])))
        assert "neither a worker" in text_of(reply, "UsageError")


def test_a_sum_before_training_that_it_repeats_is_the_one_that_the_others_have_had() -> None:
    desk, w0, w1, _ = Desk(3, values={1: floats(0)}, min_workers=1).and_workers()
    back = Returning(desk)
    back.told(1, 2)
    early = back.again.push({1: floats(9)}, 1, want=True)
    assert desk.reply(back.again, early) is None, "the others have not made it yet"
    push(desk, 1, w0)
    assert set(push(desk, 1, w1, value=3)) == {0, 1, 2}
    again = back.start(3)
    back.told(2, 3)
    late = desk.reply(again, again.push({1: floats(9)}, 1, want=True))
    assert isinstance(late, wire.Values)
    assert bytes(b"".join(late.buffers)) == bytes(memoryview(floats(6).numpy()).cast("B"))
    push(desk, 2, w0, w1)
    first = desk.reply(again, again.push({1: floats(9)}, 1, want=True))
    assert isinstance(first, wire.Values), "the first ones are kept"
    assert bytes(b"".join(first.buffers)) == bytes(memoryview(floats(6).numpy()).cast("B"))
    said = text_of(desk.reply(again, again.push({1: floats(9)}, 17, want=True)), "UsageError")
    assert "repeats sum 17 of 'k1', of which the others have made 2" in said


def test_of_sums_before_training_the_first_ones_of_small_arrays_are_kept() -> None:
    desk, w0 = Desk(1, values={1: floats(0), 2: torch.zeros(MOST_BYTES // 4 + 1)}, min_workers=1).and_workers()
    for clock in range(1, MOST_ROUNDS + 2):
        desk.ask(w0, w0.push({1: floats(clock)}, clock))
    desk.ask(w0, w0.push({2: torch.ones(MOST_BYTES // 4 + 1)}, 1))
    sums = desk.shard.stores[0].first_sums
    assert sums is not None
    assert sums.find([1], [MOST_ROUNDS]) == [floats(MOST_ROUNDS).numpy().tobytes()]
    assert sums.find([1], [MOST_ROUNDS + 1]) is sums.find([2], [1]) is None


def test_the_lowest_rank_that_is_in_sets_optimizers() -> None:
    desk, w0, w1, _ = Desk(3, values={1: floats(0)}, min_workers=1).and_workers()
    again = Worker(0, 2)
    desk.names[again.peer] = 0
    desk.ask(w0, w0.set_optimizer(lr=1.0))
    desk.shard.depart([], {0: 1}, {0: 2})
    repeated = again.set_optimizer(lr=1.0)
    assert desk.reply(again, repeated) == wire.Ack(repeated.seq)
    other = Worker(0, 2).set_optimizer(lr=3.0)
    again.seq += 1
    assert "differs" in text_of(desk.reply(again, again.set_optimizer(lr=3.0)), "Mismatch"), other
    second = w1.set_optimizer(lr=2.0, version=2)
    desk.ask(w1, admit(w1, 0, {1: 0}))
    assert "differs" in text_of(desk.reply(again, again.set_optimizer(lr=4.0)), "Mismatch"), "it was decided"
    assert desk.ask(w1, second) == {}, "worker 0 says so first again"
    first = again.set_optimizer(lr=2.0, version=2)
    assert set(desk.ask(again, first)) == {(0, first.seq), (1, second.seq)}


@pytest.mark.parametrize("told", [True, False], ids=["the server was told", "by the sponsor alone"])
def test_a_store_waits_for_it_to_close_it_too(told: bool) -> None:
    desk, w0, w1, _ = desk_of().and_workers()
    back = Returning(desk)
    back.told(1, 2)
    back.let_in({1: 0})
    if told:
        back.told(0, 2)
    for worker in (w0, w1):
        desk.ask(worker, wire.Close(worker.me(), store=0))
    assert 0 in desk.shard.stores
    if told:
        desk.ask(back.again, wire.Close(back.again.me(), store=0))
        assert 0 not in desk.shard.stores


# ---- standbys


def pair_of(workers: int = 3, *numbers: int) -> Pair:
    pair = Pair(workers, values={n: floats(0) for n in numbers or (1,)}, min_workers=1)
    optimized(pair, lr=1.0)
    return pair


@pytest.mark.parametrize("when", range(8))
def test_a_standby_takes_over_at_any_place(when: int) -> None:
    pair = pair_of()
    w0, w1, _ = pair.workers
    back = Returning(pair)
    steps = [
        lambda: back.told(1),
        lambda: push(pair, 1, w0, w1),
        lambda: back.told(1, 2),
        lambda: push(pair, 2, w0, w1),
        lambda: back.let_in({1: 3}),
        lambda: push(pair, 3, w0, w1),
        lambda: back.told(0, 2),
    ]
    for number, step in enumerate([*steps, lambda: None]):
        if number == when:
            pair.require_same()
            pair.take_over()
        step()
    assert push(pair, 4, w0, w1) == []
    assert push(pair, 4, back.again) == [0, 1, 2]
    assert pair.value(1, 4).tolist() == [-12]


@pytest.mark.parametrize("when", range(8))
def test_a_new_standby_knows_who_is_in(when: int) -> None:
    desk, w0, w1, _ = desk_of(3, 1, 2).and_workers()
    back = Returning(desk)
    steps = [
        lambda: back.told(1),
        lambda: push(desk, 1, w0, w1),
        lambda: back.told(1, 2),
        lambda: push(desk, 2, w0, w1),
        lambda: back.let_in({1: 3, 2: 0}),
        lambda: back.told(0, 2),
        lambda: push(desk, 3, w0, w1),
    ]
    for number, step in enumerate([*steps, lambda: None]):
        if number == when:
            standby = copied(desk.shard, 3, min_workers=1)
            assert state(standby) == state(desk.shard)
            desk.shard = standby
        step()
    assert push(desk, 4, w0, w1) == []
    assert push(desk, 4, back.again) == [0, 1, 2]
    assert push(desk, 1, w0, w1, ids=(2,)) == []
    assert push(desk, 1, back.again, ids=(2,)) == [0, 1, 2]
    assert desk.value(1, 4).tolist() == [-12]


def test_a_new_standby_knows_of_all_that_one_sponsor_has_let_in_to_several_stores() -> None:
    desk, w0, w1, _, _ = Desk(4, values={1: floats(0)}, min_workers=1).and_workers()
    for worker in desk.workers:
        desk.ask(worker, worker.open(store=1))
    desk.ask(w0, w0.init({1: floats(0)}, store=1))
    desk.shard.depart([], {2: 1, 3: 1}, {2: 2, 3: 2})
    for rank in (2, 3):
        for store in (0, 1):
            asked = admit(w0, rank, {1: 1}, store=store)
            desk.ask(w0, asked)
            w0.done = asked.seq + 1
    desk.shard.depart([], {}, {2: 2, 3: 2})
    standby = copied(desk.shard, 4, min_workers=1)
    assert state(standby) == state(desk.shard)
    desk.shard = standby
    for store in (0, 1):
        replies = [desk.ask(w, w.push({1: floats(1)}, 1, want=True, store=store)) for w in (w0, w1)]
        assert {rank for rank, _ in replies[-1]} == {0, 1}, "round 1 is without them"


def test_a_new_standby_knows_whom_a_sponsor_has_let_in_that_is_inside_join() -> None:
    desk, w0, *_ = Desk(3, values={1: floats(0)}, min_workers=1).and_workers()
    back = Returning(desk)
    back.told(1, 2)
    push(desk, 1, w0)
    back.let_in({1: 1})
    w0.done = w0.seq + 1
    desk.ask(w0, w0.pause({1: 1}))
    standby = copied(desk.shard, 3, min_workers=1)
    assert state(standby) == state(desk.shard)


@given(st.lists(st.integers(0, 3), min_size=30, max_size=60), st.integers(1, 12), st.sampled_from(["", "old", "new"]))
def test_in_whatever_order_news_and_pushes_come(order: list[int], when: int, takes_over: str) -> None:
    """What one member sends comes in order. A standby, an ``old`` or a ``new`` one, takes over after ``when`` steps."""
    pair = pair_of()
    w0, w1, w2 = pair.workers
    back = Returning(pair)
    waiting: dict[tuple[int | str, int], tuple[Worker, wire.Push]] = {}

    def hear(replies: dict[tuple[int | str, int], Any]) -> None:
        for who in replies:
            waiting.pop(who, None)

    def push(worker: Worker, clock: int) -> None:
        asked = worker.push({1: floats(1)}, clock, want=True)
        waiting[worker.rank, asked.seq] = worker, asked
        hear(pair.ask(worker, asked))

    pair.ask(w2, w2.push({1: floats(1)}, 1))
    lines = [
        [lambda: hear(back.told(1)), lambda: hear(back.told(1, 2)), lambda: hear(back.told(0, 2))],
        [lambda: push(w0, 1), lambda: hear(back.let_in({1: 1})), lambda: push(w0, 2)],
        [lambda: push(w1, 1), lambda: push(w1, 2)],
        [lambda: push(back.again, 2)],
    ]
    steps = 0
    for line in [*order, *range(4), *range(4), *range(4), *range(4)]:
        # The scheduler, and the newcomer by it, hear from its sponsor that it is in.
        early = (line == 0 and len(lines[0]) == 1 and len(lines[1]) > 1) or (line == 3 and len(lines[1]) > 1)
        if early or not lines[line]:
            continue
        lines[line].pop(0)()
        steps += 1
        if steps == when and takes_over:
            if takes_over == "new":
                pair.standby = copied(pair.shard, 3, min_workers=1)
            else:
                pair.require_same()
            pair.take_over()
            for worker, asked in list(waiting.values()):
                hear(pair.ask(worker, asked))
    assert waiting == {}
    assert pair.value(1, 2).tolist() == [-6]
