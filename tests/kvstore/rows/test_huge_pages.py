"""Which huge pages are asked for as rows of tables are made, and when those that are there are collapsed."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.rows import slabs
from kvstore.rows.index import FixedSlots
from kvstore.rows.row_table import RowTable
from kvstore.rows.slab_space import EVERY, LOOKED, HugePages, PageQueue, SlabSpace
from kvstore.rows.slabs import HUGE, PAGE, MappedMemory, Slab
from kvstore.table import Table

COLUMNS = 16
SMALL, WHOLE = PAGE // (4 * COLUMNS), HUGE // (4 * COLUMNS)  # rows in a page of either size


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """What is asked of memory, instead of asking the system: numbers of pages to have, and of those to collapse."""
    made, ask = [], MappedMemory.ask

    def noted(memory, number):
        asked = ask(memory, number)
        made.extend([("ask", number)] if asked else [])
        return asked

    monkeypatch.setattr(slabs, "ADVICE", None)
    monkeypatch.setattr(MappedMemory, "ask", noted)
    monkeypatch.setattr(MappedMemory, "collapse", lambda _, number: made.append(("collapse", number)))
    return made


class _Slots:
    """A table of slots whose rows can be made, and the pages of one slab of it."""

    def __init__(self, rows, queue, slab=None, made=None, columns=COLUMNS):
        self.slots = FixedSlots(rows, 0, 1, made)
        self.slab = Slab(columns, np.float32, rows) if slab is None else slab
        self.slab.reserve(rows)
        self.pages = HugePages(self.slots, queue)
        self.pages.begin([self.slab])

    def make(self, ids):
        slots = self.slots.insert(np.array(ids, np.int64))
        self.pages.made(slots)
        self.pages.updated()

    @property
    def asked(self):
        memory = self.slab.memory
        return [number for number in range(memory.huge_pages) if memory.asked(number)]


def test_pages_are_asked_for_once_half_of_the_small_ones_have_a_row():
    table = _Slots(3 * WHOLE, PageQueue())
    first_of_page = np.arange(0, 3 * WHOLE, SMALL)
    table.make(first_of_page[256:512:2])  # of the first, a quarter
    assert table.asked == []
    table.make(first_of_page[512:768])  # of the second, a half
    assert table.asked == [1]
    table.make(first_of_page[512:768] + 1)
    assert table.asked == [1], "other rows of the same pages"
    table.make(first_of_page[:256])
    assert table.asked == [0, 1]


def test_a_table_of_which_few_rows_are_used_gets_none(calls):
    table = _Slots(64 * WHOLE, PageQueue())
    ids = np.random.default_rng(0).permutation(64 * WHOLE)[: 64 * 200]
    for part in np.split(ids, 50):
        table.make(part)
    assert calls == []


def test_rows_of_all_tables_in_a_page_count(calls):
    queue, array, flags = PageQueue(), Slab(COLUMNS, np.float32, WHOLE), Slab(None, np.bool_, WHOLE)
    array.reserve(WHOLE)
    flags.reserve(WHOLE)
    size = WHOLE // 4
    parts = [(array.part(first, size, False), flags.part(first, size, False)) for first in range(0, WHOLE, size)]
    tables = [_Slots(size, queue, *part) for part in parts]
    for table in tables[:2]:
        assert calls == []
        table.make(np.arange(0, size, SMALL))
    assert calls == [("ask", 0)]
    tables[3].make(np.arange(0, size, SMALL))
    assert len(calls) == 1, "it has been asked for"


@pytest.mark.parametrize("columns", [1, 3, 100, 5000, 1 << 20])
def test_rows_of_any_size_fill_their_pages(columns):
    rows = max(1, 11 * HUGE // (16 * columns))
    table = _Slots(rows, PageQueue(), columns=columns)
    table.make(np.arange(0, rows, max(1, 1000 // columns)))
    for _ in range(3):
        table.pages.updated()
    assert table.asked == [0, 1, 2] if rows > 1 else [0, 1]


def test_one_of_which_less_than_half_is_used_is_not_asked_for():
    table = _Slots(WHOLE + WHOLE // 4, PageQueue())
    table.make(np.arange(0, WHOLE + WHOLE // 4, SMALL))
    assert table.asked == [0]


def test_a_large_table_is_looked_at_part_by_part():
    part = LOOKED // WHOLE
    table = _Slots(5 * LOOKED, PageQueue())
    table.make(np.arange(0, 5 * LOOKED, SMALL))
    for number in range(1, 6):
        assert table.asked == list(range(number * part))
        table.pages.updated()


def test_it_is_looked_at_again_when_a_quarter_more_rows_are_made(monkeypatch):
    table = _Slots(WHOLE, PageQueue())
    looks, pages = [], Slab.huge_pages
    monkeypatch.setattr(Slab, "huge_pages", lambda *args: looks.append(1) or pages(*args))
    for number in range(255):
        table.make([number * SMALL])
    assert 10 < len(looks) < 35
    table.make(np.arange(1, 100))
    assert table.asked == []
    table.make(np.arange(256 * SMALL, 400 * SMALL, SMALL))
    assert table.asked == [0]


def test_rows_made_one_after_the_other_get_their_pages_before_they_are_written():
    table = _Slots(40 * WHOLE, PageQueue())
    for start in range(0, 40 * WHOLE, 5 * WHOLE):
        table.make(np.arange(start, start + 5 * WHOLE))
        assert table.asked == list(range((start // WHOLE) + 5))


def test_those_that_are_there_are_collapsed_one_by_one(calls):
    queue = PageQueue()
    tables = [_Slots(2 * WHOLE, queue) for _ in range(2)]
    for table in tables:
        table.make(np.arange(0, 2 * WHOLE, SMALL))
    assert len(queue) == 4
    calls.clear()
    for _ in range(5 * EVERY):
        tables[0].pages.updated()
    assert calls == [("collapse", number) for number in (0, 1, 0, 1)]
    assert len(queue) == 0


def test_slabs_in_memory_of_their_own_have_no_rows_of_others(calls):
    flags = Slab(None, np.bool_, WHOLE)
    flags.reserve(WHOLE)
    flags.items[:] = True
    size = WHOLE // 2
    flags.items[-10:] = False
    table = _Slots(size + 10, PageQueue(), made=flags.part(size - 10, size + 10, False))
    table.make([size + 9])
    assert table.asked == [0], "its own half"
    calls.clear()
    other = _Slots(size, PageQueue(), made=flags.part(0, size, False))
    flags.items[: size // 2] = False
    other.make([0])
    assert calls == []


def _mappings(array, name):
    """Return how many kB the mappings of ``array`` have of what smaps calls ``name``, and how many they are."""
    start, total, count, within = array.ctypes.data, 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(each, 16) for each in place.groups())
            within = first < start + array.nbytes and last > start
            count += within
        elif within and line.startswith(f"{name}:"):
            total += int(line.split()[1])
    return total, count


@pytest.mark.skipif(
    None in (slabs.ADVICE, slabs.COLLAPSE) or not slabs.huge_pages_allowed(), reason="the system gives no huge pages"
)
def test_many_small_tables_have_huge_pages_in_few_mappings(monkeypatch):
    monkeypatch.undo()
    asked, ask = [], MappedMemory.ask
    monkeypatch.setattr(MappedMemory, "ask", lambda *args: asked.append(args[1]) or ask(*args))
    space = SlabSpace(4 * COLUMNS)
    rows = WHOLE // 4
    tables = [RowTable(Table(shape=(rows, COLUMNS)), space=space) for _ in range(26)]
    draws = np.random.default_rng(0)
    for _ in range(EVERY):
        for table in tables:
            ids = np.unique(draws.integers(0, rows, 500))
            table.update(ids, np.ones((len(ids), COLUMNS), np.float32), None)
    assert len(asked) == 7 + 1, "those of the rows, and one that says when they were touched"
    array = tables[0].slabs[""].whole[: 26 * rows]
    assert _mappings(array, "Rss")[0] <= 7 * HUGE // 1024
    assert _mappings(array, "Rss")[1] <= 3
    assert not len(space.queue)
    pulled = np.empty((len(ids), COLUMNS), np.float32)
    for table in tables:
        table.pull(ids, pulled)
