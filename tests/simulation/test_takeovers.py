"""Jobs whose servers have standbys, in virtual time, and processes that are killed in many orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from faults.orders import order
from simulation.network import Weather
from simulation.orders import Ordered
from simulation.runs import HOSTS, Plan, carry_out, exhaustive
from simulation.takeovers import CODED, SEATS, every_move, judge, moved, replicated, short, with_tables

from kvstore import wire
from kvstore.member.links import Links
from kvstore.optim.states import StateStore
from kvstore.rows.admission import AdmissionRule
from servers.replication.primary import Gate
from servers.replication.replica import Replica
from servers.replication.standby import Backlog
from servers.requests.repeats import Ledger, Verdict
from servers.requests.replies import Outbox
from servers.store.bucket import Bucket
from servers.store.recording import Recording
from servers.store.rounds import Rounds

# ---- jobs whose servers have standbys, in virtual time: a server that dies changes no value, and no bit


def require(plan: Plan, *wanted: str) -> None:
    """Carry out a plan, whose verdict must be one of those."""
    outcome = carry_out(plan)
    said = judge(plan, outcome)
    assert said in wanted, f"{plan}: {said}\n{outcome.trace()}"


def test_runs_by_seeds_are_exact_or_rightly_loud() -> None:
    for seed in range(5):
        require(replicated(seed), "exact", "loud")


def test_a_server_that_dies_costs_nothing_but_time() -> None:
    """Every 120th of all its moments; ``python -m simulation 0 --crashes --replicas`` makes all, of all members."""
    for base in short(0):
        for plan in islice(exhaustive(base, ("server 0",)), 30, None, 120):
            require(plan, "exact")


def test_a_server_that_dies_takes_no_assigned_sum_along() -> None:
    for plan in exhaustive(short(0)[-1], ("server 0",), step=17):
        require(plan, "exact")


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "step"),
    [((), 202), *(pytest.param(*case, marks=pytest.mark.release) for case in (((), 101), (HOSTS[0], 307)))],
)
def test_whoever_dies_costs_nothing_but_time(hosts: tuple[tuple[int, ...], ...], step: int) -> None:
    for base in short(1, hosts):
        for plan in exhaustive(base, (*SEATS, "scheduler"), step=step):
            require(plan, "exact")


@pytest.mark.long
def test_servers_that_are_moved_cost_nothing_but_time() -> None:
    for base in short(0):
        for plan in every_move(base, step=289):
            require(plan, "exact")
    for seed in range(2):
        require(moved(seed), "exact", "loud")
        require(with_tables(moved(seed)), "exact", "loud")


def test_a_move_is_made() -> None:
    plan = replace(short(0)[0], moves=(("server 0", 60), ("server 1", 70), ("standby 1", 200)))
    outcome = carry_out(plan)
    assert judge(plan, outcome) == "exact"
    assert (outcome.starts["server 0"], outcome.starts["server 1"]) == (2, 2)
    assert outcome.exit_codes["server 0"] == outcome.exit_codes["server 1"] == 0


@pytest.mark.parametrize("program", ["count", "count rows", "count twins"])
@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "drop", "keep"])
def test_every_push_counts_once(mode: str, program: str) -> None:
    plan = Plan(0, mode, program=program)
    assert judge(plan, carry_out(plan)) == "exact"


def test_rows_survive_whatever_happens() -> None:
    for seed in range(3):
        require(with_tables(replicated(seed)), "exact", "loud")


@pytest.mark.release
def test_a_server_with_tables_that_dies_at_any_moment_costs_nothing_but_time() -> None:
    for base in short(0)[:-1]:  # a table needs an optimizer
        for plan in exhaustive(with_tables(base), SEATS, step=211):
            require(plan, "exact")


@pytest.mark.parametrize("compression", CODED)
def test_a_seed_gives_the_same_bits_however_late_messages_are(compression: dict[str, Any] | None) -> None:
    plan = Plan(1, compression=compression, program="bits")
    assert judge(replace(plan, pause=("server 0", 80, 0.3)), carry_out(plan)) == "exact"


def test_a_push_that_counts_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Ledger.admit

    def admit(self: Ledger[Any], request: Any) -> Verdict:
        said = really(self, request)
        return Verdict.NEW if said is Verdict.REPEAT else said

    monkeypatch.setattr(Ledger, "admit", admit)
    plans = [Plan(seed, "async", replace(Plan(0).weather, repeat=0.2), program="count") for seed in range(3)]
    assert any(judge(plan, carry_out(plan)).startswith("wrong") for plan in plans)


# ---- what is broken is found

# Server 0 is cut off from the scheduler until it has been replaced, and worker 0 hears of that late.
ZOMBIE = Plan(
    *(2, "async", Weather(0.02)),
    partings=(("scheduler", "server 0", 160, 6.0),),
    late=("worker 0", 0.7),
    replicas=1,
    program="count",
    limit_s=1.0,
)
# Server 0 dies after these deliveries.
DEATHS = {
    mode: [
        Plan(0, mode, replicas=1, program="count", rounds=3, crashes=(("server 0", at),)) for at in range(67, 132, 7)
    ]
    for mode in ("async", "keep")
}
ROW_DEATHS = {
    mode: [
        Plan(0, mode, replicas=1, program="count rows", rounds=3, crashes=(("server 0", at),)) for at in (116, 161, 170)
    ]
    for mode in ("sync", "async", "keep")
}
# The same, where standbys are handed what updates have made.
HANDED = {
    program: [
        Plan(0, replicas=1, shares=True, program=program, rounds=3, crashes=(("server 0", at),))
        for at in range(80, 240, 8)
    ]
    for program in ("count", "bits")
}


def take_all(replica: Any) -> Any:
    """What a primary says to the records of one that it has replaced: that it has them."""

    def handle(self: Replica, peer: bytes, message: wire.Message) -> Outbox:
        if isinstance(message, wire.Record) and self.serves:
            return [(peer, wire.Stored(message.epoch, message.number))]
        said: Outbox = replica(self, peer, message)
        return said

    return handle


RESEND = "_resend"  # what is taken out


def follow_only(mend: Any) -> Any:
    """A link leads elsewhere, but what has no answer is not sent again."""

    def mended(self: Links) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Links, RESEND, lambda self, peer: self._introduce(peer))
            mend(self)

    return mended


MUTATIONS: dict[str, tuple[type, str, Callable[[Any], Any], list[Plan]]] = {
    "answers do not wait for the standby": (
        *(Gate, "take", lambda take: lambda self, outbox, newest, stored: outbox),
        DEATHS["async"],
    ),
    "what has counted is not known after a takeover": (
        *(Rounds, "counts", lambda counts: lambda self, ranks, clock: False),
        DEATHS["keep"],
    ),
    "records of an earlier view are taken": (Replica, "handle", take_all, [ZOMBIE]),
    "nothing is sent again to who has taken over": (Links, "recover", follow_only, DEATHS["async"][:1]),
    "assigned sums do not reach the standby": (
        *(Bucket, "adopt", lambda _: lambda self, buffer: None),
        [replace(short(0)[-1], crashes=(("server 0", at),)) for at in (78, 99, 120)],
    ),
    "rounds that a standby keeps are lost with its server": (
        *(Backlog, "hurry", lambda _: lambda self: self._kept.clear()),
        HANDED["count"],
    ),
    "states are not handed over": (StateStore, "parts", lambda _: lambda self, keys: [], HANDED["bits"]),
    "what is handed over is of no round": (Rounds, "reach", lambda _: lambda self, version: None, HANDED["count"]),
    "sums of rows are not recorded": (Recording, "row_sums", lambda _: lambda self, *_: None, ROW_DEATHS["sync"]),
    "answers with rows do not wait for the standby": (
        *(Gate, "take", lambda take: lambda self, outbox, newest, stored: outbox),
        ROW_DEATHS["async"],
    ),
    "what has counted of rows is not known after a takeover": (
        *(Rounds, "counts", lambda counts: lambda self, ranks, clock: False),
        ROW_DEATHS["keep"],
    ),
    "a new standby does not know what ids without rows were pushed": (
        *(AdmissionRule, "restore", lambda restore: lambda self, parts: None),
        [Plan(3, replicas=1, program="row bits", start_s=0.01, crashes=(("standby 0", 110), ("server 0", 230)))],
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutate, plans = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutate(vars(owner)[attribute]))
    assert any(judge(plan, carry_out(plan)) not in ("exact", "loud") for plan in plans)


def test_a_server_that_comes_back_is_not_believed() -> None:
    require(ZOMBIE, "exact")


# ---- processes that are killed, stopped and continued in many orders, in virtual time, under launch.py's supervision


def require_order(seed: int, ends: tuple[str, ...], hosts: tuple[tuple[int, ...], ...] = ()) -> None:
    chosen = order(seed, ends=ends)
    run = Ordered(chosen, seed, Weather(), hosts)
    assert run.verdict == "", f"{chosen}: {run.verdict}\n{run.trace()}"


ENDS = ("", "server", "standby", "both", "scheduler")


@pytest.mark.parametrize("end", ENDS)
def test_only_what_has_ended_a_job_is_named_and_who_comes_back_never_ends_it(end: str) -> None:
    for seed in range(2):
        require_order(seed, (end,))


@pytest.mark.parametrize("end", ["worker", "aggregator"])
def test_nor_does_it_if_a_worker_or_an_aggregator_ends_the_job_later(end: str) -> None:
    for seed in range(2):
        require_order(seed, (end,), HOSTS[0])


@pytest.mark.faults
def test_all_orders_by_seeds() -> None:
    for seed in range(300):
        require_order(seed, ENDS)
        require_order(seed, ("", "worker", "aggregator"), HOSTS[0])
