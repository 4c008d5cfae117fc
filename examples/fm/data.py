"""Batches of features by number, each with a value: from LibSVM files, or clicks that are made on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from clicks.stream import Clicks


class DataError(Exception):
    """A file is not there, or not in LibSVM's format."""


class Samples(NamedTuple):
    """Samples with features.

    Attributes:
        ids: int64, the numbers of the features, of shape (samples, features); 0 where a sample has fewer.
        values: float32, of the same shape; 0 where a sample has fewer features.
        labels: float32; 0 or 1.
        chances: float64, the true chance that the label is 1; empty where nobody knows it.
    """

    ids: torch.Tensor
    values: torch.Tensor
    labels: torch.Tensor
    chances: np.ndarray


def clicks(
    stream: Clicks, numbers: Iterable[int], size: int, features: int, part: int, parts: int
) -> Iterator[Samples]:
    """Yield clicks whose ids are hashed to numbers below `features`, with a value of 1 each.

    Args:
        stream: the clicks.
        numbers: of the batches.
        size: how many clicks there are in a batch.
        features: how many numbers there are; several ids may share one.
        part, parts: every `parts`-th click of each batch is yielded, from number `part` on.
    """
    for number in numbers:
        batch = stream.batch(number, size, part, parts)
        ids = torch.from_numpy((batch.ids.numpy().view(np.uint64) % np.uint64(features)).astype(np.int64))
        yield Samples(ids, torch.ones(ids.shape), batch.labels, batch.chances)


def libsvm(file: Path, size: int, features: int, part: int = 0, parts: int = 1) -> Iterator[Samples]:
    """Yield batches of a file in LibSVM's format: on each line a label, and `number:value` for each feature.

    Args:
        file: with labels 0 and 1, or -1 and 1, and numbers from 0.
        size: how many samples there are in a batch; the last may have fewer.
        features: numbers are below it.
        part, parts: every `parts`-th sample of each batch is yielded, from number `part` on.

    Raises:
        DataError: the file cannot be read; the message says which line is wrong.
    """
    lines: list[tuple[float, list[int], list[float]]] = []
    try:
        with file.open(encoding="ascii") as opened:
            for number, line in enumerate(opened, 1):
                lines.append(_sample(line, features, f"{file}, line {number}"))
                if len(lines) == size:
                    yield _samples(lines[part::parts])
                    lines.clear()
    except (OSError, UnicodeError) as exc:
        raise DataError(f"cannot read the samples: {exc}") from None
    if len(lines) >= parts:  # with fewer, a worker would have none, and the others would wait for it
        yield _samples(lines[part::parts])


def _sample(line: str, features: int, where: str) -> tuple[float, list[int], list[float]]:
    try:
        label, *pairs = line.split()
        numbers, values = zip(*(pair.split(":") for pair in pairs), strict=True) if pairs else ((), ())
        ids = list(map(int, numbers))
        parsed = float(label), ids, list(map(float, values))
    except ValueError:
        raise DataError(f"{where}: {line.strip()[:60]!r} is not a label and number:value for each feature") from None
    if ids and not 0 <= min(ids) <= max(ids) < features:
        raise DataError(f"{where}: features are numbered from 0 to {features - 1}; see --input-size")
    return parsed


def _samples(lines: list[tuple[float, list[int], list[float]]]) -> Samples:
    width = max((len(ids) for _, ids, _ in lines), default=0)
    ids = torch.zeros(len(lines), width, dtype=torch.int64)
    values = torch.zeros(len(lines), width)
    for row, (_, given, of) in enumerate(lines):
        ids[row, : len(given)] = torch.tensor(given, dtype=torch.int64)
        values[row, : len(of)] = torch.tensor(of)
    labels = torch.tensor([float(label > 0) for label, _, _ in lines])
    return Samples(ids, values, labels, np.empty(0))
