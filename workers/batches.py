"""Batches of tensors from files that recommenders are trained with: LibSVM, Criteo's logs, Parquet.

Each is an iterator over one epoch. With several workers a batch is one worker's: they take turns. All read the whole
file, and parse their own batches.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from kvstore import KVStore, UsageError, hash_ids
from workers import group
from workers.common.checks import at_least
from workers.common.stores import part_of

Batch: TypeAlias = "dict[str, Any]"

MOST_LINE = 1 << 24  # bytes
LIBSVM = re.compile(rb"\s*([-+.\w]+)((?:\s+\d{1,18}:[-+.\w]+)*)\s*")
DENSE, CATEGORIES = 13, 26  # columns of Criteo's logs


def libsvm_batches(
    path: str | os.PathLike[str], batch_size: int, *, kvstore: KVStore | str | None = None
) -> Iterator[Batch]:
    """Yield batches of a file in LibSVM's format: on each line a label, and ``number:value`` for each feature.

        weights = workers.EmbeddingBag(None, 1, store=store, key="w", mode="sum")
        for batch in workers.libsvm_batches("train.libsvm", 1024, kvstore=store):
            score = weights(batch["ids"], batch["offsets"], batch["values"])

    Args:
        path: the file; one that ends in ``.gz`` is unpacked. What follows a ``#`` is no data, nor are empty lines.
        batch_size: the samples in a batch; the last one of the file may have fewer.
        kvstore: a store whose workers share the batches, or ``auto`` for that of ``init``. None: all batches. Workers
            may have different numbers of batches: see ``KVStore.join``.

    Returns:
        Of each batch ``label`` (float32, of shape (n,)); and, one sample after the other, ``ids`` (int64) and
        ``values`` (float32) of its features, with ``offsets`` (int64, of shape (n,)), where each sample begins.

    Raises:
        UsageError: a line is none of LibSVM's; the message has its number.
        OSError: the file cannot be read.
    """
    for numbered in _lines(Path(path), batch_size, kvstore, comment=b"#"):
        labels: list[float] = []
        ids: list[int] = []
        values: list[float] = []
        offsets: list[int] = []
        for number, line in numbered:
            found = LIBSVM.fullmatch(line)
            try:
                if found is None:
                    raise ValueError
                labels.append(float(found[1]))
                offsets.append(len(ids))
                for feature in found[2].split():
                    name, _, value = feature.partition(b":")
                    ids.append(int(name))
                    values.append(float(value))
            except ValueError:
                raise UsageError(
                    f"{path}, line {number}: {line[:60]!r} is not a label and then number:value for each feature"
                ) from None
        yield {
            "label": torch.tensor(labels, dtype=torch.float32, device="cpu"),
            "ids": torch.tensor(ids, dtype=torch.int64, device="cpu"),
            "values": torch.tensor(values, dtype=torch.float32, device="cpu"),
            "offsets": torch.tensor(offsets, dtype=torch.int64, device="cpu"),
        }


def criteo_batches(
    path: str | os.PathLike[str], batch_size: int, *, kvstore: KVStore | str | None = None
) -> Iterator[Batch]:
    """Yield batches of Criteo's logs of clicks: on each line a label, 13 integers and 26 categories, with tabs between.

        users = [workers.Embedding(None, 16, store=store, key=f"C{column}") for column in range(26)]
        for batch in workers.criteo_batches("day_0.gz", 2048, kvstore=store):
            rows = [embedding(batch["ids"][:, column]) for column, embedding in enumerate(users)]
            dense = torch.log1p(batch["dense"].nan_to_num(0).clamp(min=0))

    Args:
        path: see ``libsvm_batches``, as for the other arguments.
        batch_size: see there.
        kvstore: see there.

    Returns:
        Of each batch ``label`` (float32, of shape (n,)); ``dense`` (float32, (n, 13)), with NaN for what is missing;
        and ``ids`` (int64, (n, 26)): of a category of column c, from 0, ``hash_ids(text, seed=c)``, so that all columns
        may also share a table. A missing category is the empty text.

    Raises:
        UsageError: a line is none of Criteo's; the message has its number.
        OSError: the file cannot be read.
    """
    for numbered in _lines(Path(path), batch_size, kvstore):
        rows = []
        for number, line in numbered:
            fields = line.rstrip(b"\r\n").split(b"\t")
            try:
                if len(fields) != 1 + DENSE + CATEGORIES:
                    raise ValueError
                rows.append(([float(field or "nan") for field in fields[: 1 + DENSE]], fields[1 + DENSE :]))
            except ValueError:
                raise UsageError(
                    f"{path}, line {number}: {line[:60]!r} is not a label, {DENSE} integers and {CATEGORIES} "
                    "categories with tabs between"
                ) from None
        numbers = torch.tensor([numbers for numbers, _ in rows], dtype=torch.float32, device="cpu")
        columns = zip(*(categories for _, categories in rows), strict=True)
        ids = [hash_ids(column, seed) for seed, column in enumerate(columns)]
        yield {"label": numbers[:, 0], "dense": numbers[:, 1:], "ids": torch.stack(ids, 1)}


def parquet_batches(
    path: str | os.PathLike[str],
    batch_size: int,
    columns: list[str] | None = None,
    *,
    kvstore: KVStore | str | None = None,
) -> Iterator[Batch]:
    """Yield batches of a Parquet file, by the names of its columns; texts become ids, by ``hash_ids``.

        for batch in workers.parquet_batches("clicks.parquet", 1024, ["user", "history", "label"], kvstore=store):
            rows = users(batch["user"])
            bags = items(*batch["history"])  # an EmbeddingBag

    Args:
        path: the file.
        batch_size: the samples in a batch, at most.
        columns: the names of those to read; None for all.
        kvstore: see ``libsvm_batches``.

    Returns:
        Of a column of numbers or bools a tensor, of one of texts or bytes int64 ids, and of one of lists a pair: all
        their elements, one list after the other, and where each list begins.

    Raises:
        UsageError: pyarrow is not installed; there is no such column, or it has nulls or other types.
        OSError: the file cannot be read.
    """
    try:
        import pyarrow.parquet
    except ImportError as exc:
        raise UsageError(f"parquet_batches needs pyarrow: pip install 'torch-kvstore[parquet]' ({exc})") from None
    at_least("batch_size", batch_size, 1)
    parts, part = _share(kvstore)
    with pyarrow.parquet.ParquetFile(path) as file:
        there = file.schema_arrow.names
        if missing := [name for name in columns or () if name not in there]:
            raise UsageError(f"{path} has no column {missing[0]!r}; choose from {there}")
        for number, batch in enumerate(file.iter_batches(batch_size, columns=columns)):
            if number % parts == part:
                yield {
                    name: _column(f"{path}: column {name!r}", batch.column(place))
                    for place, name in enumerate(batch.schema.names)
                }


def _column(what: str, column: Any) -> Any:
    kind = f"{column.type}"
    if column.null_count:
        raise UsageError(f"{what} has nulls: fill them, or leave out their rows")
    if "list" in kind.partition("<")[0]:
        lengths = torch.from_numpy(np.array(column.value_lengths(), np.int64))
        return _column(what, column.flatten()), lengths.cumsum(0) - lengths
    if kind.startswith(("string", "large_string", "binary", "large_binary", "dictionary", "fixed_size_binary")):
        return hash_ids(column)
    values = np.array(column)
    if values.dtype.kind not in "biuf":
        raise UsageError(f"{what} is of {kind}, of which there are no tensors: leave it out, by columns=")
    return torch.from_numpy(values)


def _share(kvstore: KVStore | str | None) -> tuple[int, int]:
    if kvstore is None:
        return 1, 0
    store = group.store_of(kvstore)
    return part_of(store.num_workers, store.rank)


def _lines(
    path: Path, batch_size: int, kvstore: KVStore | str | None, comment: bytes = b""
) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the lines of this worker's batches, with their numbers from 1."""
    at_least("batch_size", batch_size, 1)
    parts, part = _share(kvstore)
    opened: Any = gzip.open(path) if path.suffix == ".gz" else path.open("rb", 1 << 20)  # noqa: SIM115
    with opened as file:
        lines = _filled(file, comment)
        batch = 0
        while found := list(islice(lines, batch_size)):
            if batch % parts == part:
                yield found
            batch += 1


def _filled(file: Any, comment: bytes) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MOST_LINE):
        number += 1
        if comment and comment in line:
            line = line.partition(comment)[0]
        if line.strip(b" \r\n"):
            yield number, line
