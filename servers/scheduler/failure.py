"""Whether a job has failed, and why. All that are told of it, and all that must not go on then, ask here. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvstore import wire
from kvstore.errors import NodeLost
from servers.requests.replies import refuse
from servers.scheduler.member import MemberEvent, MemberState
from servers.scheduler.members import Members


class JobFailure:
    """The failure of one job, which its first cause makes.

    Args:
        members: of the job, who are told.
        send: sends a message over a link.
        note: is told when the job fails, and takes a line for observers.

    Attributes:
        text: why the job has failed; None as long as it has not.
        at: when it has failed.
        cause: the process of a server or standby whose loss has failed it, by name; empty if something else has.
    """

    def __init__(
        self, members: Members, send: Callable[[bytes, wire.Message], None], note: Callable[[float, str], None]
    ) -> None:
        self.text: str | None = None
        self.cause = ""
        self.at = 0.0
        self._members = members
        self._send = send
        self._note = note

    def happen(self, text: str, now: float, cause: str = "") -> None:
        """Let the job fail: tell all members that are still there why. Only the first call counts."""
        if self.text is not None:
            return
        self.text, self.at, self.cause = text[: wire.MAX_REASON], now, cause
        self._note(now, f"the job has failed: {self.text}"[: wire.MAX_REASON])
        failed = self.told()
        for member in self._members.everyone:
            if member.state is MemberState.READY and member.peer is not None:
                self._send(member.peer, failed)
            elif member.state is MemberState.JOINED:
                self._members.happens(member, MemberEvent.LEAVES)
                joining = wire.Leave(
                    wire.Sender(wire.Node(member.role, member.hint, member.nonce), member.join_seq, 0), error=None
                )
                self._send(member.join_peer, refuse(member.join_peer, joining, NodeLost(self.text, cause)).reply)

    def told(self) -> wire.JobFailed:
        """What members are told once the job has failed."""
        return wire.JobFailed(self.text or "", self.cause)

    def check(self) -> None:
        """Raise ``NodeLost`` with the reason if the job has failed."""
        if self.text is not None:
            raise NodeLost(self.text, self.cause)
