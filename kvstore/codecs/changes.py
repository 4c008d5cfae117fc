"""Changes of an array as bytes: positions and values of the changed elements. Pure; numpy alone.

Values are absolute, never differences, so it does no harm to name an element that has not changed. An encoding is empty
if nothing has changed. Else it is

    8 bytes           the form, a byte; the number of values, seven bytes
    n bytes           positions, up to a multiple of 8 bytes
    the other bytes   values

Forms of positions are: none, for values of all elements; a bit for each element; or gaps, codes of 4, 8, 16 or 32
bits. A gap is the number of unchanged elements before a changed one. The highest code is an escape: as many unchanged
elements as its number, and no changed one. The shortest form is chosen. At 1 % of the elements a position takes 1.08
bytes, at 10 % 0.63; the entropy is 1.01 and 0.59.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.errors import WireError
from kvstore.wire.coding import Buffer, padded

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_WHOLE, _BITMAP = 0, 1  # forms; each other form is the bits of a gap
_GAPS = (4, 8, 16, 32)
_HEAD = 8

_WORDS = 1 << 12  # of a row of ``checksum``


def encode_changes(positions: Array | None, values: Array, chosen: Array | None = None) -> list[Buffer]:
    """Return the elements of ``values`` at ``positions``, in as few bytes as possible.

    Args:
        positions: int64, rising; None for all elements.
        values: all elements, 1-d, as unsigned integers of their bits.
        chosen: those at ``positions``, if they are known.

    Returns:
        A head and values; nothing if there are no positions. If all values are there, they are ``values`` themselves.
    """
    size, itemsize = len(values), values.itemsize
    if not (size if positions is None else len(positions)):
        return []
    form, where, sent = _WHOLE, np.empty(0, np.uint8), values  # a copy would double the cost of the first version
    if positions is not None and may_be_shorter(len(positions), size, itemsize):
        form, where = _encoded(positions, size)
        if padded(where.nbytes, 8) + len(positions) * itemsize < size * itemsize:
            sent = values.take(positions) if chosen is None else chosen
        else:
            form, where = _WHOLE, where[:0]
    head = np.zeros(_HEAD + padded(where.nbytes, 8), np.uint8)
    head[:_HEAD].view(np.uint64)[0] = len(sent) << 8 | form
    head[_HEAD : _HEAD + where.nbytes] = where.view(np.uint8)
    return [head.data, sent.data.cast("B")]


def may_be_shorter(count: int, size: int, itemsize: int) -> bool:
    """Whether ``count`` of ``size`` elements with their positions may take fewer bytes than all elements."""
    return count * itemsize + min(count // 2, size // 8) < size * itemsize


def decode_changes(buffers: Sequence[Buffer], dtype: np.dtype[Any], size: int) -> tuple[Array | None, Array]:
    """Return positions, rising int64, and values from bytes that ``encode_changes`` has made, or anybody else.

    Args:
        buffers: the encoding, in any number of parts.
        dtype: of the bits of an element.
        size: of the array.

    Returns:
        None for positions if there is a value for each element. Values may be a view of the buffer, only to be read.

    Raises:
        WireError: the bytes are not changes of such an array.
    """
    parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers if memoryview(buffer).nbytes]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, dtype)
    if len(parts) > 2 or len(parts[0]) < _HEAD:
        parts = [np.concatenate(parts)]
    nbytes = sum(map(len, parts))
    if nbytes < _HEAD:
        raise WireError(f"changes of {nbytes} bytes, less than their head")
    count, form = divmod(int.from_bytes(parts[0][:_HEAD].tobytes(), "little"), 256)
    end = nbytes - count * dtype.itemsize
    if not 0 < count <= size or end < _HEAD or end % 8:
        raise WireError(f"changes of {nbytes} bytes do not have {count} of {size} elements of {dtype}")
    if len(parts) == 2 and len(parts[0]) != end:
        parts = [np.concatenate(parts)]
    # As they were encoded, head and values apart, nothing is copied.
    where, values = parts[0][_HEAD:end], (parts[0][end:] if len(parts) == 1 else parts[1]).view(dtype)
    if not values.flags.aligned:
        values = values.copy()  # torch cannot have it otherwise
    if form == _WHOLE and count == size and not len(where):
        return None, values
    if form == _BITMAP and len(where) == -(-size // 64) * 8:
        positions = np.flatnonzero(np.unpackbits(where, bitorder="little").view(np.bool_))
    elif form in _GAPS:
        positions = _positions(where, form, size)
    else:
        raise WireError(f"changes of form {form} with {len(where)} bytes for positions of {count} of {size} elements")
    if len(positions) != count or positions[-1] >= size:
        raise WireError(f"changes of {count} elements whose {len(positions)} positions are not below {size}")
    return positions, values


def apply_changes(
    buffers: Sequence[Buffer],
    out: Array,
    before: int | None = None,
    fill: Callable[[Array], object] | None = None,
) -> tuple[Array | None, Array, int]:
    """Write the values of changes to ``out``, 1-d, of the bits of the elements.

    Args:
        buffers: see ``decode_changes``.
        before: the ``checksum`` of ``out``, if it is known. Then not all of it is read where few elements change.
        fill: writes values of all elements to ``out``.

    Returns:
        What ``decode_changes`` does, and the checksum of ``out`` as it is now.

    Raises:
        WireError: the bytes are not changes of such an array; nothing is written then.
    """
    positions, values = decode_changes(buffers, out.dtype, len(out))
    if positions is None:
        total = checksum(values)  # first: then the processor's cache has them
        if fill is None:
            out[:] = values
        else:
            fill(values)
        return positions, values, total
    if before is not None:
        total = (before + checksum_change(positions, out[positions], values)) % 2**64
        out[positions] = values
        return positions, values, total
    out[positions] = values
    return positions, values, checksum(out)


def _encoded(positions: Array, size: int) -> tuple[int, Array]:
    """Return the shortest form of ``positions`` in an array of ``size``, and its bytes."""
    count, shortest, form = len(positions), -(-size // 8), _BITMAP
    gaps = np.diff(positions, prepend=-1) - 1
    if size < 1 << 32:
        gaps = gaps.astype(np.uint32)  # half the time of a division
    for bits in _GAPS:
        if count * bits // 8 >= shortest:
            break  # longer even without an escape
        codes = count + int((gaps // ((1 << bits) - 1)).sum())
        if -(-codes * bits // 8) < shortest:
            shortest, form = -(-codes * bits // 8), bits
    if form == _BITMAP:
        changed = np.zeros(size, np.bool_)
        changed[positions] = True
        return form, np.packbits(changed, bitorder="little")
    escape = (1 << form) - 1
    escapes = gaps // escape
    last = np.cumsum(escapes + 1, dtype=np.int64) - 1  # of the codes of each gap: its rest
    # Escapes fill the last 8 bytes: no position follows them.
    encoded = np.full(-(-(int(last[-1]) + 1) * form // 64) * 64 // form, escape, f"u{max(form, 8) // 8}")
    encoded[last] = gaps - escapes * escape
    if form == 4:
        pairs = encoded.view(np.uint16)
        return form, (pairs | pairs >> 4).astype(np.uint8)
    return form, encoded


def _positions(where: Array, bits: int, size: int) -> Array:
    """Return the positions that gaps of so many ``bits`` say, int64; they rise."""
    if bits == 4:
        pairs = where.astype(np.uint16)
        codes = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)
    else:
        codes = where.view(f"u{bits // 8}")
    escape = (1 << bits) - 1
    # The sum of codes must not wrap around, nor take more memory than the array justifies. Some codes are padding.
    if len(codes) > size + 16 or len(codes) << bits >= 2**63:
        raise WireError(f"changes with {len(codes)} gaps of {bits} bits in {size} elements")
    found = codes != escape
    reached = np.cumsum(codes + found, dtype=np.int64)
    positions: Array = reached[found] - 1
    return positions


_EACH = 64  # a form of ids alone: each in eight bytes
_NEAR = 1 << 40  # ids that lie further apart are encoded so
_IDS_HEAD = 16


def encode_ids(ids: Array) -> Array:
    """Return ``ids``, int64 that rise, in few bytes: the first, and the others as positions after it."""
    if not len(ids):
        return np.empty(0, np.uint8)
    first, span = int(ids[0]), int(ids[-1]) - int(ids[0])
    form, where = _encoded(ids - first, span + 1) if span < _NEAR else (_EACH, ids)
    if where.nbytes >= ids.nbytes:
        form, where = _EACH, ids
    head = np.array([first, (span if form != _EACH else 0) << 8 | form], np.int64)
    return np.concatenate([head.view(np.uint8), where.view(np.uint8)])


def decode_ids(data: Array, count: int) -> Array:
    """Return ``count`` ids, rising int64, from the bytes of ``encode_ids``. The bytes may come from anybody.

    Raises:
        WireError: it is something else.
    """
    ids = np.empty(0, np.int64)
    if count and len(data) >= _IDS_HEAD:
        first, rest = data[:_IDS_HEAD].view(np.int64).tolist()
        where, form, span = data[_IDS_HEAD:], rest & 255, rest >> 8
        if form == _EACH and len(where) == 8 * count:
            ids = where.view(np.int64)
        elif form == _BITMAP and 0 <= span < 8 * len(where):
            ids = np.flatnonzero(np.unpackbits(where, bitorder="little").view(np.bool_)) + first
        elif form in _GAPS and 0 <= span < _NEAR and not len(where) % 8:
            ids = _positions(where, form, span + 1) + first
    if len(ids) != count or (not count and len(data)) or bool((ids[1:] <= ids[:-1]).any()):
        raise WireError(f"{len(data)} bytes are not {count} ids")
    return ids


def checksum(values: Array) -> int:
    """Return a sum of the bytes of ``values``, contiguous, from 0 to 2^64 - 1. It is no protection against a forger.

    It is the sum modulo 2^64 of the little-endian words of 8 bytes, the last padded with zeros, each times an odd
    number. For word j of row i, of 4096 words each, that is ``odd(j) * odd(2^32 + i)``, where ``odd`` is the output of
    splitmix64 with the lowest bit set.

    One wrong element is always found. It costs a third of zlib's crc32: as much as reading the memory. Where few
    elements have changed, see ``checksum_change``.
    """
    data = np.frombuffer(values, np.uint8) if values.size else np.empty(0, np.uint8)
    whole = len(data) // 8 // _WORDS * _WORDS * 8
    parts = [data[:whole]]
    if whole < len(data):
        parts.append(np.zeros(8 * _WORDS, np.uint8))
        parts[1][: len(data) - whole] = data[whole:]
    total = 0
    for start, words in zip((0, whole), parts, strict=False):
        rows = words.view(np.uint64).reshape(-1, _WORDS)
        sums = np.einsum("ij,j->i", rows, _odd(0, _WORDS))
        total += int(np.dot(sums, _odd((1 << 32) + start // 8 // _WORDS, len(sums))))
    return total % 2**64


def checksum_change(positions: Array, before: Array, after: Array) -> int:
    """Return by how much the ``checksum`` of an array grows, modulo 2^64, when some of its elements change.

    Args:
        positions: of these elements, int64 or uint32.
        before: what they were, as unsigned integers of their bits.
        after: what they become.
    """
    weights = _weights(after.itemsize)
    width = len(weights).bit_length() - 1
    rows = positions >> width
    factors = weights.take(positions & (len(weights) - 1))
    factors *= _odd(1 << 32, int(rows.max(initial=0)) + 1).take(rows)
    return int(np.dot(after.astype(np.uint64) - before, factors))


@functools.lru_cache(maxsize=4)
def _weights(itemsize: int) -> Array:
    """Return the factors of the elements of a row of ``checksum``: its words', shifted to where an element is in it."""
    shifts = np.arange(0, 64, 8 * itemsize, dtype=np.uint64)
    factors: Array = (_odd(0, _WORDS)[:, None] << shifts).reshape(-1)
    return factors


@functools.lru_cache(maxsize=4)
def _odd(first: int, count: int) -> Array:
    """Return odd numbers from splitmix64, number ``first`` and those after it."""
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    odd: Array = (mixed ^ mixed >> np.uint64(31)) | np.uint64(1)
    return odd
