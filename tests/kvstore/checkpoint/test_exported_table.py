"""Tables as plain tensors: what there is of them, in the order of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.checkpoint.command import ExportedTable
from kvstore.checkpoint.tensors import require_names
from kvstore.errors import CheckpointError
from kvstore.rows.frozen_rows import Page
from kvstore.table import Table


class Pages:
    """A reader of these pages."""

    def __init__(self, *pages: Page) -> None:
        self._pages = pages

    def pages(self, store: int, key: str) -> Any:
        """See ``CheckpointReader``."""
        return self._pages


def tensors(table: Table, *pages: Page, states: bool = False) -> dict[str, list[Any]]:
    reader: Any = Pages(*pages)
    made = ExportedTable(reader, 0, "t", table, states)
    found = {}
    for header, part in zip(made.headers(), made.contents(), strict=True):
        dtype = getattr(torch, header.dtype)
        flat = torch.frombuffer(bytearray(part), dtype=dtype) if len(part) else torch.empty(0, dtype=dtype)
        found[header.name] = flat.view(tuple(header.shape)).tolist()
    return found


def page(ids: list[int]) -> Page:
    rows = np.array(ids, np.float32)[:, None]
    return Page(np.array(ids, np.int64), rows, {"seen": np.ones(len(ids), np.int64), "state.sum": rows + 0.5})


def test_rows_of_a_table_that_grows_come_with_their_ids() -> None:
    found = tensors(Table(dim=1), page([9, 2]), page([5]), states=True)
    assert found == {"t": [[2], [5], [9]], "t.ids": [2, 5, 9], "t.sum": [[2.5], [5.5], [9.5]]}


def test_a_table_with_a_shape_is_whole() -> None:
    assert tensors(Table(shape=(4, 1), init="constant", scale=7.0), page([2])) == {"t": [[7], [7], [2], [7]]}


def test_no_rows_are_empty_tensors() -> None:
    assert tensors(Table(dim=1), states=True) == {"t": [], "t.ids": []}


def test_a_name_says_what_its_tensor_is() -> None:
    reader: Any = Pages(page([1]))
    table = ExportedTable(reader, 0, "t", Table(dim=1), True)
    named = [("t", "table 't'"), ("t.ids", "the ids of table 't'"), ("t.sum", "state 'sum' of table 't'")]
    assert table.names() == named
    with pytest.raises(CheckpointError, match=r"array 't.ids' and the ids of table 't' would both have the name"):
        require_names(Path("out"), [("t.ids", "array 't.ids'"), *named])
