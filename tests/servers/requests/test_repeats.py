from __future__ import annotations

from asking import sender

from kvstore import wire
from servers.requests.repeats import Ledger, Verdict


def request(seq: int, *, done: int = 0, rank: int = 0, incarnation: int = 1, role: str = "worker") -> wire.Request:
    return wire.Barrier(sender(rank, seq, done=done, role=role, incarnation=incarnation), store=0, number=0)


def test_the_first_of_its_number_is_new_and_the_next_a_repeat():
    ledger: Ledger[str] = Ledger()
    assert ledger.admit(request(1)) is Verdict.NEW
    assert ledger.admit(request(1)) is Verdict.REPEAT
    assert ledger.recall(request(1)) is None
    ledger.note(request(1), "done")
    assert ledger.admit(request(1)) is Verdict.REPEAT
    assert ledger.recall(request(1)) == "done"


def test_numbers_belong_to_their_sender():
    ledger: Ledger[str] = Ledger()
    reply_links = [{"rank": 0}, {"rank": 1}, {"rank": 0, "role": "server"}]
    assert [ledger.admit(request(1, **who)) for who in reply_links] == [Verdict.NEW] * 3
    ledger.note(request(1, rank=1), "mine")
    assert [ledger.recall(request(1, **who)) for who in reply_links] == [None, "mine", None]


def test_requests_may_come_in_any_order():
    ledger: Ledger[str] = Ledger()
    assert [ledger.admit(request(seq, done=1)) for seq in (3, 1, 2)] == [Verdict.NEW] * 3


def test_what_is_done_is_forgotten_and_its_repeats_are_stale():
    ledger: Ledger[str] = Ledger()
    for seq in range(1, 6):
        ledger.admit(request(seq))
        ledger.note(request(seq), f"answer {seq}")
    assert len(ledger) == 5
    assert ledger.admit(request(6, done=4)) is Verdict.NEW
    assert len(ledger) == 3
    assert ledger.admit(request(3)) is Verdict.STALE
    assert ledger.recall(request(3)) is None
    assert ledger.admit(request(4)) is Verdict.REPEAT
    assert ledger.recall(request(4)) == "answer 4"


def test_an_older_done_brings_nothing_back():
    ledger: Ledger[str] = Ledger()
    ledger.admit(request(9, done=9))
    assert ledger.admit(request(5, done=2)) is Verdict.STALE
    assert ledger.admit(request(9, done=2)) is Verdict.REPEAT


def test_an_answer_to_what_is_done_is_not_kept():
    ledger: Ledger[str] = Ledger()
    ledger.admit(request(1))
    ledger.admit(request(2, done=2))
    ledger.note(request(1), "late")
    assert ledger.recall(request(1)) is None
    assert len(ledger) == 1


def test_a_new_incarnation_begins_a_new_page_and_fences_the_old():
    ledger: Ledger[str] = Ledger()
    ledger.admit(request(1))
    ledger.note(request(1), "old")
    assert ledger.admit(request(1, incarnation=2)) is Verdict.NEW
    assert ledger.recall(request(1, incarnation=2)) is None
    assert ledger.admit(request(2, incarnation=1)) is Verdict.STALE
    ledger.note(request(1, incarnation=1), "from the old one")
    assert ledger.recall(request(1, incarnation=2)) is None


def test_an_answer_to_an_unknown_sender_is_dropped():
    ledger: Ledger[str] = Ledger()
    ledger.note(request(1), "x")
    assert len(ledger) == 0
    assert ledger.recall(request(1)) is None
