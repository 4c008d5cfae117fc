"""The servers' captures for one checkpoint: worker 0 asks for them, and waits for their files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvstore import wire
from kvstore.client.saving import CheckpointInProgress, SavedStore
from kvstore.errors import KVStoreError
from kvstore.member.outstanding import Question, ready
from kvstore.member.session import Session
from kvstore.ticket import Operation


class Answers(Operation):
    """The wait for the files of all servers. An error gives the checkpoint up, and is nobody else's."""

    def __init__(self, saving: CheckpointInProgress, session: Session) -> None:
        super().__init__(f"checkpoint {saving.number}", (), session.client, limits=session.limits)
        self.saving = saving

    def fail(self, error: KVStoreError) -> None:
        """See ``Operation``."""
        self.saving.fail(error)
        super().fail(error)


def ask(session: Session, saving: CheckpointInProgress, stores: Sequence[SavedStore]) -> Answers:
    """Have all servers capture ``stores``, and return when they have noted it; their files come later.

    Raises:
        KVStoreError: a server cannot, or is lost.
    """
    answers = Answers(saving, session)
    asked = Operation("asking for a checkpoint", (), session.client, limits=session.limits)
    questions = [
        Question(
            session.servers[server],
            asked,
            wire.Capture,
            {"store": store.number, "number": saving.number, "ids": ids, "clocks": clocks},
        )
        for store in stores
        for server, (ids, clocks) in store.captures().items()
    ]
    session.client.exchange(asked, ready, questions)
    waits = [
        Question(
            session.servers[server],
            answers,
            wire.AwaitCapture,
            {"store": stores[place].number, "number": saving.number},
            partial(saving.take, (place, server)),
        )
        for place, server in saving.expected
    ]
    session.client.submit(answers, ready, waits)
    return answers
