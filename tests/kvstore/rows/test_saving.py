"""Saves in a thread; what is in the files is for ``test_table_files`` and ``tests/kvstore/store/test_tables``."""

import threading

import numpy as np
import pytest

import kvstore as kv
from kvstore.errors import CheckpointError, DeadlineExceeded, UsageError
from kvstore.lineage import Version
from kvstore.rows import saving
from kvstore.rows.frozen_rows import Page
from kvstore.rows.open_table import open_table
from kvstore.rows.saving import OpenSaves, SavePace, load_table, save_table
from kvstore.rows.table_files import FrozenState, folders
from kvstore.table import Table

TABLE = Table(dim=2)


def _page(number):
    return Page(np.array([number]), np.ones((1, 2), np.float32), {})


class _Reading:
    def __init__(self, pages):
        self._pages, self.closed = pages, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def pages(self, state):
        return iter(self._pages() if callable(self._pages) else self._pages)

    def gone_pages(self):
        return iter(())


def _save(directory, reading, wait, others=None):
    others = others or OpenSaves()
    return save_table(
        directory, "t", TABLE, 1, None, True, lambda _: (reading, FrozenState([Version(7, 3)], [3], {})), wait, others
    )


def test_a_save_in_a_thread_ends_when_it_is_waited_for_however_slow_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARE", 1e-9)  # a pause of days
    go_on = threading.Event()

    def pages():
        go_on.wait(60)
        yield from map(_page, range(3))

    reading = _Reading(pages)
    ticket = _save(tmp_path, reading, wait=False)
    assert not ticket.done()
    with pytest.raises(DeadlineExceeded, match="save_table of 't' goes on"):
        ticket.wait(0)
    go_on.set()
    assert ticket.wait(60) == 3
    assert ticket.done()
    assert reading.closed
    assert len(open_table(tmp_path)) == 3


@pytest.mark.parametrize(("error", "raised"), [(UsageError("lost"), UsageError), (OSError(28, "full"), UsageError)])
@pytest.mark.parametrize("wait", [True, False])
def test_what_goes_wrong_is_raised_and_the_servers_may_go_on(tmp_path, error, raised, wait):
    def pages():
        yield _page(1)
        raise error

    reading = _Reading(pages)
    with pytest.raises(raised, match=r"lost|'t' cannot be saved there: full"):
        _save(tmp_path, reading, wait).wait(60)
    assert reading.closed
    with pytest.raises(CheckpointError, match="no saved table"):
        open_table(tmp_path)


def test_an_unforeseen_error_in_the_thread_is_not_lost(tmp_path):
    def pages():
        raise ZeroDivisionError("really")
        yield

    with pytest.raises(Exception, match="ZeroDivisionError: really"):
        _save(tmp_path, _Reading(pages), wait=False).wait(60)


def test_of_many_saves_the_oldest_is_ended_before_another_table_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARE", 1e-9)
    others = OpenSaves()
    tickets = [_save(tmp_path, _Reading([_page(1), _page(2)]), False, others) for _ in range(5)]
    assert all(ticket.done() for ticket in tickets[:3])
    assert not any(ticket.done() for ticket in tickets[3:])
    assert [ticket.wait(60) for ticket in tickets] == [3] * 5
    assert len(folders(tmp_path)) == 5


def test_pages_pass_through_a_pace():
    pace = SavePace()
    pace.hurry()
    assert list(pace.pages(iter([1, 2]))) == [1, 2]


def test_a_load_gives_each_page_with_the_version(tmp_path):
    _save(tmp_path, _Reading([_page(1), _page(2)]), wait=True)
    got = []
    load_table(
        tmp_path, "t", TABLE, "sgd", lambda page, version, steps: got.append((page.ids.tolist(), version, steps))
    )
    assert got == [([1, 2], 3, 0)]


def test_a_directory_has_saves_of_one_table(tmp_path):
    store = kv.create("local")
    store.init(["a", "b"], [TABLE, TABLE])
    store.save_table("a", tmp_path).wait()
    with pytest.raises(UsageError, match="has saves of table 'a'; save 'b' to a directory of its own"):
        store.save_table("b", tmp_path)
    store.save_table("a", tmp_path).wait()
    assert open_table(tmp_path).key == "a"
