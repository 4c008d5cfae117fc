"""The ids of rows: checks of what a user gives, their hash, and which server has which of them. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from kvstore.errors import UsageError
from kvstore.table import Table

Ids: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Hashes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Stripes: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def require_ids(what: str, given: Any, table: Table) -> Ids:
    """Return ``given`` as an int64 array of the same shape; over the same memory where it is one already.

    Args:
        what: names the ids in messages.
        given: integers: an array of numpy or torch, or (nested) lists.
        table: whose ids they are. One with a shape has ids from 0 to ``rows - 1``, one that grows has all of int64.

    Raises:
        UsageError: an id is no integer or can be none of the table's. The message has the first such, and its position.
    """
    array: Any
    if isinstance(given, torch.Tensor) and given.dtype == torch.int64 and given.is_cpu and not given.is_sparse:
        array = given.numpy()  # the common case, which is to cost little: a call may have many tables
    elif isinstance(given, torch.Tensor):
        if given.dtype == torch.bool or given.is_floating_point() or given.is_complex() or given.is_sparse:
            raise UsageError(f"{what} must be integers, not {_kind(given)}")
        array = given.detach().cpu().numpy()
    else:
        try:
            array = np.asarray(given)
        except (TypeError, ValueError) as exc:  # lists of unequal lengths
            raise UsageError(f"{what} must be an array of integers: {exc}") from None
        if not array.size and array.dtype == np.float64 and not hasattr(given, "dtype"):
            array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iu":
        raise UsageError(f"{what} must be integers of at most 64 bits, not {_kind(array)}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        _require(what, array, array > np.uint64(2**63 - 1), "ids are int64: pass a uint64 hash as ids.view('int64')")
    ids: Ids = array.astype(np.int64, copy=False)
    if table.rows is None or not ids.size:
        return ids
    if ids.view(np.uint64).max() >= table.rows:  # negative ids are large numbers there
        _require(what, ids, (ids < 0) | (ids >= table.rows), f"{table} has the ids 0 to {table.rows - 1}")
    return ids


def _kind(array: Any) -> str:
    return f"{type(array).__module__.partition('.')[0]}'s {str(array.dtype).removeprefix('torch.')}"


def _require(what: str, ids: Any, wrong: Any, advice: str) -> None:
    if not wrong.any():
        return
    position = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(wrong)))
    where = position[0] if len(position) == 1 else position
    raise UsageError(f"{what}: id {int(np.atleast_1d(ids)[position])} at position {where} cannot be used: {advice}")


def mixed(ids: Ids, seed: int = 0) -> Hashes:
    """Return a hash of each id: splitmix64's last steps, which spread any pattern over all 64 bits.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (OOPSLA 2014).
    """
    x = ids.astype(np.uint64)  # a copy, which is changed in place
    x += np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    return mix(x)


def mix(x: Hashes) -> Hashes:
    """Spread each of ``x`` over all 64 bits, in place; return ``x``."""
    shifted = np.empty_like(x)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(x, np.uint64(shift), out=shifted)
        x ^= shifted
        x *= np.uint64(factor)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def stripes_of(table: Table, ids: Ids, stripes: int) -> Stripes:
    """Return which of ``stripes`` servers has each of ``ids``.

    With a shape it is the remainder of the id, so that a server's rows lie back to back: row ``id // stripes``. In a
    table that grows it is taken from the upper half of a hash, since ids may share a remainder. The lower half is for
    the server's own index.
    """
    if not table.grows:
        remainders: Stripes = ids % stripes
        return remainders
    hashed: Stripes = ((mixed(ids) >> np.uint64(32)) % np.uint64(stripes)).astype(np.int64)
    return hashed
