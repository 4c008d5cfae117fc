"""Errors as replies: of their own class if the other end knows it, and never too long."""

from __future__ import annotations

import pytest
from asking import Worker

from kvstore import wire
from kvstore.errors import KVStoreError, Mismatch, UsageError
from servers.requests.replies import Answer, refuse


class OfATest(KVStoreError):
    """An error that no other process knows."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UsageError("no such key"), "UsageError", "no such key"),
        (Mismatch("not so"), "Mismatch", "not so"),
        (ZeroDivisionError("division by zero"), "ServerError", "ZeroDivisionError: division by zero"),
        (OfATest("private"), "ServerError", "OfATest: private"),
    ],
)
def test_an_error_is_answered_by_its_name_or_as_the_servers(error: Exception, kind: str, text: str) -> None:
    request = Worker().pull([1])
    assert refuse(b"link", request, error) == Answer(b"link", request, wire.Failure(request.seq, kind, text))


@pytest.mark.parametrize("kind", [UsageError, ZeroDivisionError])
def test_a_long_text_is_cut(kind: type[Exception]) -> None:
    answer = refuse(b"link", Worker().pull([1]), kind("x" * (wire.MAX_REASON + 1)))
    assert isinstance(answer.reply, wire.Failure)
    assert len(answer.reply.text) == wire.MAX_REASON
