"""Files of vectors by name, as word2vec, GloVe and fastText write them: read some thousands at a time."""

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
from kvstore.errors import CheckpointError
from kvstore.job.files import require_plain
from kvstore.plain import integer
from kvstore.table import MAX_ROW

MOST_NAME = 1 << 16  # bytes
MOST_LINE = MOST_NAME + 32 * MAX_ROW  # bytes
PIECE = 1 << 20  # bytes that are read at a time
NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)

Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


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
