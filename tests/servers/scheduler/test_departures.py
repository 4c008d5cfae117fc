from __future__ import annotations

from kvstore import wire
from servers.scheduler.departures import Departures, Rosters
from servers.scheduler.members import JobMember


def test_the_others_know_of_a_worker_that_has_left_after_its_farewell():
    departures = Departures(5.0)
    departures.add(3, 10.0)
    departures.add(1, 12.0)
    assert (departures.left, departures.known) == ({1, 3}, set())
    assert departures.due(14.9, all_gone=False) == []
    assert departures.due(15.0, all_gone=False) == [3]
    assert departures.due(15.0, all_gone=False) == [], "once"
    assert departures.known == {3}
    assert departures.due(17.0, all_gone=False) == [1]
    assert departures.left == departures.known == {1, 3}


def test_when_nobody_is_left_there_is_no_farewell_to_wait_for():
    departures = Departures(5.0)
    for rank in (2, 0):
        departures.add(rank, 10.0)
    assert departures.due(10.0, all_gone=True) == [2, 0]


def test_news_go_once_over_each_link_but_the_end_at_each_beat():
    sent: list[wire.Message] = []
    rosters = Rosters(lambda peer, message: sent.append(message))
    member = JobMember("server", 1, 0, "here", b"link", 1)
    rosters.change([3, 1], over=False)
    rosters.inform(member)
    assert sent == [], "it has not beaten yet"
    member.peer = b"beats"
    for _ in range(2):
        rosters.inform(member)
    assert sent == [wire.Roster(1, [1, 3])]
    rosters.change([0, 1, 3], over=True)
    for _ in range(2):
        rosters.inform(member)
    assert (sent[1:], rosters.over) == ([wire.Stop(), wire.Stop()], True)
