import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_rules import Momentum

from kvstore.errors import UsageError
from kvstore.lineage import Version
from kvstore.rows.row_table import RowTable
from kvstore.table import Capacity, Table


def _push(table, rule, ids, number):
    grads = np.random.default_rng(number).standard_normal((len(ids), 2)).astype(np.float32)
    table.update(np.array(ids, np.int64), grads, rule)


def _content(pages):
    return {
        number: (row.tobytes(), *(value.tobytes() for value in parts))
        for page in pages
        for number, row, *parts in zip(page.ids.tolist(), page.rows, *page.parts.values(), strict=True)
    }


PUSH = st.sets(st.integers(0, 20), max_size=9).map(sorted)


@settings(max_examples=25)
@given(st.lists(PUSH, max_size=6), st.lists(PUSH, max_size=12), st.integers(1, 6), st.booleans())
def test_pages_show_the_table_as_it_was_while_rows_change_go_and_come(before, during, count, grows):
    table = RowTable(Table(dim=2, evict=Capacity(8)) if grows else Table(shape=(21, 2), init="normal"))
    rule = Momentum()
    table.use(rule)
    for number, ids in enumerate(before):
        _push(table, rule, ids, number)
    at_once = table.freeze()
    want = _content([at_once.page(0, 999)])
    at_once.thaw()
    frozen, pages, number = table.freeze(), [], 100
    for start in range(0, frozen.slots, count):
        pages.append(frozen.page(start, count))
        if during:
            _push(table, rule, during.pop(), number)
            number += 1
            again = frozen.page(start, count)
            assert _content([again]) == _content(pages[-1:])
    assert frozen.rows == len(want)
    assert sum(len(page.ids) for page in pages) == len(want)
    assert frozen.version == frozen.steps == len(before)
    assert _content(pages) == want


@settings(max_examples=25)
@given(st.lists(PUSH, max_size=5), st.lists(PUSH, max_size=5))
def test_what_has_changed_since_a_version_makes_the_old_table_the_new_one(before, after):
    table = RowTable(Table(dim=2, evict=Capacity(8)), lineage=7)
    for number, ids in enumerate(before):
        _push(table, None, ids, number)
    content = _content([table.freeze().page(0, 999)])
    for number, ids in enumerate(after, 50):
        _push(table, None, ids, number)
    changes = table.freeze(since=Version(7, len(before)))
    for number in changes.gone_page(0, 999).tolist():
        content.pop(number, None)
    content |= _content([changes.page(0, 999)])
    assert content == _content([table.freeze().page(0, 999)])


def test_states_are_left_out_on_request():
    table, rule = RowTable(Table(dim=2)), Momentum()
    table.use(rule)
    _push(table, rule, [1], 0)
    assert table.freeze().page(0, 1, state=False).parts == {}


def test_states_stay_when_the_optimizer_changes_meanwhile():
    table, rule = RowTable(Table(dim=2)), Momentum()
    table.use(rule)
    _push(table, rule, [1, 2], 0)
    frozen = table.freeze()
    want = _content([table.freeze().page(0, 999)])
    table.use(None)
    _push(table, None, [1, 2], 1)
    assert _content([frozen.page(0, 999)]) == want


def test_pages_that_have_been_passed_cannot_be_read():
    table = RowTable(Table(dim=2))
    _push(table, None, range(9), 0)
    frozen = table.freeze()
    for start in (0, 3, 6):
        frozen.page(start, 3)
    with pytest.raises(UsageError, match="pages from 3 on"):
        frozen.page(0, 3)
    frozen.thaw()
    with pytest.raises(UsageError, match="thawed"):
        frozen.page(6, 3)
    frozen.thaw()
    assert table.statistics()["bytes"] < 9 * 16 + 64 * 4 + 9 * 8 + 1


def test_what_is_not_known_any_more_is_an_error():
    table = RowTable(Table(dim=2), lineage=7)
    _push(table, None, [1], 0)
    table.put(np.array([2]), np.ones((1, 2), np.float32), {}, version=None)
    with pytest.raises(UsageError, match="save the whole table"):
        table.freeze(since=Version(7, 1))
    with pytest.raises(UsageError, match="is at 1"):
        table.freeze(since=Version(table.lineage, 5))
