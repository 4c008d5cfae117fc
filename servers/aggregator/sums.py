"""Pushes that belong together as one, or each by itself: what a host sends on. No I/O.

They become one if they agree on all but their values. Pushes that workers have compressed, or that name different
hyper-parameters, are sent on as they are: the server says what is wrong, and names the worker. So are those whose sum
is not finite, where the store checks that. Values in memory of devices that all workers have lent are summed there.

A sum of half precision goes on in float32. Rounded, it could be infinite, where the sum of all hosts or the update is
not; and the server would round it once more. So a host of two sends as many bytes as it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.rule import Rule
from kvstore.spec import FLOATS
from kvstore.transport.memory import Memory
from kvstore.values import TensorRange, all_finite, from_buffer, ranges_of, sum_in_order, sum_ranges
from servers.aggregator.encoding import Encoding
from servers.aggregator.exchanges import Exchange, push
from servers.aggregator.gathering import Pushed, clock_key
from servers.aggregator.loans import reading
from servers.aggregator.segments import SegmentList


class HostSums:
    """Makes what is sent to servers of what workers of this host push to one store.

    Args:
        rule: of the store.
        memory: for the sums.
        encoding: compresses sums.

    Attributes:
        merges: whether pushes of several workers may become one.
    """

    def __init__(self, rule: Rule, memory: Memory, encoding: Encoding) -> None:
        self.merges = rule.mode == "sync" or rule.aggregate == "host"
        self._rule = rule
        self._memory = memory
        self._encoding = encoding

    def exchanges(self, listed: SegmentList, askers: Sequence[Pushed]) -> list[Exchange]:
        """Return the requests that pushes of one list become, in the order of ranks.

        Raises:
            UsageError: a sum cannot be encoded; see ``Encoding``.
        """
        ordered = sorted(askers, key=lambda asker: asker.request.node.rank)
        merged = self._merged(listed, ordered) if len({_terms(asker) for asker in ordered}) == 1 else None
        return [merged] if merged is not None else [self._alone(listed, asker) for asker in ordered]

    def _merged(self, listed: SegmentList, askers: Sequence[Pushed]) -> Exchange | None:
        """Return one request for all; None if they cannot be one."""
        first = askers[0].request
        clocks = [clock_key(asker.request.clocks) for asker in askers]
        alike = len(set(clocks)) == 1
        if first.codec is not None or not (alike or all(isinstance(clock, int) for clock in clocks)):
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
        """Write the sum of ``askers``, in their order, to ``out``; return whether the store takes its values.

        Raises:
            ServerError: memory of a device could not be read.
        """
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
        if request.encode is not None and listed.dtype in FLOATS:
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
        wide = first.in_float32 if len(askers) == 1 else listed.sum_dtype != listed.dtype
        changed: dict[str, Any] = {"in_float32": wide}
        if total is not None and first.encode is not None and listed.dtype in FLOATS:
            changed = self._encoding.encode(first.encode, listed.ids, listed.sizes, total, len(askers))._asdict()
            changed["in_float32"] = False  # a payload says itself what it decodes to
            buffers = changed.pop("buffers")
        return push(listed, askers, buffers, not self.merges, rank_clocks, **changed)


def _payload(listed: SegmentList, asker: Pushed) -> list[TensorRange]:
    """Return the values of a push, on the host."""
    if asker.lent is None:
        return ranges_of(asker.request.buffers, asker.request.dtype(listed.dtype), listed.size)
    with reading():
        return [TensorRange(0, asker.lent.cpu())]


def _terms(asker: Pushed) -> tuple[Any, ...]:
    """Return what pushes must agree on to become one."""
    request = asker.request
    return (
        request.lr,
        request.rescale,
        repr(request.changes),
        repr(request.encode),
        repr(request.back),
        request.codec is None,
    )
