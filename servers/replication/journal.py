"""The records that one standby has not stored yet: numbered from 1, sent in order, sent again over a new link. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvstore import wire
from kvstore.errors import WireError

PIECE_BYTES = 4 << 20  # of the capture, sent at a time: workers' messages come in between


class Journal:
    """What one primary has to tell one standby.

    The standby may not have its view yet. So the first record goes alone: the standby keeps it, and says that it is
    stored when the view is there. Then the rest follows.

    Args:
        epoch: of the view in which primary and standby were put together.
        send: sends a record over the link to the standby.
        capture: makes the state that the standby lacks, as the first records; none if both are new.

    Attributes:
        epoch: see above.
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
        """Send the next piece of the capture, and after its last piece what has changed since."""
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
        """Forget the records that the standby has.

        Raises:
            WireError: it says that it has records that do not exist.
        """
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
        """Send all that is not stored over a new link."""
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
