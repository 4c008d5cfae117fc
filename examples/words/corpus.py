"""The identifiers of the standard library's source: a text of Zipf's law that every installation of Python has."""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import kvstore as kv

IDENTIFIER = re.compile(r"[^\W\d]\w+")  # of two characters at least
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
HELD_OUT = 10  # one file in ten is not learned
WINDOW = 5  # identifiers on either side
NEGATIVES = 5  # for each pair that is learned
CANDIDATES = 99  # beside the true one, where vectors are judged
FREQUENT = 1e-3  # identifiers above this frequency are drawn less often as centers


class CorpusError(Exception):
    """There is no source to learn from, or too little."""


class Pairs(NamedTuple):
    """Pairs of identifiers.

    Attributes:
        centers: int64, of shape (pairs,).
        targets: int64, of shape (pairs, 1 + others): a neighbour of the center, and others that need not be.
    """

    centers: torch.Tensor
    targets: torch.Tensor


class Corpus:
    """Identifiers by number, in a part that is learned and a part that is held out.

    Args:
        texts: the files.

    Attributes:
        names: the identifiers, the most frequent first; each one's place is its number.
        ids: int64, a hash of each name: what a table that grows knows it by.

    Raises:
        CorpusError: the files have too few identifiers.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        words = [[word for word in IDENTIFIER.findall(text) if not keyword.iskeyword(word)] for text in texts]
        parts = [words[::HELD_OUT], [each for place, each in enumerate(words) if place % HELD_OUT]]
        held, learned = ([word for each in part for word in each] for part in parts)
        if min(len(held), len(learned)) <= 100 * WINDOW:
            raise CorpusError(f"{len(learned)} identifiers to learn from and {len(held)} to be judged by are too few")
        names, counts = np.unique(np.array(learned + held), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        self.names = names[order].tolist()
        self.ids = kv.hash_ids(self.names)
        number = {name: place for place, name in enumerate(self.names)}
        self._learned, self._held = (np.array([number[word] for word in part]) for part in (learned, held))
        frequency = np.bincount(self._learned, minlength=len(names)) / len(learned)
        self._noise = np.cumsum(frequency**0.75) / np.sum(frequency**0.75)
        drawn = np.sqrt(FREQUENT / np.maximum(frequency, FREQUENT))[self._learned]
        self._centers = np.cumsum(drawn) / drawn.sum()

    def __str__(self) -> str:
        different = f"{len(self.names)} different ones"
        return f"{len(self._learned)} identifiers to learn from, {len(self._held)} held out, {different}"

    def learned(self, numbers: range, size: int, seed: int, part: int = 0, parts: int = 1) -> Iterator[Pairs]:
        """Yield batches of pairs to learn; of each only every `parts`-th pair, from number `part` on."""
        for number in numbers:
            random = np.random.default_rng([seed, number])
            places = np.searchsorted(self._centers, random.random(size))
            pairs = self._pairs(random, self._learned, places, NEGATIVES)
            yield Pairs(*(each[part::parts] for each in pairs))

    def held_out(self, count: int, seed: int) -> Pairs:
        """Return pairs of the part that is held out; the true neighbour is among `CANDIDATES` others."""
        random = np.random.default_rng([seed, 2**32])
        return self._pairs(random, self._held, random.integers(len(self._held), size=count), CANDIDATES)

    def _pairs(self, random: np.random.Generator, words: np.ndarray, places: np.ndarray, others: int) -> Pairs:
        size = len(places)
        away = random.integers(1, WINDOW + 1, size=size) * random.choice([-1, 1], size=size)
        neighbours = words[(places + away) % len(words)]
        noise = np.searchsorted(self._noise, random.random((size, others)))
        targets = np.concatenate([neighbours[:, None], noise], axis=1)
        return Pairs(torch.from_numpy(words[places]), torch.from_numpy(targets))


def standard_library() -> list[str]:
    """Return the source files of the standard library, but for its tests.

    Raises:
        CorpusError: there are none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise CorpusError(f"there is no source in {root}: this Python has its standard library in another form")
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]
