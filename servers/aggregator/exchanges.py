"""Requests to servers, the workers that they are for, and the answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore import wire
from kvstore.codecs.options import fold
from kvstore.transport.memory import Memory
from kvstore.values import copy_each, from_buffer, ranges_of
from servers.aggregator.encoding import Encoding
from servers.aggregator.gathering import Asker, Pulled, Pushed, SegmentList
from servers.requests.replies import Answer


@dataclass(eq=False)
class Exchange:
    """A request to a server, and the workers that wait for its answer."""

    listed: SegmentList
    kind: type[wire.Push] | type[wire.Pull]
    fields: Mapping[str, Any]  # of the message, but for its sender
    askers: list[Asker]  # a pull may get more while it is in flight
    passes: bool = False  # whether values go on as they come, compressed or not; else they are laid down in plain
    seq: int = 0  # its number among this process's requests, once it is made

    @property
    def wants(self) -> bool:
        """Whether the answer brings values."""
        return self.kind is wire.Pull or bool(self.fields["want"])

    @property
    def turn_bytes(self) -> int:
        """Its bytes in a window: the bytes of a piece without compression, which has fewer elements."""
        return self.listed.nbytes // fold(self.fields.get("codec"), self.fields["back"])

    def answers(self, reply: wire.Reply) -> list[Answer]:
        """Return the answers to the workers that wait, made of the server's ``reply``."""
        return [Answer(asker.peer, asker.request, _for(asker.request, reply)) for asker in self.askers]


class Servers(Protocol):
    """What takes requests to servers. The answer is given to the aggregator's ``answered``, later."""

    def send(self, exchange: Exchange) -> None: ...

    def explain(self, exchange: Exchange, peer: bytes, seq: int) -> None: ...  # the answer goes to ``explained``


def landed(values: wire.Values, exchange: Exchange, memory: Memory, encoding: Encoding) -> wire.Values:
    """Return ``values`` plain, and in one piece of ``memory``, for all workers that wait for them."""
    listed, back = exchange.listed, exchange.fields["back"]
    buffer = memory.allocate(listed.nbytes)
    flat = from_buffer(buffer, listed.dtype)
    if back is not None:
        encoding.decode(back, values, listed.sizes, flat)
    else:
        for part in ranges_of(values.buffers, listed.dtype, listed.size):
            copy_each([flat[part.start : part.stop]], [part.values])
    return wire.Values(values.seq, values.clocks, values.ahead, values.missed, [], [], values.priority, [buffer])


def _for(request: wire.Push | wire.Pull, reply: wire.Reply) -> wire.Reply:
    if isinstance(reply, wire.Failure):
        return wire.Failure(request.seq, reply.kind, reply.text)
    if not isinstance(reply, wire.Values):
        return wire.Ack(request.seq, reply.missed if isinstance(reply, wire.Ack) else 0)
    if isinstance(request, wire.Push) and not request.want:
        return wire.Ack(request.seq, reply.missed)
    return wire.Values(
        request.seq,
        reply.clocks,
        reply.ahead,
        reply.missed,
        reply.lengths,
        reply.segment_counts,
        request.priority if isinstance(request, wire.Push) else None,
        reply.buffers,
    )


def pull(listed: SegmentList, clocks: Sequence[int], back: Any, asker: Pulled, passes: bool) -> Exchange:
    rank = asker.request.node.rank
    fields = {
        "store": asker.request.store,
        "ids": list(listed.ids),
        "clocks": list(clocks),
        "back": back,
        "ranks": [rank],
    }
    return Exchange(listed, wire.Pull, fields, [asker], passes)


_VALUES = ("codec", "lengths", "segment_counts", "back", "in_float32", "runs")
ALIKE = ("store", "ids", "lr", "rescale", "changes", "weight", *_VALUES)


def push(
    listed: SegmentList,
    askers: Sequence[Pushed],
    buffers: Sequence[wire.Buffer],
    passes: bool,
    rank_clocks: Sequence[int] = (),
    **changed: Any,
) -> Exchange:
    """Return the push of ``buffers`` for the workers that have asked for it, which agree on all else.

    Args:
        askers: in the order of their ranks.
        changed: fields that differ from the first asker's.
    """
    first = askers[0].request
    priorities = [asker.request.priority for asker in askers]
    fields: dict[str, Any] = {
        **{name: getattr(first, name) for name in ALIKE},
        "clocks": [max(rank_clocks)] * len(first.ids) if rank_clocks else first.clocks,
        "want": any(asker.request.want for asker in askers),
        "priority": None if None in priorities else max(number for number in priorities if number is not None),
        "ranks": [asker.request.node.rank for asker in askers],
        "rank_clocks": list(rank_clocks),
        "buffers": buffers,
        **changed,
    }
    return Exchange(listed, wire.Push, fields, list(askers), passes)
