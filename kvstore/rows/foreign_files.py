"""Rows in files of other programs. Tables become Parquet files, and come from them; vectors by name are read alone.

Only Parquet files need pyarrow.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore.dynamo import outside_graphs
from kvstore.errors import CheckpointError, UsageError
from kvstore.job.files import replacing, require_plain
from kvstore.plain import integer
from kvstore.rows.halves import widened
from kvstore.rows.hashed_ids import hash_ids
from kvstore.rows.ids import Ids
from kvstore.rows.open_table import open_table, whole_pages
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.slabs import Array
from kvstore.table import MAX_ROW

ROW_GROUP = 1 << 16  # rows of which a file is written, and read, at a time at most
MOST_NAME = 1 << 16  # bytes
MOST_LINE = MOST_NAME + 32 * MAX_ROW  # bytes
PIECE = 1 << 20  # bytes that are read at a time
NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)

Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


# ---- Parquet


@outside_graphs
def export_parquet(
    directory: str | os.PathLike[str], path: str | os.PathLike[str], state: bool = False, names: Any = None
) -> int:
    """Write the table in ``directory``, as ``open_table`` reads it, to the Parquet file ``path``.

    A column ``id`` has the ids, and a column ``row`` the rows, in no order. Each row is a list of fixed length: of a
    table of shape ``(rows, n)`` its n elements; of one of shape ``(rows, n, m)``, or of more dimensions, all elements
    of the row one after the other, the last dimension's first: ``numpy.reshape(row, (n, m))`` has them in order. Rows
    of half precision are written as float32. A table with a shape has all its rows, also those that no push has
    changed, which are as they begin.

    Args:
        directory: where ``save_table`` has written.
        path: the file, which is replaced or made whole.
        state: also write what else was saved of each row, a column for each: ``seen``, and the optimizer's states
            as ``state.NAME``. A row that no push has changed has nulls there.
        names: the texts whose ids ``hash_ids`` made, in all that it takes: a column ``name`` has the text of each row,
            and a null where it is none of these. Of two texts with one id, the column has one.

    Returns:
        The number of rows.

    Raises:
        UsageError: pyarrow is not installed, or not one for this numpy; or ``names`` has what is no text.
        CheckpointError: there is no whole table, or it is damaged.
        OSError: the file cannot be written.
    """
    pyarrow = _pyarrow("export_parquet")
    named = None if names is None else NamesOfIds(pyarrow, names)
    opened = open_table(directory, verify=True)
    parts = opened.manifest.parts if state else {}
    described = {"id": ("int64", 0), "row": (opened.table.sum_dtype, opened.table.width), **parts}
    types = {name: _type(pyarrow, dtype, width) for name, (dtype, width) in described.items()}
    if named is not None:
        types["name"] = named.type
    schema = pyarrow.schema(list(types.items()))
    count = 0
    with replacing(Path(path)) as draft, pyarrow.parquet.ParquetWriter(draft, schema) as writer:
        for page in whole_pages(opened.table, opened.pages(ROW_GROUP, state), ROW_GROUP):
            columns = {"id": page.ids, "row": widened(page.rows), **page.parts}
            arrays = [
                named.of(page.ids)
                if name == "name" and named is not None
                else _array(pyarrow, columns.get(name), kind, len(page.ids))
                for name, kind in types.items()
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
            count += len(page.ids)
    return count


@outside_graphs
def read_parquet(
    path: str | os.PathLike[str], id: str = "id", row: str = "row", count: int = ROW_GROUP
) -> Iterator[RowSparse]:
    """Yield the rows of a Parquet file, to put them into a table: of ``export_parquet``, or of another program.

        for part in kv.read_parquet("users.parquet"):
            store.put_rows("user", part)

    Args:
        path: the file.
        id: the column of ids: integers, or texts, of which ``hash_ids`` makes ids.
        row: the column of rows, each a list of as many numbers.
        count: how many rows to have in memory.

    Raises:
        UsageError: pyarrow is not installed, or not one for this numpy; there are no such columns, or they have nulls
            or other values.
        CheckpointError: the file is missing or damaged.
    """
    pyarrow = _pyarrow("read_parquet")
    try:
        require_plain(Path(path))
        with pyarrow.parquet.ParquetFile(path) as file:
            if missing := [name for name in (id, row) if name not in file.schema_arrow.names]:
                raise UsageError(f"{path} has no column {missing[0]!r}; choose from {file.schema_arrow.names}")
            for batch in file.iter_batches(integer("count", count, 1, 1 << 30), columns=[id, row]):
                yield RowSparse(_ids_of_column(f"{path}: column {id!r}", batch[id]), _rows_of_column(path, row, batch))
    except (OSError, pyarrow.ArrowInvalid) as exc:
        raise CheckpointError(f"{path}: missing or damaged: {exc}") from None


def _ids_of_column(what: str, column: Any) -> Any:
    if column.null_count:
        raise UsageError(f"{what} has nulls")
    kind = f"{column.type}"
    return column.to_numpy() if kind.startswith(("int", "uint")) else hash_ids(column)


def _rows_of_column(path: Any, name: str, batch: Any) -> Any:
    column = batch[name]
    lists = column.null_count == 0 and "list" in f"{column.type}"
    flat = column.flatten() if lists else None
    if flat is None or flat.null_count or f"{flat.type}" not in ("float", "double", "halffloat"):
        raise UsageError(f"{path}: column {name!r} has no lists of numbers without nulls, but {column.type}")
    if len(np.unique(column.value_lengths().to_numpy())) > 1:
        raise UsageError(f"{path}: the lists of column {name!r} are not as long as each other")
    return torch.from_numpy(np.array(flat).reshape(len(column), -1))  # a copy: pyarrow's memory is not to be written to


class NamesOfIds:
    """Texts by the ids that ``hash_ids`` makes of them."""

    def __init__(self, pyarrow: Any, names: Any) -> None:
        ids = hash_ids(names).reshape(-1).numpy()
        texts = names if type(names).__module__.startswith("pyarrow") else np.asarray(names, object).reshape(-1)
        self._texts = texts if hasattr(texts, "take") and not isinstance(texts, np.ndarray) else pyarrow.array(texts)
        self._pyarrow, self.type = pyarrow, self._texts.type
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]

    def of(self, ids: Ids) -> Any:
        """Return the text of each id, null where there is none."""
        if not len(self._ids):
            return self._pyarrow.nulls(len(ids), self.type)
        places = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        known = self._ids[places] == ids
        taken = self._texts.take(self._pyarrow.array(self._order[places], mask=~known))
        return taken.combine_chunks() if hasattr(taken, "combine_chunks") else taken


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise UsageError(f"{what} needs pyarrow: pip install 'torch-kvstore[parquet]' ({exc})") from None
    return pyarrow


def _type(pyarrow: Any, dtype: str, width: int) -> Any:
    """Return the type of a column: numbers, or lists of ``width`` numbers."""
    number = pyarrow.from_numpy_dtype(dtype)
    return pyarrow.list_(number, width) if width else number


def _array(pyarrow: Any, values: Array | None, kind: Any, count: int) -> Any:
    if values is None:  # a row of an earlier save, with states of another kind
        return pyarrow.nulls(count, kind)
    flat = pyarrow.array(values.reshape(-1))
    return flat if values.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)


# ---- vectors, as word2vec, GloVe and fastText write them


class NamedRows(NamedTuple):
    """Some vectors of a file.

    Attributes:
        names: a text for each; bytes where it is not in UTF-8.
        rows: a tensor of float32, with a row for each name.
    """

    names: list[str | bytes]
    rows: torch.Tensor


@outside_graphs
def read_vectors(path: str | os.PathLike[str], count: int = 1 << 14) -> Iterator[NamedRows]:
    """Yield the vectors of a file of word2vec (text or binary), GloVe or fastText (``.vec``), ``count`` at a time.

        store.init("word", kv.Table(dim=300))
        for part in kv.read_vectors("GoogleNews-vectors-negative300.bin.gz"):
            store.put_rows("word", kv.RowSparse(kv.hash_ids(part.names), part.rows))

    Which of them it is, is seen from the file: word2vec and fastText begin with the number of vectors and their length,
    GloVe does not. In text a name may have spaces, as some of GloVe's have, but for the first one of a file of GloVe.
    In a binary file it ends at the first space. Of a name that comes again, the first vector counts.

    Args:
        path: the file; one that ends in ``.gz`` is unpacked.
        count: how many vectors to have in memory.

    Raises:
        CheckpointError: the file is missing, is none of these, or is damaged; the message says where.
    """
    path = Path(path)
    count = integer("count", count, 1, 1 << 30)
    seen: set[bytes] = set()
    names: list[bytes] = []
    rows: list[Vector] = []
    for name, row in _vectors(path):
        if name in seen:
            continue
        seen.add(name)
        names.append(name)
        rows.append(row)
        if len(names) == count:
            yield _named(names, rows)
            names, rows = [], []
    if names:
        yield _named(names, rows)


def _named(names: list[bytes], rows: list[Vector]) -> NamedRows:
    return NamedRows([*map(_text, names)], torch.from_numpy(np.stack(rows)))


def _text(name: bytes) -> str | bytes:
    try:
        return name.decode()
    except UnicodeDecodeError:  # word2vec cuts long words anywhere
        return name


def _vectors(path: Path) -> Iterator[tuple[bytes, Vector]]:
    try:
        require_plain(path)
        opened: Any = gzip.open(path) if path.suffix == ".gz" else path.open("rb", PIECE)  # noqa: SIM115
        with opened as file:
            first = file.readline(MOST_LINE)
            count, dim = _header(path, first)
            if count is None:
                yield from _text_vectors(path, itertools.chain([first], _lines(file)), 1, dim, None)
                return
            start = file.readline(MOST_LINE)
            if _is_text(start, dim):
                yield from _text_vectors(path, itertools.chain([start], _lines(file)), 2, dim, count)
            else:
                yield from _binary_vectors(path, file, start, dim, count)
    except (OSError, EOFError, zlib.error) as exc:
        raise CheckpointError(f"{path}: missing, unreadable or damaged: {exc}") from None


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(MOST_LINE):
        yield line


def _header(path: Path, line: bytes) -> tuple[int | None, int]:
    """Return the number of vectors, None if the file does not say it, and their length."""
    fields = line.split()
    if len(fields) == 2 and all(field.isdigit() and len(field) < 16 for field in fields):
        count, dim = map(int, fields)
    else:
        count, dim = None, len(fields) - 1
    if not 1 <= dim <= MAX_ROW:
        raise CheckpointError(
            f"{path}: no file of vectors: it begins with neither the number of vectors and their length, nor a name "
            f"and a vector of 1 to {MAX_ROW} numbers"
        )
    return count, dim


def _is_text(line: bytes, dim: int) -> bool:
    fields = line.rsplit(None, dim)
    return not line or (len(fields) == dim + 1 and all(NUMBER.fullmatch(field) for field in fields[1:]))


def _text_vectors(
    path: Path, lines: Iterable[bytes], first: int, dim: int, count: int | None
) -> Iterator[tuple[bytes, Vector]]:
    found = 0
    for number, line in enumerate(lines, first):
        name, *fields = line.rsplit(None, dim) or [b""]
        if not name and not fields:
            continue
        try:
            row = np.array([*map(float, fields)], np.float32)
        except ValueError:
            row = np.empty(0, np.float32)
        if len(row) != dim:
            raise CheckpointError(f"{path}: line {number} is no name and {dim} numbers: {line[:60]!r}")
        found += 1
        yield name, row
    if count not in (None, found):
        raise CheckpointError(f"{path}: damaged: it says that it has {count} vectors, and has {found}")


def _binary_vectors(path: Path, file: Any, data: bytes, dim: int, count: int) -> Iterator[tuple[bytes, Vector]]:
    size, at = 4 * dim, 0
    for number in range(count):
        while (end := data.find(b" ", at)) < 0 or len(data) - end - 1 < size:
            piece = file.read(PIECE)
            if not piece or (end < 0 and len(data) - at > MOST_NAME):
                raise CheckpointError(f"{path}: damaged: it says that it has {count} vectors, and has {number}")
            data, at = data[at:] + piece, 0
        # The original program writes a line's end behind each vector, others do not.
        yield data[at:end].lstrip(b"\n"), np.frombuffer(data, "<f4", dim, end + 1).astype(np.float32)
        at = end + 1 + size
    if (data[at:] + file.read(PIECE)).strip():
        raise CheckpointError(f"{path}: damaged: more comes after the {count} vectors that it says it has")
