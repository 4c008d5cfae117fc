"""What all workers must have alike before they train: the class, its settings and the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvstore import Mismatch
from workers.common.gather import Gather, digest
from workers.common.values import describe


def require_alike(
    gather: Gather, kind: str, settings: Mapping[str, int | str], values: Mapping[str, torch.Tensor]
) -> None:
    """Require that all workers have the same class, settings and model. Every worker calls this.

    Args:
        gather: what the workers tell each other with.
        kind: the name of the class.
        settings: settings by name; at most as many as ``gather`` has numbers in a row, less two.
        values: the values that are averaged, by name.

    Raises:
        Mismatch: a worker has something else; the message says what, and which worker.
    """
    model = digest(describe(values))
    numbers = [digest(value) if isinstance(value, str) else value for value in settings.values()]
    rows = gather.exchange([digest(kind), model, *numbers])
    for rank, (their_kind, their_model, *their_numbers) in enumerate(rows):
        if their_kind != digest(kind):
            raise Mismatch(f"worker {rank} has made something else than a {kind}; all workers must make the same")
        for (name, value), number, their_number in zip(settings.items(), numbers, their_numbers, strict=False):
            if their_number != number:
                theirs = "another" if isinstance(value, str) else f"{their_number}"
                raise Mismatch(f"workers disagree on {name}: {value} on this one, {theirs} on worker {rank}")
        if their_model != model:
            raise Mismatch(
                f"worker {rank} has another model, optimizer or setting of buffers: names, shapes, dtypes and order "
                "of the averaged values must be the same on all workers"
            )
