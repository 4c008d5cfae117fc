"""Text as numbers, one for each character: what to learn from, and what to be judged by."""

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
        characters: those of the training part, and `UNKNOWN`, which stands for all others. Their order is their number.
        training, validation: the parts as numbers, int64, of shape (length,).
    """

    characters: str
    training: Tensor
    validation: Tensor

    def encode(self, text: str) -> Tensor:
        """The numbers of the characters in `text`."""
        return numbers(text, self.characters)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of these numbers."""
        return "".join(self.characters[number] for number in numbers)


def ours() -> list[Path]:
    """The text that is here: what this project says of itself, and its license."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "LICENSE"]


def load(files: Sequence[Path], context: int) -> Corpus:
    """Read files of UTF-8. The last tenth of each is held out: nothing is learned from it, not even its characters.

    Raises:
        TextError: a file cannot be read, or a part has less than one sequence of `context` characters.
    """
    try:
        texts = [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeError) as exc:
        raise TextError(f"cannot read the text: {exc}") from None
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
    """The place of each character in `characters`; 0 for one that is not there."""
    place = {character: number for number, character in enumerate(characters)}
    return torch.tensor([place.get(character, 0) for character in text], dtype=torch.int64)


def training_batch(part: Tensor, batch: int, context: int, *, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """One worker's batch of a step: windows from anywhere in the text, and the characters that follow each of theirs.

    Which ones is a function of seed, step and rank alone.

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
    """One worker's share of the windows that lie side by side in the text; what is left at its end is left out."""
    count = (len(part) - 1) // context
    inputs = part[: count * context].view(count, context)[rank::workers]
    targets = part[1 : count * context + 1].view(count, context)[rank::workers]
    yield from zip(inputs.split(batch), targets.split(batch), strict=True)


def printable(text: str) -> str:
    """Text for a terminal: one line that controls nothing."""
    return re.sub(r"[^\n -~]", "?", text).replace("\n", "\\n")
