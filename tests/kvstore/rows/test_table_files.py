"""Saved tables: what is read is what was frozen, over any number of servers, and after any fault."""

import json
import os
import threading

import numpy as np
import pytest
from damage import ODD, changed, error_of, fields
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_stripes import IDS, Stripes, saved

import kvstore as kv
from kvstore.errors import CheckpointError, DeadlineExceeded, UsageError
from kvstore.lineage import Version
from kvstore.rows import saving
from kvstore.rows.frozen_rows import Page
from kvstore.rows.open_table import open_table
from kvstore.rows.saving import OpenSaves, SavePace, load_table, save_table
from kvstore.rows.table_files import FrozenState, base_of, folders, from_json, load_manifest, to_json, write_save
from kvstore.table import MinCount, Table, Unseen

PUSHES = st.lists(st.sets(st.integers(-12, 12), max_size=10).map(sorted), max_size=5)


@settings(max_examples=8)
@given(st.lists(PUSHES, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_a_chain_of_saves_is_the_table_and_goes_on_on_other_servers(tmp_path_factory, rounds, servers, others, admits):
    directory = tmp_path_factory.mktemp("table")
    rules = {"admit": MinCount(2)} if admits else {"evict": Unseen(2)}
    stripes, since = Stripes(Table(dim=2, init="normal", **rules), servers), None
    for number, pushes in enumerate(rounds):
        for each, ids in enumerate(pushes):
            stripes.push(ids, 10 * number + each)
        since = stripes.save(directory, since).manifest.version
        opened = open_table(directory, verify=True)
        assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
        assert len(opened) == sum(part.statistics()["rows"] for part in stripes.parts)
        assert opened.version == since
    loaded = Stripes(stripes.table, others)
    loaded.load(opened)
    assert opened.has(IDS).sum() == len(opened) == sum(map(len, loaded.parts))
    ids = [number for number, has in zip(IDS.tolist(), opened.has(IDS), strict=True) if has]
    for each in (stripes, loaded):
        each.push(ids, 99)
    assert np.array_equal(loaded.pull(IDS), stripes.pull(IDS))


def test_without_states_a_save_has_none(tmp_path):
    saved(tmp_path, state=False)
    opened = open_table(tmp_path)
    assert opened.manifest.rule is None
    assert [page.parts for page in opened.pages()] == [{}]


def test_a_save_that_fails_leaves_the_last_one_and_nothing_of_its_own(tmp_path):
    stripes = saved(tmp_path)
    before = stripes.pull(IDS)

    def broken():
        yield stripes.parts[0].freeze().page(0, 9)
        raise RuntimeError("lost")

    state = FrozenState([Version(7, 2)] * 2, [2, 2], stripes.parts[0].parts)
    with pytest.raises(RuntimeError, match="lost"):
        write_save(tmp_path, "t", stripes.table, state, broken())
    assert os.listdir(tmp_path) == ["save-00000001"]  # noqa: PTH208
    assert np.array_equal(open_table(tmp_path).lookup(IDS).numpy(), before)


def test_a_save_without_a_manifest_is_none_and_its_number_is_not_used_again(tmp_path):
    stripes = saved(tmp_path)
    stripes.push([9], 1)
    (stripes.save(tmp_path).folder / "manifest.json").unlink()
    assert [folder.name for folder in folders(tmp_path)] == ["save-00000001"]
    assert open_table(tmp_path).version == 1
    assert stripes.save(tmp_path).folder.name == "save-00000003"
    with pytest.raises(CheckpointError, match="no saved table"):
        open_table(tmp_path / "other")


def test_pages_that_bring_a_row_twice_or_are_of_another_table_are_refused(tmp_path):
    stripes = saved(tmp_path)
    state = FrozenState([Version(7, 1)] * 2, [1, 1], stripes.parts[0].parts)
    page = stripes.parts[0].freeze().page(0, 9)
    with pytest.raises(UsageError, match="came twice"):
        write_save(tmp_path, "t", stripes.table, state, [page, page])
    with pytest.raises(UsageError, match="not of a table"):
        write_save(tmp_path, "t", Table(dim=3), state, [page])
    wrong = page._replace(parts={**page.parts, "seen": page.parts["seen"].astype(np.int32)})
    with pytest.raises(UsageError, match="'seen' of a page"):
        write_save(tmp_path, "t", stripes.table, state, [wrong])
    assert len(folders(tmp_path)) == 1


def test_a_delta_needs_a_save_of_that_version_of_this_table_on_as_many_servers(tmp_path):
    stripes = saved(tmp_path)
    with pytest.raises(UsageError, match=r"no save of version 7; those there are of \[1\]"):
        base_of(tmp_path, 7, "t", stripes.table, 2)
    with pytest.raises(UsageError, match="saved by 2 servers, and these are 3"):
        base_of(tmp_path, 1, "t", stripes.table, 3)
    with pytest.raises(UsageError, match="not of key 'u'"):
        base_of(tmp_path, 1, "u", stripes.table, 2)
    with pytest.raises(UsageError, match="none at all"):
        base_of(tmp_path / "none", 1, "t", stripes.table, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "kvstore table 2"),
        ("rows", -1),
        ("rows", 5),
        ("rows", True),
        ("versions", []),
        ("lineages", [1]),
        ("lineages", [1, -1]),
        ("parts", {"../seen": ["int64", 0]}),
        ("parts", {"seen": ["object", 0]}),
        ("parts", {"rows": ["int64", 0]}),
        ("files", []),
        ("base", {"folder": "../../etc", "sha256": "0" * 64}),
        ("table", {}),
        ("rule", 3),
        ("key", ""),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(tmp_path, field, value):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        open_table(tmp_path)


def test_a_file_outside_of_the_folder_is_not_read(tmp_path):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"rows.float32"', '"../rows.float32"'))
    with pytest.raises(CheckpointError, match="damaged"):
        open_table(tmp_path)


def test_a_manifest_comes_back_as_it_was(tmp_path):
    saved(tmp_path)
    manifest, _ = load_manifest(tmp_path / "save-00000001")
    assert from_json(to_json(manifest)) == manifest
    assert manifest.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*/*") if file.suffix != ".json")


def test_a_manifest_of_very_many_bytes_is_not_read(tmp_path):
    (tmp_path / "manifest.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="at most"):
        load_manifest(tmp_path)


def test_each_field_damaged_is_refused_by_name_or_read(tmp_path):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    good = json.loads(path.read_text())
    texts = {json.dumps(changed(good, way, change)): None for way in fields(good) for change in ODD}
    accepted = [text for text in texts if error_of(lambda text=text: from_json(text)) is None]
    assert len(texts) > 500
    for text in accepted[:: max(1, len(accepted) // 40)]:
        path.write_text(text)
        error_of(lambda: open_table(tmp_path, verify=True))


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
