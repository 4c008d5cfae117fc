"""The choice of the data set: CIFAR-10 if every worker has it, otherwise the digits."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from cifar import cifar10, digits
from cifar.download import UnavailableError, find_or_fetch
from cifar.images import Dataset
from workers import Reducer

log = logging.getLogger(__name__)  # logging.warning would set up logging, and fit would leave its lines to that


def load(wanted: str, data_dir: Path, reducer: Reducer, rank: int) -> Dataset:
    """Load the data set `wanted`: cifar10, digits, or auto, which chooses the same one on every worker."""
    if wanted == "digits":
        return digits.read_dataset()
    if wanted == "cifar10":
        return cifar10.read_dataset(find_or_fetch(data_dir))
    folder, reason = None, "another worker does not have it"
    try:
        folder = find_or_fetch(data_dir)
    except UnavailableError as exc:
        reason = str(exc)
    without = reducer.sum({"without CIFAR-10": float(folder is None)})["without CIFAR-10"]
    if folder and not without:
        return cifar10.read_dataset(folder)
    if rank == 0:
        log.warning("CIFAR-10 is not available (%s); training on handwritten digits", reason)
    return digits.read_dataset()


def first(dataset: Dataset, examples: int | None) -> Dataset:
    """Return the data set with at most `examples` training images."""
    return replace(dataset, train=dataset.train[:examples])
