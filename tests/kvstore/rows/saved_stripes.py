"""What the tests of saved tables share: a table on several servers, which can be saved and loaded."""

import numpy as np
from row_rules import Momentum

from kvstore.errors import UsageError
from kvstore.rows.open_table import require_known
from kvstore.rows.row_table import RowTable
from kvstore.rows.table_files import FrozenState, base_of, write_save
from kvstore.table import Table

IDS = np.arange(-12, 13)


class Stripes:
    """A table on several servers, and a model of it: one table."""

    def __init__(self, table, count, lineage=1000):
        self.table, self.rule = table, Momentum()
        self.parts = [RowTable(table, stripe, count, lineage=lineage) for stripe in range(count)]
        for part in self.parts:
            part.use(self.rule)

    def push(self, ids, number):
        grads = np.random.default_rng(number).standard_normal((len(ids), self.table.width)).astype(np.float32)
        for part, mine in self._mine(ids):
            part.update(np.array(ids, np.int64)[mine], grads[mine], self.rule)

    def pull(self, ids):
        out = np.empty((len(ids), self.table.width), np.float32)
        for part, mine in self._mine(ids):
            rows = np.empty((len(mine), self.table.width), np.float32)
            part.pull(np.array(ids, np.int64)[mine], rows)
            out[mine] = rows
        return out

    def _mine(self, ids):
        for part in self.parts:
            yield part, [at for at, number in enumerate(ids) if has(part, number)]

    def save(self, directory, since=None, state=True, page=5):
        base = None if since is None else base_of(directory, since, "t", self.table, len(self.parts))
        versions = [None] * len(self.parts) if base is None else base.manifest.versions
        frozen = [part.freeze(since=version) for part, version in zip(self.parts, versions, strict=True)]
        described = FrozenState(
            versions=[each.at for each in frozen],
            steps=[each.steps for each in frozen],
            parts=self.parts[0].parts if state else {},
            rule=self.rule.rule if state else None,
        )
        pages = (each.page(at, page, state) for each in frozen for at in range(0, each.slots, page))
        gone = (each.gone_page(at, page) for each in frozen for at in range(0, each.gone, page))
        return write_save(directory, "t", self.table, described, pages, gone, base)

    def load(self, opened):
        require_known(opened, "t", self.table)
        for page in opened.pages(3):
            for part, mine in self._mine(page.ids.tolist()):
                parts = {name: values[mine] for name, values in page.parts.items()}
                part.put(page.ids[mine], page.rows[mine], parts, opened.version, max(opened.manifest.steps))


def has(part, number):
    try:
        part.require(np.array([number]))
    except UsageError:
        return False
    return True


def saved(directory, **options):
    stripes = Stripes(Table(dim=2, init="uniform"), 2)
    stripes.push([1, 2, 3, -4], 0)
    stripes.save(directory, **options)
    return stripes
