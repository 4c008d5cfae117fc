"""The optimizer's states of all rows of a table as tensors, as files of optimizer states have them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.errors import UsageError
from kvstore.rows.frozen_rows import Page
from kvstore.rows.ids import Ids
from kvstore.rows.stripe import STATE, PartSpec
from kvstore.spec import Key

_PREFIX = "rows."  # no name of an array's state begins so: those begin with the optimizer's own names
_IDS, _STEPS = f"{_PREFIX}ids", f"{_PREFIX}steps"

Part = np.ndarray[Any, np.dtype[Any]]


class RowStates(NamedTuple):
    """States by row.

    Attributes:
        ids: of the rows, rising.
        parts: by the names that ``Page.parts`` has for states, for each id its state.
        steps: how many updates the optimizer has made.
    """

    ids: Ids
    parts: dict[str, Part]
    steps: int

    @classmethod
    def of(cls, pages: Iterable[Page], steps: int) -> RowStates:
        """Join what ``pages``, of all servers, have of states."""
        listed = list(pages)
        ids = np.concatenate([np.empty(0, np.int64), *(page.ids for page in listed)])
        order = np.argsort(ids)
        names = [name for name in (listed[0].parts if listed else ()) if name.startswith(STATE)]
        parts = {name: np.concatenate([page.parts[name] for page in listed])[order] for name in names}
        return cls(ids[order], parts, steps)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them as a file has them; see ``split``."""
        named = {_IDS: self.ids, **{f"{_PREFIX}{name}": part for name, part in self.parts.items()}}
        return {_STEPS: torch.tensor(self.steps, dtype=torch.int64, device="cpu")} | {
            name: torch.from_numpy(part) for name, part in named.items()
        }

    def require(self, parts: Mapping[str, PartSpec], key: Key, where: object) -> None:
        """Raise ``UsageError`` unless rows that have ``parts`` can take these states.

        Args:
            parts: of the rows; see ``RowTable.parts``.
            key: of their table, for the message.
            where: the states come from, for the message.
        """
        given = {
            name: PartSpec(part.dtype.name, part.shape[1] if part.ndim > 1 else 0) for name, part in self.parts.items()
        }
        for name, part in given.items():
            if parts.get(name) != part:
                known = [each.removeprefix(STATE) for each in parts if each.startswith(STATE)]
                raise UsageError(
                    f"{where} holds {name.removeprefix(STATE)} of {part.columns} {part.dtype} for each row of table "
                    f"{key!r}, but its optimizer keeps {', '.join(known) or 'nothing'} there"
                )

    def replacing(self, page: Page) -> tuple[Page, Ids]:
        """Return those rows of ``page`` that have states here, with these, and where these are in ``ids``."""
        if not len(self.ids):
            places = np.zeros(len(page.ids), np.int64)
            found = np.zeros(len(page.ids), bool)
        else:
            places = np.minimum(np.searchsorted(self.ids, page.ids), len(self.ids) - 1)
            found = self.ids[places] == page.ids
        places = places[found]
        parts = {name: part[found] for name, part in page.parts.items() if not name.startswith(STATE)}
        parts |= {name: part[places] for name, part in self.parts.items()}
        return Page(page.ids[found], page.rows[found], parts), places


def split(
    states: Mapping[tuple[Key, str], torch.Tensor], where: object
) -> tuple[dict[tuple[Key, str], torch.Tensor], dict[Key, RowStates]]:
    """Return the states of arrays, and those of tables by key.

    Args:
        states: what a file has.
        where: it comes from, for messages.

    Raises:
        UsageError: ids and states of a table do not match.
    """
    arrays = {which: value for which, value in states.items() if not which[1].startswith(_PREFIX)}
    by_key: dict[Key, dict[str, torch.Tensor]] = {}
    for (key, name), value in states.items():
        if name.startswith(_PREFIX):
            by_key.setdefault(key, {})[name] = value
    tables = {}
    for key, named in by_key.items():
        ids, steps = named.pop(_IDS, None), named.pop(_STEPS, None)
        if (
            ids is None
            or steps is None
            or ids.dtype != torch.int64
            or ids.dim() != 1
            or steps.numel() != 1
            or any(not value.dim() or len(value) != len(ids) for value in named.values())
            or not bool((ids[1:] > ids[:-1]).all())
        ):
            raise UsageError(f"{where} is damaged: the states of table {key!r} do not belong to rising ids")
        parts = {name.removeprefix(_PREFIX): value.numpy() for name, value in named.items()}
        tables[key] = RowStates(ids.numpy(), parts, int(steps))
    return arrays, tables
