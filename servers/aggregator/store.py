"""One store, for the workers of one host: pushes are summed, pulls are shared. No I/O; the time is passed in.

In stores with rounds, pushes of one list of segments at one clock wait for each other, and become one. With a quorum
they wait for ``HOLD_S`` only, for no host may wait for its slowest worker. In stores without rounds each push goes on
by itself. With ``aggregate="host"``, pushes that come while an earlier one is under way become one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError, WireError
from kvstore.rule import Rule
from kvstore.spec import FLOATS, shorten
from kvstore.transport.memory import Memory
from kvstore.values import TensorRange, all_finite, from_buffer, ranges_of, sum_in_order, sum_ranges
from servers.activity import Waits
from servers.aggregator.encoding import Encoding
from servers.aggregator.exchanges import Exchange, Servers, landed, pull, push
from servers.aggregator.gathering import (
    Asker,
    ClockKey,
    Gathering,
    Group,
    HostSegments,
    Pulled,
    Pushed,
    SegmentList,
    clock_key,
)
from servers.aggregator.loans import Loans, reading
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, refuse
from servers.store.lateness import ArrivalTimes

FEW = 8  # groups whose missing workers a report names
HOLD_S = 0.02  # how long a push waits for others of its host where a round does not need them all


@dataclass
class SharedPull:
    """The values of one list of segments at one clock: asked for once, whoever wants them."""

    clock: ClockKey
    exchange: Exchange
    values: wire.Values | None = None  # until the server has answered
    given: set[int] = field(default_factory=set)  # the ranks of the workers that have asked


class HostStore:
    """One store."""

    def __init__(
        self, rule: Rule, workers: Sequence[int], memory: Memory, servers: Servers, times: ArrivalTimes
    ) -> None:
        self.rule = rule
        self._workers = frozenset(workers)
        self._memory = memory
        self._servers = servers
        self._times = times
        self.segments = HostSegments()
        self.encoding = Encoding(self.segments.key, self.segments.size, keeper=min(workers, default=None))
        self.gathering = Gathering(workers, self.segments)
        self._sums = HostSums(rule, memory, self.encoding)
        self._under_way: dict[Exchange, None] = {}
        self._pulls: dict[SegmentList, dict[str, SharedPull]] = {}  # and by how values are compressed on their way
        self._busy: dict[SegmentList, Exchange] = {}  # summed by host, without rounds: what is under way
        self._queues: dict[SegmentList, list[Pushed]] = {}  # and what has come meanwhile

    def push(self, peer: bytes, message: wire.Push, now: float, lent: torch.Tensor | None = None) -> list[Answer]:
        """Take a worker's push, whose values are ``lent`` if they are not in its buffers; return answers."""
        if not message.ids:
            return [Answer(peer, message, wire.Ack(message.seq))]
        listed = self.segments.listed(message.ids)
        if message.codec is None and lent is None and not message.runs:
            ranges_of(
                message.buffers, message.dtype(listed.dtype), listed.size
            )  # it must be whole before it waits for others
        asker = Pushed(peer, message, lent)
        if self.rule.mode == "sync":
            groups = self.gathering.add(listed, message.node.rank, asker, now)
            self._judge(groups, asker, now)
            return self._go_on(groups)
        if self.rule.aggregate == "rounds":
            return self._send(listed, [asker])
        self._queues.setdefault(listed, []).append(asker)
        return self._next(listed)

    def push_lent(self, peer: bytes, message: wire.PushLent, loans: Loans, now: float) -> list[Answer]:
        lent = loans.values(message, self.segments.listed(message.ids))
        return self.push(peer, message.plain(), now, lent)

    def pull(self, peer: bytes, message: wire.Pull) -> list[Answer]:
        """Answer a worker's pull if the values are here; else ask the server, or wait for its answer to another."""
        if not message.ids:
            return [Answer(peer, message, wire.Values(message.seq))]
        listed, asker, rank = self.segments.listed(message.ids), Pulled(peer, message), message.node.rank
        if self.rule.mode == "async" or self.rule.quorum is not None:
            self._send_first(listed, rank)
            self._ask(pull(listed, message.clocks, message.back, asker, not self._sums.merges))
            return []
        clock, pulls = clock_key(message.clocks), self._pulls.setdefault(listed, {})
        shared = pulls.get(repr(message.back))
        if shared is None or shared.clock != clock:
            shared = SharedPull(clock, pull(listed, message.clocks, message.back, asker, passes=False))
            pulls[repr(message.back)] = shared
            shared.given.add(rank)
            self._ask(shared.exchange)
            return []
        shared.given.add(rank)
        if shared.values is None:
            shared.exchange.askers.append(asker)
            return []
        answers = Exchange(listed, wire.Pull, {}, [asker]).answers(shared.values)
        self._forget_pulls(listed)
        return answers

    def pause(self, message: wire.Pause) -> list[Answer]:
        clocks = dict(zip(message.ids, message.clocks, strict=True))
        return self._go_on(self.gathering.pause(message.node.rank, clocks))

    def depart(self, workers: Collection[int], lost: Collection[int] = ()) -> list[Answer]:
        return self._go_on(self.gathering.depart(workers, lost))

    def answered(self, exchange: Exchange, reply: wire.Reply) -> list[Answer]:
        self._under_way.pop(exchange, None)
        if isinstance(reply, wire.Values) and not exchange.passes:
            reply = self._landed(exchange, reply)
        answers = exchange.answers(reply)
        for shared in self._pulls.get(exchange.listed, {}).values():
            if shared.exchange is exchange and isinstance(reply, wire.Values):
                shared.values = reply
        if exchange.kind is wire.Pull:
            self._forget_pulls(exchange.listed)
        if self._busy.get(exchange.listed) is exchange:
            del self._busy[exchange.listed]
            answers += self._next(exchange.listed)
        return answers

    def tick(self, now: float) -> list[Answer]:
        """Send the pushes that have waited for long enough."""
        self.segments.forget(self.gathering.busy | {exchange.listed for exchange in self._under_way})
        if self.rule.quorum is None:
            return []
        due = [group for group in self.gathering.groups() if now >= group.since + HOLD_S]  # as ``due`` says, to the bit
        return self._go_on([self.gathering.take(group) for group in due])

    def due(self) -> float | None:
        """Return when ``tick`` has something to send; None if it has not."""
        if self.rule.quorum is None:
            return None
        return min((group.since + HOLD_S for group in self.gathering.groups()), default=None)

    def close(self, error: Exception) -> list[Answer]:
        """Fail all pushes that wait for other workers of this host: the store is closed."""
        waiting = [asker for group in self.gathering.groups() for asker in group.pushes.values()]
        waiting += [asker for queue in self._queues.values() for asker in queue]
        return [refuse(asker.peer, asker.request, error) for asker in waiting]

    def find(self, rank: int, about: int) -> Exchange | Reason | None:
        """Return what request ``about`` of a worker waits for: a server's answer, or other workers."""
        for exchange in self._under_way:
            if any(_is(asker, rank, about) for asker in exchange.askers):
                return exchange
        for group in self.gathering.groups():
            if any(_is(asker, rank, about) for asker in group.pushes.values()):
                return Reason(f"waits for {self._words(group)}", self.gathering.missing(group))
        for listed, queue in self._queues.items():
            if any(_is(asker, rank, about) for asker in queue):
                return self._busy.get(listed)
        return None

    def waits(self, now: float) -> Waits:
        """Return the workers that wait for others of this host; waits for servers are seen there."""
        groups = sorted(self.gathering.groups(), key=lambda group: group.since)
        if not groups:
            return Waits()
        waiting = {rank for group in groups for rank in group.pushes}
        missing = {rank for group in groups[:FEW] for rank in self.gathering.missing(group)}
        return Waits(sorted(waiting), sorted(missing), now - groups[0].since, f"waits for {self._words(groups[0])}")

    # ---- helpers

    def _judge(self, groups: Sequence[Group], asker: Pushed, now: float) -> None:
        """Note whether this push has ended the wait of others of this host."""
        self._times.now, rank = now, asker.request.node.rank
        for group in groups:
            if group.pushes.get(rank) is asker:
                alone = self.rule.quorum is None and len(group.pushes) > 1
                self._times.wave([rank], group.last_at if alone else None)

    def _go_on(self, groups: Sequence[Group]) -> list[Answer]:
        return [answer for group in groups for answer in self._send(group.listed, list(group.pushes.values()))]

    def _next(self, listed: SegmentList) -> list[Answer]:
        """Send the pushes that came while an earlier one was in flight: of each worker the next one."""
        answers: list[Answer] = []
        while (queue := self._queues.get(listed)) and listed not in self._busy:
            firsts: dict[int, Pushed] = {}
            for asker in queue:
                firsts.setdefault(asker.request.node.rank, asker)
            chosen = list(firsts.values())
            self._queues[listed] = [asker for asker in queue if asker not in chosen]
            answers += self._send(listed, chosen)
        return answers

    def _send(self, listed: SegmentList, askers: Sequence[Pushed]) -> list[Answer]:
        """Forward pushes of one list of segments; return the refusals, if they cannot be forwarded."""
        try:
            exchanges = self._sums.exchanges(listed, askers)
        except KVStoreError as exc:
            return [refuse(asker.peer, asker.request, exc) for asker in askers]
        for exchange in exchanges:
            self._ask(exchange)
        if self.rule.mode == "sync":
            self._pulls.pop(listed, None)  # nobody asks for the values of before any more
        waits = self.rule.staleness is not None and exchanges[-1].fields["want"]  # perhaps for pushes of this host
        if self.rule.aggregate == "host" and not waits:
            self._busy[listed] = exchanges[-1]
        return []

    def _landed(self, exchange: Exchange, values: wire.Values) -> wire.Reply:
        try:
            return landed(values, exchange, self._memory, self.encoding)
        except (UsageError, WireError) as exc:
            return wire.Failure(values.seq, type(exc).__name__, str(exc)[: wire.MAX_REASON])

    def _send_first(self, listed: SegmentList, rank: int) -> None:
        """Forward the worker's queued pushes first, so that its next read includes them."""
        for near in (listed, *listed.others):
            while any(asker.request.node.rank == rank for asker in self._queues.get(near, ())):
                self._busy.pop(near, None)  # not behind the push in flight: the server orders what one link brings
                self._next(near)

    def _forget_pulls(self, listed: SegmentList) -> None:
        """Forget values that every worker has asked for, and requests that have failed."""
        pulls = self._pulls.get(listed, {})
        for back, shared in list(pulls.items()):
            failed = shared.values is None and shared.exchange not in self._under_way
            if failed or (shared.values is not None and shared.given >= self._workers):
                del pulls[back]

    def _ask(self, exchange: Exchange) -> None:
        self._under_way[exchange] = None
        self._servers.send(exchange)

    def _words(self, group: Group) -> str:
        clock, keys = max(group.clocks), shorten(group.listed.keys)
        return "; ".join(
            f"worker {rank}, whose push {clock} of {keys} is missing" for rank in self.gathering.missing(group)
        )


def _is(asker: Asker, rank: int, about: int) -> bool:
    return asker.request.node.rank == rank and asker.request.seq == about


class HostSums:
    """Forwards the pushes of this host's workers to one store: as one, or each by itself.

    They become one if they agree on all but their values. Pushes that workers have compressed, that have some rows
    only, or that name different hyper-parameters, are sent on as they are: the server says what is wrong, and names the
    worker. So are pushes whose
    sum is not finite, where the store checks that. Values in memory of devices that all workers have lent are summed
    there.
    """

    def __init__(self, rule: Rule, memory: Memory, encoding: Encoding) -> None:
        self.merges = rule.mode == "sync" or rule.aggregate == "host"
        self._rule = rule
        self._memory = memory
        self._encoding = encoding

    def exchanges(self, listed: SegmentList, askers: Sequence[Pushed]) -> list[Exchange]:
        """Return the requests that pushes of one list become, in the order of ranks."""
        ordered = sorted(askers, key=lambda asker: asker.request.node.rank)
        merged = self._merged(listed, ordered) if len({_terms(asker) for asker in ordered}) == 1 else None
        return [merged] if merged is not None else [self._alone(listed, asker) for asker in ordered]

    def _merged(self, listed: SegmentList, askers: Sequence[Pushed]) -> Exchange | None:
        """Return one request for all; None if they cannot be one."""
        first = askers[0].request
        clocks = [clock_key(asker.request.clocks) for asker in askers]
        alike = len(set(clocks)) == 1
        if first.codec is not None or first.runs or not (alike or all(isinstance(clock, int) for clock in clocks)):
            return None
        if len(askers) == 1:
            return self._alone(listed, askers[0])
        if not alike and self._rule.staleness is not None and any(asker.request.want for asker in askers):
            return None  # each waits until others are where it needs them
        buffer = self._memory.allocate(listed.sum_bytes)
        total = from_buffer(buffer, listed.sum_dtype)
        if not self._add_up(listed, askers, total):
            return None
        rank_clocks = [] if alike else [clock for clock in clocks if isinstance(clock, int)]
        try:
            return self._sent(listed, askers, [buffer], total, rank_clocks)
        except UsageError:  # it cannot be encoded: say which of them cannot
            return None

    def _add_up(self, listed: SegmentList, askers: Sequence[Pushed], out: torch.Tensor) -> bool:
        """Write the sum of ``askers``, in their order, to ``out``; return whether the store takes its values."""
        lent = [asker.lent for asker in askers if asker.lent is not None]
        if len(lent) < len(askers):
            sum_ranges([_payload(listed, asker) for asker in askers], out)
            return self._takes(out)
        with reading():
            total = sum_in_order(lent, dtype=out.dtype)  # on the device: the sum alone crosses to the host
            if not self._takes(total):
                return False
            out.copy_(total)
        return True

    def _takes(self, total: torch.Tensor) -> bool:
        return not (self._rule.finite and total.is_floating_point()) or all_finite(total)

    def _alone(self, listed: SegmentList, asker: Pushed) -> Exchange:
        request = asker.request
        if asker.lent is not None:
            buffer = self._memory.allocate(asker.lent.nbytes)
            with reading():
                from_buffer(buffer, request.dtype(listed.dtype)).copy_(asker.lent)
            return self._sent(listed, [asker], [buffer], None, [])
        total = None
        if request.encode is not None and not request.runs and listed.dtype in FLOATS:
            total = from_buffer(self._memory.allocate(listed.sum_bytes), listed.sum_dtype)
            sum_ranges([_payload(listed, asker)], total)
        return self._sent(listed, [asker], request.buffers, total, [])

    def _sent(
        self,
        listed: SegmentList,
        askers: Sequence[Pushed],
        buffers: Sequence[wire.Buffer],
        total: torch.Tensor | None,
        rank_clocks: Sequence[int],
    ) -> Exchange:
        first = askers[0].request
        # A sum of half precision goes on in float32. Rounded, it could be infinite, where the sum of all hosts or the
        # update is not; and the server would round it once more. So a host of two sends as many bytes as it is given.
        wide = first.in_float32 if len(askers) == 1 else listed.sum_dtype != listed.dtype
        changed: dict[str, Any] = {"in_float32": wide}
        if total is not None and first.encode is not None and listed.dtype in FLOATS:
            changed = self._encoding.encode(first.encode, listed.ids, listed.sizes, total, len(askers))._asdict()
            changed["in_float32"] = False  # a payload says itself what it decodes to
            buffers = changed.pop("buffers")
        return push(listed, askers, buffers, not self.merges, rank_clocks, **changed)


def _payload(listed: SegmentList, asker: Pushed) -> list[TensorRange]:
    if asker.lent is None:
        return ranges_of(asker.request.buffers, asker.request.dtype(listed.dtype), listed.size)
    with reading():
        return [TensorRange(0, asker.lent.cpu())]


def _terms(asker: Pushed) -> tuple[Any, ...]:
    """Return the fields on which pushes must agree to become one."""
    request = asker.request
    return (
        request.lr,
        request.rescale,
        request.weight,
        repr(request.changes),
        repr(request.encode),
        repr(request.back),
        request.codec is None,
        bool(request.runs),
    )
