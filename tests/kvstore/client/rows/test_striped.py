"""Ids split over servers: each goes where its row is, and nothing is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for

from kvstore.client.pack_rows import Striped
from kvstore.client.plans import RowPlan
from kvstore.rows.ids import stripes_of
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec

ids = st.lists(st.integers(0, 999), unique=True, max_size=30).map(lambda each: np.array(sorted(each), np.int64))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), ids), min_size=1, max_size=4), st.integers(1, 5))
def test_each_id_is_at_the_server_that_has_its_row(listed, servers):
    specs: dict[str, Spec] = {
        str(number): TableSpec.of(Table(dim=2) if grows else Table(shape=(1000, 2)))
        for number, (grows, _) in enumerate(listed)
    }
    plan = RowPlan(entries_for(specs, servers, 10), list(specs))
    given_ids = [each for _, each in listed]
    striped = Striped(plan, given_ids)
    seen: list[set[int]] = [set() for _ in listed]
    for server in range(servers):
        travelling = striped.ids(server)
        assert travelling.dtype == (np.int64 if plan.wide else np.int32)
        assert len(travelling) == striped.total(server) == sum(striped.counts[server])
        parts = np.split(travelling, np.cumsum(striped.counts[server])[:-1])
        of = zip(plan.tables, given_ids, parts, striped.positions(server), seen, strict=True)
        for table, all_ids, part, positions, found in of:
            assert np.array_equal(all_ids[positions], part)
            assert bool((part[1:] > part[:-1]).all())
            assert set(stripes_of(table, part.astype(np.int64), servers).tolist()) <= {server}
            found.update(part.tolist())
    assert seen == [set(each.tolist()) for each in given_ids]
