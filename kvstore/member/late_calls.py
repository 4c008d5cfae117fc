"""What a call waits for that is late: its peers are asked, and then where those are that they name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from kvstore.errors import UsageError
from kvstore.member.explanations import Explanations
from kvstore.member.outstanding import Question
from kvstore.ticket import Operation
from kvstore.transport import Peer
from kvstore.wire import Explain, Locate, Node

EXPLAIN_S = 15.0  # how long a peer may take to explain what a late request waits for
LOCATE_S = 3.0  # how long the answer may take where those are that it waits for


class Asks(Protocol):
    """What asks; see ``Client``."""

    guide: Peer | None

    @property
    def node(self) -> Node:
        """This process."""
        ...

    def ask(self, operation: Operation, *questions: Question) -> None:
        """Make ``questions`` of ``operation``."""
        ...

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Take in answers until ``condition``, for at most ``timeout`` seconds; return whether it holds."""
        ...

    def give_up(self, operation: Operation) -> None:
        """Give up the rest of ``operation``."""
        ...


def find_out(client: Asks, operation: Operation, requests: Mapping[Peer, int]) -> Explanations:
    """Ask what ``operation`` waits for.

    Args:
        requests: of ``operation`` without an answer, the number of one for each peer.
    """
    explanations, question = Explanations(requests), Operation("explanation")
    for peer, seq in requests.items():
        client.ask(question, Question(peer, question, Explain, {"about": seq}, partial(explanations.take, peer)))
    client.wait_until(lambda: not question.open, EXPLAIN_S)
    if client.guide is not None and client.guide.decode() not in explanations.silent:
        _locate(client, client.guide, operation, explanations)
    return explanations


def _locate(client: Asks, guide: Peer, operation: Operation, explanations: Explanations) -> None:
    """Ask where those are that ``operation`` waits for. Without an answer the message says less."""
    question = Operation("question where others are")
    with contextlib.suppress(UsageError):
        for role, ranks in explanations.awaited(client.node).items():
            take = partial(explanations.take_places, role)
            client.ask(question, Question(guide, question, Locate, {"role": role, "ranks": ranks}, take))
        client.wait_until(lambda: not (question.open and operation.open), LOCATE_S)
    client.give_up(question)
