"""Messages: each comes back as it was, and what they have in common."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import CLASSES, ME, any_message, sender
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError
from kvstore.wire.frames import MESSAGES
from kvstore.wire.messages import require_known, same_length


def test_every_class_that_crosses_the_wire_is_tried() -> None:
    # A launcher that has been imported has messages of its own.
    assert {cls for cls in MESSAGES.values() if cls.__module__.startswith("kvstore.")} == set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_message(cls))
    assert wire.decode(wire.encode(message)) == message


def test_a_request_has_one_sender_of_which_it_tells_node_and_number() -> None:
    request = wire.decode(wire.encode(wire.Census(wire.Sender(wire.Node("worker", 3, 1), 7, 5))))
    assert request.sender == wire.Sender(wire.Node("worker", 3, 1), 7, 5)
    assert (request.node, request.seq, request.sender.done) == (wire.Node("worker", 3, 1), 7, 5)
    assert type(request.sender) is wire.Sender
    assert type(request.node) is wire.Node


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (sender(role="boss"), r"Census.sender: node: role: expected one of .*, got str 'boss'"),
        (sender(rank=-2), r"Census.sender: node: rank: expected an integer from -1"),
        (ME._replace(done=True), r"Census.sender: done: expected an integer .*, got bool True"),
    ],
)
def test_what_is_wrong_with_a_sender_is_said(changed: wire.Sender, words: str) -> None:
    with pytest.raises(WireError, match=words):
        wire.decode(wire.encode(wire.Census(changed)))


def test_nodes_are_named_as_people_name_them() -> None:
    assert [str(wire.Node(role, 3, 1)) for role in ("worker", "server", "scheduler")] == [
        "worker 3",
        "server 3",
        "scheduler",
    ]


def test_lists_of_one_thing_have_one_length() -> None:
    same_length()
    same_length([1], [2], ["x"])
    with pytest.raises(WireError, match="different lengths: 1, 2, 0"):
        same_length([1], [1, 2], [])


def test_kinds_are_places_in_a_list() -> None:
    require_known([], [])
    require_known([0, 1, 0], ["a", "b"])
    with pytest.raises(WireError, match="expected kinds below 2, got 2"):
        require_known([0, 2], ["a", "b"])
