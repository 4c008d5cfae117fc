"""Fragments of a model, and when each is synchronized. Pure.

Fragments are made of whole layers and take turns, as in Streaming DiLoCo (Douillard et al., arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvstore import UsageError


@dataclass(frozen=True)
class Schedule:
    """When fragments are sent, and when their new values are taken. Steps count from 1.

    With H inner steps and P fragments, fragment p leaves after step (p + 1) H / P, rounded down, and every H steps from
    then on. So the last fragment leaves at the end of each period, and a single one does.

    Attributes:
        inner_steps: the number of steps between two synchronizations of a fragment, H.
        fragments: the number of fragments, P.
        overlap: the number of steps between sending a fragment and taking its new values.
    """

    inner_steps: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.fragments > self.inner_steps:
            raise UsageError(
                f"fragments={self.fragments} must be at most inner_steps={self.inner_steps}: each needs a step of its "
                "own"
            )
        if self.overlap >= self.inner_steps:
            raise UsageError(
                f"overlap={self.overlap} must be less than inner_steps={self.inner_steps}: a fragment's new values "
                "must be taken before it is sent again"
            )

    def leaving(self, step: int) -> list[int]:
        """Return the fragments that are sent after ``step``."""
        firsts = [(number + 1) * self.inner_steps // self.fragments for number in range(self.fragments)]
        return [
            number for number, first in enumerate(firsts) if step >= first and (step - first) % self.inner_steps == 0
        ]

    def arriving(self, step: int) -> list[int]:
        """Return the fragments whose new values are taken after ``step``; sending comes first."""
        return self.leaving(step - self.overlap)


def split(params: Mapping[str, torch.Tensor], fragments: int) -> list[list[str]]:
    """Return the names of the parameters of each fragment, in the order of ``params``.

    Each layer, in turn, goes to the fragment with fewest elements. So layers of equal size are dealt out one by one,
    which is the paper's strided pattern.

    Args:
        params: parameters by name.
        fragments: how many fragments to make.

    Raises:
        UsageError: there are fewer layers than fragments.
    """
    layers: dict[str, list[str]] = {}
    for name, tensor in params.items():
        if tensor.numel():
            layers.setdefault(layer_of(name), []).append(name)
    if len(layers) < fragments:
        raise UsageError(
            f"fragments={fragments} must be at most the number of layers with parameters in the optimizer, which is "
            f"{len(layers)}"
        )
    parts: list[list[str]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for names in layers.values():
        number = sizes.index(min(sizes))
        parts[number] += names
        sizes[number] += sum(params[name].numel() for name in names)
    return parts


def layer_of(name: str) -> str:
    """Return the layer of the parameter ``name``: ``blocks.3`` of ``blocks.3.attention.weight``, ``fc`` of ``fc.bias``.

    That is everything up to the first number. Without a number it is the module that has the parameter.
    """
    words = name.split(".")
    numbers = [position for position, word in enumerate(words[:-1]) if word.isdecimal()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1])
