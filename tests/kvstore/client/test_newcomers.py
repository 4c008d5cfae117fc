"""What a worker does that was started again, and what its sponsor does, told by their messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for
from played_session import SCHEDULER, PlayedSession

from kvstore import wire
from kvstore.client import newcomers as module
from kvstore.client.entries import PushClocks
from kvstore.client.newcomers import Newcomers, Part, newcomers
from kvstore.client.optimizing import Optimizing
from kvstore.client.requests import Joining, Requests, WorkerBarriers
from kvstore.errors import NodeLost
from kvstore.rule import Rule
from kvstore.spec import Key, Spec
from kvstore.ticket import WaitLimits
from servers.requests.kept_states import KeptStates
from servers.shard import OF_NEWCOMERS

SPECS: dict[Key, Spec] = {"cut": Spec((6,), "float32"), "w": Spec((2,), "float32")}


class Thing:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Servers:
    """What servers keep for newcomers, each for itself."""

    def __init__(self) -> None:
        self.kept: dict[bytes, KeptStates] = defaultdict(KeptStates)
        self.puts = 0

    def answer(self, peer: bytes, request: Any, newcomer: wire.Admitted | None) -> wire.Reply | None:
        if not isinstance(request, OF_NEWCOMERS):
            return None
        self.puts += isinstance(request, wire.KeepState)
        if newcomer is not None:
            node = wire.Node("worker", newcomer.rank, newcomer.incarnation)
            request = replace(request, sender=request.sender._replace(node=node))
        reply = self.kept[peer].serve(peer, request).reply
        if isinstance(reply, wire.Failure):
            raise NodeLost(reply.text)
        return reply


class Meetings:
    """The checkpoints of a worker, as far as newcomers go on with them."""

    def __init__(self) -> None:
        self.at = (5, 2)

    def following(self) -> tuple[int, int]:
        return self.at

    def come(self, following: int, number: int) -> None:
        self.at = following, number


class Side:
    """One worker: its session, one store of two keys, and what it does for newcomers."""

    def __init__(
        self,
        newcomer: bool = False,
        mode: str = "async",
        entered: wire.Admitted | None = None,
        servers: Servers | None = None,
    ) -> None:
        servers = servers or Servers()

        def answer(peer: bytes, request: wire.Request) -> wire.Reply:
            if isinstance(request, wire.Enter) and entered is not None:
                told = (entered.stores, entered.barriers, entered.joins, entered.counts, entered.ids, entered.clocks)
                return wire.Entered(request.seq, *told, entered.state)
            if isinstance(request, wire.Admitted):
                self.meanwhile()
            if isinstance(request, wire.AwaitWorkers):
                return replace(self.go_on.pop(0), seq=request.seq)
            return servers.answer(peer, request, entered) or wire.Ack(request.seq)

        self.go_on: list[wire.GoOn] = []  # what the scheduler answers below the least
        self.meanwhile: Callable[[], object] = lambda: None  # happens while the scheduler is told
        self.session: Any = PlayedSession(answer=answer)
        self.session.newcomer, self.session.to_admit, self.session.short = newcomer, {}, False
        self.made = Newcomers(self.session)
        self.rule = Rule(mode)
        self.requests = Requests(self.session, 1, self.rule, WaitLimits(1.0, 1.0))
        self.entries = entries_for(SPECS, 2, 4)
        self.clocks = PushClocks()
        self.clocks.grow(len(self.entries))
        self.optimizing = Optimizing(self.requests, SimpleNamespace(), "dist_sync")  # type: ignore[arg-type]
        self.part = Part(
            self.requests,
            self.entries,
            self.clocks,
            WorkerBarriers(self.requests),
            Joining(self.requests, self.clocks),
            self.optimizing,
            SimpleNamespace(number=0),  # type: ignore[arg-type]
        )
        self.pushes: Any = SimpleNamespace(before=[], rule=self.rule)
        self.meetings: Any = Meetings()
        self.made.add(self.part, self.meetings, self.pushes)
        self.session.asked.clear()

    def push(self, *places: int) -> list[tuple[bytes, Any]]:
        """Return what is said before a push of these keys."""
        self.session.asked.clear()
        for hook in self.pushes.before:
            hook(np.array(places, np.int64))
        return list(self.session.asked)

    def notice(self, first: int = 0, incarnation: int = 2, store: int = 7) -> wire.Newcomer:
        said = self.session.to_admit[1] = wire.Newcomer(1, incarnation, store, first)
        return said


def sponsor(servers: Servers | None = None, **attached: Thing) -> Side:
    side = Side(servers=servers)
    side.clocks.pushed[:] = (3, 4)
    side.part.barriers.pass_to(2)
    side.part.joining.number = 1
    side.part.publishing.number = 6
    for name, thing in attached.items():
        side.made.attach(name, thing)
    return side


def admitted(side: Side) -> wire.Admitted:
    side.notice()
    ((_, said),) = [entry for entry in side.push(0) if isinstance(entry[1], wire.Admitted)]
    assert isinstance(said, wire.Admitted)
    return said


# ---- the sponsor


def test_before_a_push_that_begins_so_it_tells_all_servers_and_then_the_scheduler_how_often_it_has_pushed() -> None:
    side = sponsor()
    first = int(side.entries.ids[side.entries.firsts[1]])
    side.notice(first)
    assert side.push(0) == side.push() == []
    *servers, (peer, last) = side.push(1)
    assert [each for each, _ in servers] == side.session.servers
    told = {number: clock for _, said in servers for number, clock in zip(said.ids, said.clocks, strict=True)}
    cut = side.entries.ids[: side.entries.segments].tolist()
    assert told == {number: 4 if number == first else 3 for number in cut}
    assert {(said.store, said.rank, said.incarnation) for _, said in servers} == {(7, 1, 2)}
    assert (peer, last.rank, last.incarnation, last.stores) == (SCHEDULER, 1, 2, [7])
    assert (last.barriers, last.joins, last.counts, last.ids, last.clocks) == ([2], [1], [2], [0, first], [3, 4])
    assert side.session.to_admit == {}
    assert side.push(1) == []


def test_one_that_names_no_key_comes_between_two_steps_and_another_store_does_for_nobody() -> None:
    side = sponsor()
    side.notice(0, store=8)
    assert side.push(0) == []
    side.made.boundary(side.part, side.meetings)
    assert side.session.asked == []
    side.notice(-1)
    assert side.push(1) == [], "in the middle of a step"
    side.made.boundary(side.part, side.meetings)
    assert len(side.session.asked) == 3


def test_the_boundary_of_a_step_that_has_ended_is_before_the_next_push_to_what_servers_update() -> None:
    side = sponsor()
    side.notice(-1)
    side.made.end_step()
    assert side.session.asked == []
    assert side.made.step_ended
    assert kinds(side.push(1)) == ["Admit", "Admit", "Admitted"]
    side.notice(-1, incarnation=3)
    assert side.push(1) == [], "in the middle of a step"
    side.rule = side.pushes.rule = Rule("sync")
    side.made.end_step()
    assert side.push(1) == [], "a sum"
    side.made.begin_step(side.part, side.meetings)
    assert kinds(side.session.asked) == ["Admit", "Admit", "Admitted"]
    assert not side.made.step_ended


def test_one_that_it_has_let_in_is_not_let_in_again_but_the_next_one_is() -> None:
    side = sponsor()
    admitted(side)
    side.notice()
    assert side.push(0) == []
    assert side.session.to_admit == {}, "the scheduler had said it again meanwhile"
    side.notice(incarnation=3)
    assert len(side.push(0)) == 3


def test_a_notice_that_comes_meanwhile_stays() -> None:
    side = sponsor()
    before = side.notice()
    side.meanwhile = lambda: side.notice(incarnation=3)
    side.push(0)
    assert side.session.to_admit[1] is not before
    assert side.session.to_admit[1].incarnation == 3


def test_stores_that_are_closed_are_left_out() -> None:
    side = sponsor()
    side.made.remove(side.part)
    side.notice()
    (last,) = side.push(0)
    assert last[1].stores == []


def test_what_cannot_be_sent_stays_behind_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    said = admitted(sponsor(thing=Thing(w=object())))
    assert "without what is attached" in caplog.text
    newcomer, own = Side(newcomer=True, entered=said), Thing(step=1)
    newcomer.made.attach("thing", own)
    newcomer.push(0)
    assert own.state == {"step": 1}
    assert newcomer.clocks.pushed.tolist() == [3, 4]


# ---- what is large


def large(seed: int) -> dict[str, Any]:
    """A state that is too large for the scheduler, of any bits: NaNs with something in them, too."""
    drawn = np.random.default_rng(seed)
    bits = torch.from_numpy(drawn.integers(0, 256, 10 * module.MOST_STATE, dtype=np.uint8))
    odd = torch.tensor([[True, False]])
    return {"bits": bits, "floats": bits[:-3].clone()[: 4 * 999].view(torch.float32), "odd": odd, "none": bits[:0]}


def bits_of(state: dict[str, Any]) -> list[bytes]:
    return [value.numpy().tobytes() for value in state.values()]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 1 << 20)


def newcomer_with(servers: Servers, said: wire.Admitted, **things: Thing) -> Side:
    side = Side(newcomer=True, entered=said, servers=servers)
    for name, thing in things.items():
        side.made.attach(name, thing)
    return side


def test_what_is_large_goes_through_the_servers_which_keep_nothing_of_it(pages: None) -> None:
    servers, state = Servers(), large(0)
    said = admitted(sponsor(servers, thing=Thing(**state), step=Thing(at=3)))
    assert len(said.state) < 1000
    assert servers.puts > 2 * len(servers.kept) > 2
    own, step = Thing(), Thing()
    newcomer_with(servers, said, thing=own, step=step).push(0)
    assert bits_of(own.state) == bits_of(state)
    assert [own.state[name].dtype for name in state] == [state[name].dtype for name in state]
    assert step.state == {"at": 3}
    with pytest.raises(NodeLost, match="not on this server any more: start it again"):
        newcomer_with(servers, said, thing=own).push(0)


def test_those_that_come_together_have_each_their_own_and_a_notice_that_comes_again_puts_nothing(pages: None) -> None:
    servers = Servers()
    side = sponsor(servers, thing=Thing(**large(0)))
    side.notice()
    side.session.to_admit[2] = wire.Newcomer(2, 2, 7, 0)
    both = [said for _, said in side.push(0) if isinstance(said, wire.Admitted)]
    assert [said.rank for said in both] == [1, 2]
    puts = servers.puts
    side.notice()
    assert side.push(0) == []
    assert servers.puts == puts
    for said in both:
        newcomer_with(servers, said, thing=Thing()).push(0)


def test_what_was_put_for_an_earlier_process_is_not_taken(pages: None) -> None:
    servers = Servers()
    side = sponsor(servers, thing=Thing(**large(0)))
    first = admitted(side)
    side.notice(incarnation=3)
    ((_, second),) = [entry for entry in side.push(0) if isinstance(entry[1], wire.Admitted)]
    with pytest.raises(NodeLost):
        newcomer_with(servers, first, thing=Thing()).push(0)
    own = Thing()
    newcomer_with(servers, second, thing=own).push(0)
    assert own.state


# ---- the newcomer


def test_before_its_first_push_it_asks_and_goes_on_as_its_sponsor() -> None:
    state = {"step": 3, "m": torch.ones(2, 2, dtype=torch.bfloat16), "none": torch.empty(0, 3, dtype=torch.int64)}
    side = Side(newcomer=True, entered=admitted(sponsor(early=Thing(**state), late=Thing(step=9))))
    early, late = Thing(), Thing()
    assert not side.made.attach("early", early)
    side.meetings.at = (0, 0)
    first = int(side.entries.ids[side.entries.firsts[1]])
    ((peer, asked),) = side.push(1)
    assert (peer, asked.store, asked.id) == (SCHEDULER, 7, first)
    assert not side.session.newcomer
    assert side.clocks.pushed.tolist() == [3, 4]
    assert (side.part.barriers.passed, side.part.joining.number, side.part.publishing.number) == (2, 1, 6)
    assert side.meetings.at == (5, 2)
    assert early.state["step"] == 3
    for name in ("m", "none"):
        assert early.state[name].dtype == state[name].dtype  # type: ignore[attr-defined]
        assert torch.equal(early.state[name], state[name])  # type: ignore[arg-type]
    assert side.made.attach("late", late)
    assert late.state == {"step": 9}
    assert not side.made.attach("other", Thing())
    assert side.push(1) == []


def test_before_join_it_comes_with_any_push() -> None:
    side = Side(newcomer=True, entered=admitted(sponsor()))
    side.made.enter(side.part, -1, None)
    assert side.session.asked[-1][1].id == -1
    before = len(side.session.asked)
    side.made.enter(side.part, -1, None)
    assert len(side.session.asked) == before


def test_a_sum_before_training_is_pushed_without_asking() -> None:
    side = Side(newcomer=True, mode="sync")
    side.part = side.part._replace(optimizing=SimpleNamespace(rule=lambda: None))  # type: ignore[arg-type]
    side.pushes.before.clear()
    side.made.add(side.part, None, side.pushes)
    assert side.push(0) == []
    assert side.session.newcomer


def test_clocks_of_keys_and_stores_that_it_makes_later_are_the_sponsors_and_its_own_stay() -> None:
    side = Side(newcomer=True, entered=admitted(sponsor()))
    side.push(0)
    side.clocks.pushed[:] = (9, 0)
    side.made.take_clocks(side.part)
    assert side.clocks.pushed.tolist() == [9, 4], "what it has pushed since is more"
    side.clocks.pushed[:] = 0
    side.made.add(side.part, None, side.pushes)
    assert side.clocks.pushed.tolist() == [3, 4]
    other = side.part._replace(requests=SimpleNamespace(store=8), clocks=PushClocks())  # type: ignore[arg-type]
    side.made.take_clocks(other)
    assert other.clocks.pushed.tolist() == [], "which the sponsor does not know"


def test_of_several_stores_each_has_its_own_clocks() -> None:
    said = admitted(sponsor())
    counts, ids = [2, 2], [0, said.ids[1], *said.ids]
    both = wire.Admitted(said.sender, 1, 2, [3, 7], [9, 2], [9, 1], counts, ids, [7, 8, 3, 4], said.state)
    side = Side(newcomer=True, entered=both)
    side.push(0)
    assert side.clocks.pushed.tolist() == [3, 4]
    assert (side.part.barriers.passed, side.part.joining.number) == (2, 1)


def test_where_a_job_ends_with_a_worker_nothing_of_this_is_made() -> None:
    assert newcomers(PlayedSession()) is None  # type: ignore[arg-type]


def test_below_the_least_it_stands_still_before_a_push_until_one_waits_elsewhere_or_enough_are_in() -> None:
    side = sponsor()
    side.session.short = True
    here, elsewhere = wire.GoOn(0, 1, 2, 7, 0), wire.GoOn(0, 1, 3, 7, 2)
    side.go_on = [here, elsewhere]
    assert kinds(side.push(0)) == ["AwaitWorkers", "Admit", "Admit", "Admitted", "AwaitWorkers"]
    assert kinds(side.push(0)) == [], "it goes on to where the newcomer waits"
    side.go_on = [wire.GoOn(0)]
    assert kinds(side.push(1)) == ["Admit", "Admit", "Admitted", "AwaitWorkers"]
    side.session.short = False
    assert kinds(side.push(0)) == []


def kinds(said: list[tuple[bytes, Any]]) -> list[str]:
    return [type(message).__name__ for _, message in said]


def test_who_wants_to_hear_of_members_does_so_between_two_steps() -> None:
    side, heard = sponsor(), []
    side.session.members = [0, 1]
    side.made.boundary(side.part, None)
    side.made.call(side.part, heard.append)
    side.session.members = [0]
    side.push(0)
    assert heard == []
    side.made.end_step()
    side.made.boundary(side.part, None)
    assert heard == [[0]]
    side.session.members = [0, 1, 2]
    side.made.boundary(side.part, None)
    assert heard == [[0], [0, 1, 2]]
    side.made.remove(side.part)
    side.session.members = [0]
    side.made.boundary(side.part, None)
    assert len(heard) == 2
