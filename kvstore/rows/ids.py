"""The ids of rows: checks of what a user gives, their hash, and which server has which of them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from kvstore.errors import UsageError
from kvstore.table import Table
from kvstore.values import as_tensor

Ids: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Hashes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Stripes: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def require_ids(what: str, given: Any, table: Any) -> Ids:
    """Return ``given`` as an int64 array of the same shape; over the same memory where it is one already.

    Args:
        table: a ``Table``, or an ``ArrayOfRows``.

    Raises:
        UsageError: an id is no integer or can be none of the table's. The message has the first such, and its position.
    """
    array: Any
    if isinstance(given, torch.Tensor) and given.dtype == torch.int64 and given.is_cpu and _is_plain(given):
        array = given.numpy()  # the common case, which is to cost little: a call may have many tables
    else:
        array = array_of_ids(what, given)
        if not array.size and array.dtype == np.float64 and not hasattr(given, "dtype"):
            array = array.astype(np.int64)  # an empty list
    if isinstance(given, torch.Tensor) and array.dtype.kind not in "iu":
        raise UsageError(f"{what} must be integers, not {_kind(given)}")
    if array.dtype.kind not in "iu":
        raise UsageError(f"{what} must be integers of at most 64 bits, not {_kind(array)}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        view = "torch.int64" if isinstance(given, torch.Tensor) else "'int64'"
        _require(what, array, array > np.uint64(2**63 - 1), f"ids are int64: pass a uint64 hash as ids.view({view})")
    ids: Ids = array.astype(np.int64, copy=False)
    if table.rows is None or not ids.size:
        return ids
    if ids.view(np.uint64).max() >= table.rows:  # negative ids are large numbers there
        _require(what, ids, (ids < 0) | (ids >= table.rows), f"{table} has the ids 0 to {table.rows - 1}")
    return ids


def array_of_ids(what: str, given: Any) -> np.ndarray[Any, Any]:
    """Return what a user gives as ids as an array of its own shape and dtype, which may be none of integers yet.

    Raises:
        UsageError: there is no array of it, or it has what is no number: text, None, an integer that needs more bits.
    """
    if isinstance(given, torch.Tensor):
        return _of_tensor(what, given)
    if isinstance(given, np.ndarray | np.generic) and given.dtype != object:
        return np.asarray(given)
    if hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray):
        return as_tensor(given).cpu().numpy()
    if callable(getattr(given, "values", None)) and callable(getattr(given, "lengths", None)):  # torchrec's
        ids = "ids[KEY]" if hasattr(given, "keys") else "ids"
        raise UsageError(
            f"{what} must be an array of integers, not a {type(given).__name__}: give the EmbeddingBag of each table "
            f"{ids}.values() and offsets={ids}.offsets(), and make it with include_last_offset=True"
        )
    if isinstance(given, np.ndarray | np.generic):  # of objects: numpy looks what they are
        given = given.tolist()
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(None)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        _explain(what, given, array)
    return array


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether numpy can have a tensor's memory."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _of_tensor(what: str, given: torch.Tensor) -> np.ndarray[Any, Any]:
    if given.is_nested:
        raise UsageError(
            f"{what} must be an array of integers, not a nested tensor: give an EmbeddingBag made with "
            "include_last_offset=True the ids.values() and offsets=ids.offsets() of one whose layout is torch.jagged, "
            "or fill the bags up with padding_idx: ids.to_padded_tensor(PADDING)"
        )
    if given.is_meta:
        raise UsageError(f"{what} are a tensor on the device meta, which has no values: pass ids on a real device")
    if not _is_plain(given):
        raise UsageError(
            f"{what} must be in a dense tensor of integers, not in one of {given.layout}: pass ids.to_dense()"
        )
    if given.dtype == torch.bfloat16:  # which numpy has not
        given = given.float()
    return given.detach().cpu().numpy()


def _explain(what: str, given: Any, array: np.ndarray[Any, Any]) -> None:
    """Raise the error for ids in lists that numpy has made no integers of 64 bits from; not for other numbers."""
    if not isinstance(given, list | tuple) and array.dtype == object:
        raise UsageError(f"{what} must be integers, in an array, a tensor or a list, not a {type(given).__name__}")
    for position, each in enumerate(_flat(given)):
        said = f"{what} must be integers of 64 bits, and at position {position} is {_short(each)}: "
        if isinstance(each, str | bytes):
            raise UsageError(f"{said}pass kv.hash_ids(TEXTS) to a table that grows, or number the texts yourself")
        if each is None:
            raise UsageError(f"{said}leave out what is missing, or pass the id that is the module's padding_idx")
        if isinstance(each, int | np.integer) and not -(2**63) <= each < 2**63:
            raise UsageError(
                f"{said}ids are int64. Pass hashes as numpy.array([id % 2**64 for id in ids], 'uint64').view('int64')"
            )
        if array.dtype == object and not isinstance(each, float | int | np.number):
            raise UsageError(f"{said}that is a {type(each).__name__}")
    if array.dtype == object:
        raise UsageError(
            f"{what} must be an array of integers, and these are lists of several lengths: pass all ids one after the "
            "other, and where each list begins as offsets, to an EmbeddingBag; or fill the lists up with padding_idx"
        )


def _flat(given: Any) -> Iterator[Any]:
    if isinstance(given, list | tuple):
        for each in given:
            yield from _flat(each)
    elif isinstance(given, np.ndarray | torch.Tensor):
        yield from np.asarray(given).flat
    else:
        yield given


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    x += seed_of(seed)
    return mix(x)


def seed_of(seed: int) -> np.uint64:
    """Return what is added to ids before they are mixed."""
    added: np.uint64 = np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    return added


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


Bounds: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"  # of each table


def joined(ids: Sequence[Ids]) -> Ids:
    """Return the ids of at least one table, one table's after the other's."""
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def starts_of(ids: Sequence[Ids]) -> list[int]:
    """Return where in ``joined`` the ids of each table begin, and where the last table's ids end."""
    return list(itertools.accumulate(map(len, ids), initial=0))


def all_rise(ids: Ids, starts: Sequence[int] | Bounds, least: Bounds, greatest: Bounds) -> bool:
    """Return whether the ids of each table rise, and can be in the table.

    Args:
        starts: where those of each table begin, and where those of the last end.
        least, greatest: the ids that each table can have.
    """
    if not len(ids):
        return True
    falls = ids[1:] <= ids[:-1]
    if len(least) == 1:
        return least.item(0) <= ids.item(0) and ids.item(-1) <= greatest.item(0) and not np.count_nonzero(falls)
    bounds = np.asarray(starts)
    firsts, stops = bounds[:-1], bounds[1:]
    if not np.logical_and.reduce(firsts < stops):
        there = firsts < stops  # the others have no ids
        firsts, stops, least, greatest = firsts[there], stops[there], least[there], greatest[there]
    falls[firsts[1:] - 1] = False  # where one table's end and the next one's begin
    return not (
        np.count_nonzero(falls)  # half the time of a reduction
        or np.logical_or.reduce(ids[firsts] < least)
        or np.logical_or.reduce(ids[stops - 1] > greatest)
    )
