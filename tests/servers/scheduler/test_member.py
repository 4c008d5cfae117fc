from __future__ import annotations

from kvstore import wire
from servers.scheduler.members import NEXT, JobMember, MemberEvent, MemberState


def test_nothing_follows_the_end():
    assert {before for before, _ in NEXT} == {MemberState.JOINED, MemberState.READY}
    assert NEXT[MemberState.READY, MemberEvent.LEAVES] is MemberState.LEFT
    assert NEXT[MemberState.READY, MemberEvent.DIES] is MemberState.LOST


def test_a_member_is_named_by_its_role_rank_and_start():
    member = JobMember("server", nonce=7, hint=1, address="at 7", join_peer=b"j7", join_seq=1)
    assert (member.node, member.state) == (wire.Node("server", -1, 0), MemberState.JOINED)
    member.rank, member.incarnation = 1, 2
    assert member.node == wire.Node("server", 1, 2)
