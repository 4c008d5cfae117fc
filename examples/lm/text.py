"""Text as numbers, one per character: a training part and a validation part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "\ufffd"
HELD_OUT = 10  # one tenth of each file


class TextError(Exception):
    """There is no text, or too little."""


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Attributes:
        characters: `UNKNOWN`, which stands for all others, and the characters of the training part, by number.
        training, validation: the parts as numbers, int64, of shape (length,).
    """

    characters: str
    training: Tensor
    validation: Tensor

    def encode(self, text: str) -> Tensor:
        """Return the numbers of the characters in `text`."""
        return numbers(text, self.characters)

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of `numbers`."""
        return "".join(self.characters[number] for number in numbers)


def ours() -> list[Path]:
    """Return this project's documents and its license."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "LICENSE"]


def load(files: Sequence[Path], context: int) -> Corpus:
    """Read UTF-8 files. The last tenth of each is held out: training does not even see its characters.

    Raises:
        TextError: a file cannot be read, or a part is shorter than a sequence of `context` characters.
    """
    try:
        texts = [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeError) as exc:
        raise TextError(f"cannot read the text: {exc}; name files of yours with --text") from None
    cuts = [len(text) - len(text) // HELD_OUT for text in texts]
    training = "".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    validation = "".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    if min(len(training), len(validation)) <= context:
        raise TextError(
            f"{len(training)} characters to learn from and {len(validation)} to be judged by are too few for a "
            f"context of {context}: give a longer --text or a smaller --context"
        )
    characters = UNKNOWN + "".join(sorted(set(training) - {UNKNOWN}))
    return Corpus(characters, numbers(training, characters), numbers(validation, characters))


def numbers(text: str, characters: str) -> Tensor:
    """Return the position of each character in `characters`; 0 if it is missing."""
    place = {character: number for number, character in enumerate(characters)}
    return torch.tensor([place.get(character, 0) for character in text], dtype=torch.int64)


def training_batch(part: Tensor, batch: int, context: int, *, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return one worker's batch of a step: random windows of the text, and the next character at each position.

    The windows depend only on seed, step and rank.

    Returns:
        Two tensors of shape (batch, context).
    """
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 100_003 + rank) % 2**63)
    starts = torch.randint(len(part) - context, (batch,), generator=generator)
    windows = part[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def validation_batches(
    part: Tensor, batch: int, context: int, *, rank: int, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one worker's share of the text's consecutive windows. The rest at the end is left out."""
    count = (len(part) - 1) // context
    inputs = part[: count * context].view(count, context)[rank::workers]
    targets = part[1 : count * context + 1].view(count, context)[rank::workers]
    yield from zip(inputs.split(batch), targets.split(batch), strict=True)


def printable(text: str) -> str:
    """Return `text` as one line without control characters, for a terminal."""
    return re.sub(r"[^\n -~]", "?", text).replace("\n", "\\n")
