"""Links of every transport: whose a message is, and what is left of a link that has ended."""

from __future__ import annotations

import pytest
from every_transport import SIZES, Ends, pattern, receive

from kvstore.errors import ConfigError


def test_replies_go_back_over_the_link(ends: Ends):
    listener, other, link = ends.pair()
    for size in SIZES:
        other.send(link, [b"question"])
        peer, _ = receive(listener)
        listener.send(peer, [b"answer", pattern(size)])
        assert receive(other) == (link, [b"answer", pattern(size)])


def test_many_peers_are_told_apart(ends: Ends):
    listener = ends.new()
    endpoint = listener.bind(ends.endpoint)
    others = [ends.new() for _ in range(8)]
    links = [other.connect(endpoint) for other in others]
    for turn in range(3):
        for number, (other, link) in enumerate(zip(others, links, strict=True)):
            other.send(link, [b"%d" % number, b"%d" % turn])
    heard: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for _ in range(24):
        peer, (number, turn) = receive(listener)
        heard.setdefault(peer, []).append((bytes(number), bytes(turn)))
    assert sorted(heard.values()) == [[(b"%d" % n, b"%d" % turn) for turn in range(3)] for n in range(8)]
    for peer, messages in heard.items():
        listener.send(peer, [messages[0][0]])
    for number, (other, link) in enumerate(zip(others, links, strict=True)):
        assert receive(other) == (link, [b"%d" % number])


def test_one_end_may_have_several_links_and_listen_too(ends: Ends):
    one, two, _ = ends.pair()
    three = ends.new()
    link = two.connect(three.bind("tcp://127.0.0.1:0" if ends.endpoint.startswith("tcp") else f"{ends.endpoint}-2"))
    two.send(link, [b"to three"])
    peer, frames = receive(three)
    assert frames == [b"to three"]
    three.send(peer, [b"back"])
    assert receive(two) == (link, [b"back"])
    assert one.recv(0) is None


def test_two_links_to_one_place_are_two_links(ends: Ends):
    listener, other, first = ends.pair()
    other.send(first, [b"1"])
    peer, _ = receive(listener)
    second = other.connect(ends.endpoint)
    other.send(second, [b"2"])
    assert second != first
    assert receive(listener)[0] != peer


def test_what_is_sent_before_anyone_listens_arrives_in_order(ends: Ends):
    if ends.endpoint.startswith("tcp"):
        probe = ends.new()
        ends.endpoint = probe.bind(ends.endpoint)
        probe.close()
    other, _ = ends.new(), ends.new()
    link = other.connect(ends.endpoint)
    for number in range(20):
        other.send(link, [b"%d" % number, pattern(1000)])
    listener = ends.new()  # with keys, the probe's again
    listener.bind(ends.endpoint)
    other.send(link, [b"20", b""])
    assert [bytes(receive(listener)[1][0]) for _ in range(21)] == [b"%d" % number for number in range(21)]


def test_a_message_to_a_peer_that_is_gone_is_dropped(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"hello"])
    peer, _ = receive(listener)
    other.close()
    for _ in range(3):
        listener.send(peer, [b"anyone there?", pattern(64 << 10)])
    listener.send(b"never known", [b"x"])
    third = ends.new()
    link = third.connect(ends.endpoint)
    third.send(link, [b"next"])
    assert receive(listener)[1] == [b"next"]
    assert listener.recv(0) is None


def test_over_a_link_that_was_dropped_nothing_comes_any_more_and_others_stay(ends: Ends):
    listener, other, kept = ends.pair()
    dropped = other.connect(ends.endpoint)
    other.send(dropped, [b"here"])
    answer_to, _ = receive(listener)
    listener.send(answer_to, [b"late"])
    other.disconnect(dropped)
    other.send(dropped, [b"lost"])
    other.send(kept, [b"asked"])
    peer, frames = receive(listener)
    assert frames == [b"asked"]
    listener.send(answer_to, [b"later"])
    listener.send(peer, [b"answered"])
    assert receive(other) == (kept, [b"answered"])
    other.disconnect(other.connect(ends.endpoint))  # before anything was sent over it


def test_closing_twice_is_closing_once_and_a_closed_end_is_quiet(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"x"])
    other.close(linger=1.0)
    other.close()
    other.send(link, [b"y"])
    assert other.recv(0) is None
    other.interrupt()
    assert receive(listener)[1] == [b"x"], "what was sent before had the linger to leave"
    assert listener.recv(0.01) is None


def test_a_place_is_free_again_after_closing(ends: Ends):
    first = ends.new()
    endpoint = first.bind(ends.endpoint)
    first.close()
    other, _, second = ends.new(), ends.new(), ends.new()
    assert second.bind(endpoint) == endpoint
    other.send(other.connect(endpoint), [b"x"])
    assert receive(second)[1] == [b"x"]


def test_a_place_can_be_listened_at_once(ends: Ends):
    first, _, _, second = ends.new(), ends.new(), ends.new(), ends.new()
    endpoint = first.bind(ends.endpoint)
    if endpoint.startswith("ipc"):
        return  # a second one takes a unix socket over; its directory is private
    with pytest.raises(ConfigError, match="in use"):
        second.bind(endpoint)
