"""A worker's store before real shards and their standbys, without threads or links: each call is over at once.

What a shard answers is what a server would, in step with a standby that has applied each record. The scheduler is
played: it places keys, and says yes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asking import sender, sent
from pairs import copied
from played_session import PlayedSession
from played_tables import placed

from kvstore import wire
from kvstore.checkpoint.folders import folder_of
from kvstore.checkpoint.tensors import write_tensors
from kvstore.client import DistStore
from kvstore.errors import rebuild
from kvstore.job.config import Config
from kvstore.reading.held import HeldValue, ReadSegment, reads_of
from kvstore.reading.reader import RowPull
from kvstore.rule import Rule
from kvstore.spec import Key, Spec
from kvstore.transport.memory import Heap
from servers.reading.desk import RowRead, ValueRead
from servers.shard import Shard
from servers.store.capture import StoreCapture


class _Numbered(PlayedSession):
    """One worker's session, in which each store has a number of its own."""

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.OpenStore):
            return wire.StoreOpened(request.seq, request.ordinal)
        return super()._answer(peer, request)


class _Server:
    """A shard, its standby, and what it captures for checkpoints."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.directory = rank, directory
        self.shares = False
        self._records: list[wire.Message] = []
        self._captures: list[StoreCapture] = []
        self.shard = self._serving(Shard(rank, 1))
        self.standby: Shard | None = Shard(rank, 1)

    def _serving(self, shard: Shard) -> Shard:
        shard.record(self)
        shard.checkpoints.save = self._captures.append
        return shard

    def note(self, message: wire.Message) -> None:
        self._records.append(message)

    def pair(self) -> None:
        self.standby = copied(self.shard, 1)

    def take_over(self) -> None:
        if self.standby is None:
            self.pair()
        assert self.standby is not None
        self.shard.record(None)
        self.shard, self.standby = self._serving(self.standby), None

    def handle(self, request: wire.Request) -> Any:
        """Return the answer; the standby has applied all records by then, and captures are on the disk."""
        outbox = self.shard.handle(b"link", sent(request))
        while self._captures:
            capture = self._captures.pop()
            capture.copy()
            name = f"store-{capture.store}.server-{self.rank}.safetensors"
            path = folder_of(self.directory, capture.number) / name
            outcome = write_tensors(path, capture.headers, capture.contents(), {})
            capture.drop()
            outbox += self.shard.saved(capture, path, outcome)
        while self._records:
            record = self._records.pop(0)
            if self.standby is not None:
                self.standby.apply(sent(record))
        (reply,) = [reply for _, reply in outbox if isinstance(reply, wire.Reply) and reply.seq == request.seq]
        return sent(reply)


class PlayedShards:
    """See the module.

    Args:
        servers: how many there are.
        rule: of the store.
        directory: for checkpoints.
        resume: continue from the newest checkpoint there.

    Attributes:
        store: of worker 0, the only one.
        servers: see above.
    """

    def __init__(self, servers: int, rule: Rule, directory: Path, resume: bool = False) -> None:
        self.servers = [_Server(rank, directory) for rank in range(servers)]
        self._next = 0
        self._places: dict[Key, tuple[int, list[ReadSegment]]] = {}
        session = _Numbered(servers, self._answer)
        session.num_workers = 1
        session.config = Config(checkpoint_dir=str(directory), checkpoint_resume=str(directory) if resume else "")
        self.store = DistStore(session, "dist", rule)  # type: ignore[arg-type]
        self._session = session

    def close(self) -> None:
        """Let go of the servers: a session with checkpoints is kept for as long as its process lives."""
        self.servers.clear()
        self._session.asked.clear()
        self._session.client.made.clear()

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        if peer == b"scheduler":
            if not isinstance(request, wire.Declare):
                return wire.Ack(request.seq)
            answer = placed(request, len(self.servers), self._next)
            self._next += len(answer.ids)
            at = 0
            for key, count in zip(request.keys, answer.counts, strict=True):
                columns = (answer.ids, answer.servers, answer.starts, answer.stops)
                segments = [
                    ReadSegment(*each) for each in zip(*(part[at : at + count] for part in columns), strict=True)
                ]
                self._places[key] = request.store, segments
                at += count
            return answer
        reply = self.servers[int(peer.rpartition(b" ")[2])].handle(request)
        if isinstance(reply, wire.Failure):
            raise rebuild(reply.kind, reply.text)
        return reply

    # ---- a reader

    def held(self, key: Key, spec: Spec) -> HeldValue:
        store, segments = self._places[key]
        return HeldValue(key, spec, store, segments)

    def read_rows(self, held: HeldValue, ids: Sequence[int], slack: int) -> Any:
        pull = RowPull(held, ids, None)
        for server, _, fields, take in pull.asks(slack):
            shard = self.servers[server].shard
            read = RowRead(shard.stores[held.store], sent(wire.ReadRows(sender(role="reader"), **fields)), Heap())
            take(sent(_answered(read)))
        return pull.result()

    def read_value(self, held: HeldValue, slack: int) -> Any:
        for read in reads_of([held]):
            shard = self.servers[read.server].shard
            message = wire.ReadValues(sender(role="reader"), **read.fields, slack=slack)
            read.take(sent(_answered(ValueRead(shard.stores[held.store], sent(message), Heap()))))
        return held.flat.clone()


def _answered(read: Any) -> Any:
    while (reply := read.step(1 << 20)) is None:
        pass
    return reply
