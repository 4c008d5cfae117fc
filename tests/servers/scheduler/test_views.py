"""Who serves a rank, and who takes over: every transition, and what the user is told of it."""

from __future__ import annotations

import pytest

from kvstore import wire
from servers.scheduler.failover import ServerView, Views

A, B, NEXT = wire.Node("server", 1, 1), wire.Node("standby", 1, 1), wire.Node("server", 1, 2)
OTHERS = wire.Node("server", 0, 1), wire.Node("standby", 0, 1)


def begun() -> Views:
    views = Views()
    views.begin([OTHERS[0], A], [OTHERS[1], B])
    return views


def said(views: Views) -> list[str]:
    lines = list(views.news)
    views.news.clear()
    return lines


def test_in_the_beginning_each_server_has_its_standby_in_step():
    views = begun()
    assert views.of(1) == ServerView(1, A, B, synced=True)
    assert (views.of(2), views.of(-1), Views().of(0)) == (None, None, None)


def test_a_standby_takes_over_is_heard_of_and_gets_a_standby_of_its_own():
    views = begun()
    assert views.lose(A, "was killed by SIGKILL", 10.0) == ""
    assert views.of(1) == ServerView(2, B, None, synced=False)
    assert (views.takeovers, views.moved, said(views)) == (1, {1: 2}, []), "not before it serves"
    views.stand(wire.Standing(B, 2, 812, synced=False), 10.3)
    line = "server 1 was killed by SIGKILL; its standby took over at round 812 in 0.3 s; a new standby is being made"
    assert said(views) == [line]
    views.stand(wire.Standing(B, 2, 813, synced=False), 10.8)
    assert said(views) == [], "once"
    views.join(NEXT, 12.0)
    assert views.of(1) == ServerView(3, B, NEXT, synced=False)
    views.stand(wire.Standing(B, 3, 820, synced=False), 12.1)
    assert views.of(1) == ServerView(3, B, NEXT, synced=False)
    views.stand(wire.Standing(B, 3, 821, synced=True, nbytes=41_000_000), 12.2)
    assert views.of(1) == ServerView(4, B, NEXT, synced=True)
    assert said(views) == ["the standby of server 1 is in step again (41 MB in 0.2 s)"]
    assert views.lose(B, "was killed by SIGKILL", 13.0) == ""
    assert views.of(1) == ServerView(5, NEXT, None, synced=False)
    assert (views.takeovers, views.moved) == (2, {1: 5})
    assert views.of(0) == ServerView(1, *OTHERS, synced=True), "no other rank is touched"


def test_a_server_goes_on_without_its_standby_until_there_is_a_new_one():
    views = begun()
    assert views.lose(B, "exited with code 1", 1.0) == ""
    assert views.of(1) == ServerView(2, A, None, synced=False)
    assert (views.takeovers, said(views)) == (
        0,
        ["the standby of server 1 exited with code 1; a new one is being made"],
    )
    views.join(wire.Node("standby", 1, 2), 2.0)
    views.stand(wire.Standing(A, 3, 5, synced=True), 2.5)
    assert views.of(1) == ServerView(4, A, wire.Node("standby", 1, 2), synced=True)
    assert said(views) == ["the standby of server 1 is in step again, after 0.5 s"]


def test_a_server_without_a_standby_in_step_cannot_be_lost():
    views = begun()
    views.lose(B, "was killed", 1.0)
    assert views.lose(A, "was killed", 2.0) == "server 1 was killed, and had no standby at that time"
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.join(wire.Node("standby", 1, 2), 2.0)
    assert views.lose(A, "was killed", 2.0) == "server 1 was killed before its new standby was in step"
    assert views.of(1) == ServerView(3, A, wire.Node("standby", 1, 2), synced=False), "the view stays as it was"


@pytest.mark.parametrize(
    "standing",
    [
        wire.Standing(A, 2, 9, synced=True),
        wire.Standing(B, 3, 9, synced=True),
        wire.Standing(wire.Node("server", 1, 2), 3, 9, synced=True),
        wire.Standing(wire.Node("server", 7, 1), 3, 9, synced=True),
        wire.Standing(A, 3, 9, synced=False),
    ],
)
def test_only_the_primary_of_the_latest_view_says_that_its_standby_is_in_step(standing: wire.Standing):
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.join(wire.Node("standby", 1, 2), 2.0)
    views.stand(standing, 3.0)
    assert views.of(1) == ServerView(3, A, wire.Node("standby", 1, 2), synced=False)


def test_who_is_in_no_view_cannot_change_one():
    views = begun()
    views.lose(A, "was killed", 1.0)
    before = views.of(1)
    assert views.lose(A, "was killed", 2.0) == ""
    assert views.of(1) == before


def test_a_primary_that_is_alone_has_no_standby_that_could_be_in_step():
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.stand(wire.Standing(A, 2, 9, synced=True), 3.0)
    assert views.of(1) == ServerView(2, A, None, synced=False)


def test_a_server_whose_standby_is_not_started_again_goes_on_without_one():
    views = begun()
    views.give_up(B, "is on a lost host")
    assert said(views) == [], "it has not been lost yet"
    views.lose(B, "is on a lost host", 1.0)
    line = "the standby of server 1 is on a lost host, and is not started again: server 1 goes on without one"
    assert said(views) == [line]
    views = begun()
    views.lose(A, "was killed", 1.0)
    views.stand(wire.Standing(B, 2, 3, synced=False), 1.0)
    assert said(views)[0].endswith("; a new standby is being made")
    views.give_up(wire.Node("server", 1, 4), "exited with code 1")
    line = "the standby of server 1 exited with code 1, and is not started again: server 1 goes on without one"
    assert said(views) == [line]
    views = begun()
    views.give_up(A, "was killed")
    views.lose(A, "was killed", 1.0)
    views.stand(wire.Standing(B, 2, 3, synced=False), 1.0)
    assert said(views) == ["server 1 was killed; its standby took over at round 3 in 0 ms; it has no standby now"]


@pytest.mark.parametrize(
    ("nbytes", "size"), [(93, "93 bytes"), (4120, "4.12 kB"), (410_000, "0.41 MB"), (41_000_000, "41 MB")]
)
def test_sizes_and_short_times_are_told_in_units_that_fit(nbytes: int, size: str):
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.join(wire.Node("standby", 1, 2), 2.0)
    views.stand(wire.Standing(A, 3, 5, synced=True, nbytes=nbytes), 2.012)
    assert said(views)[1] == f"the standby of server 1 is in step again ({size} in 12 ms)"
