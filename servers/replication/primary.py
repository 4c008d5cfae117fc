"""The primary of a server's rank: its shard serves, each change is recorded, and answers wait at the gate. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvstore import wire
from kvstore.errors import WireError
from servers.requests.replies import Outbox
from servers.shard import Shard

# When an answer waits for the standby.
#
#   standby                       journal            _gates   answers                        synced
#   none                          None               False    leave at once                  False
#   is being sent the state       captured is None   False    leave at once                  False
#   has not stored all of it      stored < captured  False    leave at once                  False
#   has stored the state          stored >= captured True     wait for the records before    once all records up to this
#                                                             them                           moment are stored
#   new, of a new primary         newest = 0         True     wait                           True
#   is lost: a new view           None               False    those that wait leave          False
#
# Answers do not wait for a standby that is still being sent the state: that takes as long as all weights take to cross
# the network, and no worker could go on. Until it is in step the scheduler does not let it take over.


class Primary:
    """A shard that serves, its journal for the standby, and the gate at which its answers wait.

    ``journal`` has the records for the standby; None while there is none.
    """

    def __init__(self, shard: Shard) -> None:
        self.gate = Gate()
        self.journal: Journal | None = None
        self._shard = shard
        self._gates = False  # whether answers wait for the standby
        self._synced_at: int | None = None  # from this record on, the standby has all; None until that is known

    @property
    def synced(self) -> bool:
        """Whether the standby has stored the changes behind all answers so far."""
        return self.journal is not None and self._synced_at is not None and self.journal.stored >= self._synced_at

    @property
    def nbytes(self) -> int:
        """How many bytes of state the standby has been sent."""
        return 0 if self.journal is None else self.journal.nbytes

    @property
    def capturing(self) -> bool:
        return self.journal is not None and self.journal.capturing

    def record(self, message: wire.Message) -> None:
        if self.journal is not None:
            self.journal.add(message)

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        outbox = self._shard.handle(peer, message)
        if isinstance(message, wire.Explain) and self.gate.holds(peer, message.about):
            text = f"waits for the standby of server {self._shard.rank}, which has not stored it"
            return [(peer, wire.Explanation(message.seq, text))]
        return self.answer(outbox)

    def depart(self, roster: wire.Roster) -> Outbox:
        return self.answer(self._shard.depart(*roster.told))

    def answer(self, outbox: Outbox) -> Outbox:
        """Return the part of ``outbox``, which the shard has just returned, that may leave now."""
        if not self._gates or self.journal is None:
            return outbox
        return self.gate.take(outbox, self.journal.newest, self.journal.stored)

    def pair(self, epoch: int, empty: bool, send: Callable[[wire.Record], None]) -> Outbox:
        """Have a standby from now on; return the answers that waited for the one before.

        ``empty``: whether both processes are new, so that there is no state to copy.
        """
        outbox = self.part()
        if empty:
            self._gates, self._synced_at = True, 0
            self.journal = Journal(epoch, send)
        else:
            self.journal = Journal(epoch, send, self._shard.capture())
        return outbox

    def part(self) -> Outbox:
        """Have no standby any more; return the answers that waited for it."""
        self.journal, self._gates, self._synced_at = None, False, None
        return self.gate.open()

    def go_on(self) -> None:
        """Send the next piece of the state that a new standby lacks."""
        if self.journal is not None:
            self.journal.go_on()
            self._gate_if_caught_up(self.journal)

    def stored(self, message: wire.Stored) -> Outbox:
        """Take the standby's word up to which record it has all; return the answers that have waited for it."""
        journal = self.journal
        if journal is None:
            return []
        journal.store(message)
        self._gate_if_caught_up(journal)
        return self.gate.open(journal.stored)

    def _gate_if_caught_up(self, journal: Journal) -> None:
        """Let answers wait for the standby once it has the capture: then it is not far behind."""
        if not self._gates and journal.captured is not None and journal.stored >= journal.captured:
            self._gates, self._synced_at = True, journal.newest  # all answers so far rest on records up to the newest


class Gate:
    """Holds answers, in the order in which they were made, until the standby has stored the records before them.

    So a worker that has been answered loses nothing with the primary: neither an update that was acknowledged, nor a
    value that it has read.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Outbox]] = deque()

    def take(self, outbox: Outbox, newest: int, stored: int) -> Outbox:
        """Return the part of ``outbox`` that may leave now; explanations always may.

        It was made when ``newest`` was the number of the newest record. The standby has the records up to ``stored``.
        """
        if not outbox or (newest <= stored and not self._waiting):
            return outbox
        leaves: Outbox = []
        waits: Outbox = []
        for entry in outbox:  # an explanation says why an answer waits, so it must not wait behind that answer
            (leaves if isinstance(entry[1], wire.Explanation) else waits).append(entry)
        if waits:
            self._waiting.append((newest, waits))
        return leaves

    def open(self, stored: int | None = None) -> Outbox:
        """Return the answers that may leave once the standby has the records up to ``stored``; None: there is none."""
        outbox: Outbox = []
        while self._waiting and (stored is None or self._waiting[0][0] <= stored):
            outbox += self._waiting.popleft()[1]
        return outbox

    def holds(self, peer: bytes, seq: int) -> bool:
        return any(
            link == peer and isinstance(message, wire.Reply) and message.seq == seq
            for _, outbox in self._waiting
            for link, message in outbox
        )


PIECE_BYTES = 4 << 20  # of the capture, sent at a time: workers' messages come in between


class Journal:
    """The records that one standby has not stored yet: numbered from 1, sent in order, resent over a new link.

    The standby may not have its view yet. So the first record goes alone: the standby keeps it, and says that it is
    stored when the view is there. Then the rest follows.

    Args:
        epoch: of the view in which primary and standby were put together.
        capture: makes the state that the standby lacks, as the first records; none if both are new.

    Attributes:
        newest: the number of the newest record; 0 before the first.
        stored: the standby has all records up to this number.
        captured: the number of the last record of the capture; None until that is made.
        nbytes: of the capture, as far as it is made.
    """

    def __init__(
        self, epoch: int, send: Callable[[wire.Record], None], capture: Iterator[wire.Message] | None = None
    ) -> None:
        self.epoch = epoch
        self.newest = self.stored = self.nbytes = 0
        self._send = send
        self._capture = capture
        self.captured: int | None = 0 if capture is None else None
        self._later: deque[wire.Message] = deque()  # what has changed since the capture
        self._records: deque[wire.Record] = deque()
        self._sent = 0

    @property
    def capturing(self) -> bool:
        """Whether some of the capture has not become records yet; see ``go_on``."""
        return self._capture is not None

    def add(self, message: wire.Message) -> None:
        """Record ``message``. It leaves at once, or after the capture."""
        if self._capture is not None:
            self._later.append(message)
        else:
            self._add(message)

    def go_on(self) -> None:
        """Send the next piece of the capture, and after its last piece the changes since."""
        if self._capture is None:
            return
        until = self.nbytes + PIECE_BYTES
        while self.nbytes < until:
            message = next(self._capture, None)
            if message is None:
                self._capture, self.captured = None, self.newest
                while self._later:
                    self._add(self._later.popleft())
                return
            self.nbytes += sum(map(len, self._add(message)))

    def store(self, message: wire.Stored) -> None:
        """Forget the records that the standby has."""
        if message.epoch != self.epoch:
            return
        if message.number > self.newest:
            raise WireError(f"expected records up to {self.newest}, got Stored of {message.number}")
        while self._records and self._records[0].number <= message.number:
            self._records.popleft()
        self.stored = max(self.stored, message.number)
        self._sent = max(self._sent, self.stored)
        self._flush()

    def send_again(self) -> None:
        """Resend all that is not stored over a new link."""
        self._sent = self.stored
        self._flush()

    def _add(self, message: wire.Message) -> list[wire.Buffer]:
        """Make a record; return the frames in it."""
        self.newest += 1
        frames = wire.encode(message)
        self._records.append(wire.Record(self.epoch, self.newest, frames))
        self._flush()
        return frames

    def _flush(self) -> None:
        """Send what has not been sent over this link; nothing but the first record until that is stored."""
        last = self.newest if self.stored else min(self.newest, 1)
        if self._sent >= last:
            return
        oldest = self._records[0].number
        for place in range(max(0, self._sent + 1 - oldest), last + 1 - oldest):
            record = self._records[place]
            self._send(record)
            self._sent = record.number
