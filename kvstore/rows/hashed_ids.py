"""``hash_ids``: texts as ids of rows, by a published hash, computed by numpy for many texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore.dynamo import outside_graphs
from kvstore.errors import UsageError
from kvstore.plain import integer
from kvstore.rows.ids import Hashes, Ids

# The constants of XXH64's specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
P1, P2, P3, P4, P5 = map(np.uint64, PRIMES)
STRIPE = 32  # bytes
NON_NEGATIVE = np.uint64(2**63 - 1)
BLOCK = 1 << 14  # texts that are hashed at a time: what numpy makes for them stays in the processor's cache

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Texts(NamedTuple):
    """Texts in one piece of memory: text ``i`` is the ``lengths[i]`` bytes from ``starts[i]`` on."""

    data: Bytes
    starts: Ids
    lengths: Ids


@outside_graphs
def hash_ids(strings: Any, seed: int = 0) -> torch.Tensor:
    """Return an id for each of ``strings``: the rows of a growing table by names, users, URLs or words.

        ids = kv.hash_ids(["ann", "bob", "ann"])  # ids[0] == ids[2]
        rows = store.row_sparse_pull("user", row_ids=ids)

    An id is the XXH64 hash of the text's bytes in UTF-8, with its highest bit cleared. So it is the same on every
    machine, in every version and in every language: in Python, with the package xxhash, it is
    ``xxhash.xxh64_intdigest(text.encode(), seed) & (2**63 - 1)``. Python's own ``hash()`` of a text is another number
    in each process: ids from it find no row again.

    | text | id with seed 0 |
    |---|---|
    | the empty text | 8018337217222601113 |
    | `a` | 5930894301504237147 |
    | `abc` | 4952883123889572249 |
    | `Zürich` | 428368341751202425 |

    Texts are taken as they are: `Ann` and `ann` are two, as are the composed and the decomposed form of `ü`.

    Two texts have the same id, and then share a row, by chance: among n texts, n² / 2⁶⁴ such pairs are expected. That
    is one in 180,000 for 10 million texts, and 0.05 for a thousand million. Whoever wants to can make such texts on
    purpose. A table with a shape takes ``kv.hash_ids(strings) % rows``, where sharing is common.

    Args:
        strings: a list or tuple of str and bytes; an array of numpy of texts, bytes or objects, where numpy has dropped
            NUL bytes at the ends; an array of pyarrow, which is not copied; a pandas or polars column.
        seed: of the hash, from 0 to 2^64 - 1. Features that share a table take a seed each, so that equal texts of two
            features have two ids.

    Returns:
        A tensor of int64, with ids of at least 0, in the shape of ``strings``.

    Raises:
        UsageError: there is something that is no text, such as None; the message has its position.
    """
    seed = integer("seed", seed, 0, 2**64 - 1)
    if type(strings).__module__.partition(".")[0] == "pyarrow":
        return torch.from_numpy(_ids_of_arrow(strings, seed))
    shape: tuple[int, ...]
    if isinstance(strings, list | tuple):
        shape = (len(strings),)
    elif isinstance(strings, str | bytes) or not hasattr(strings, "__array__"):
        raise UsageError(
            f"hash_ids takes a list or an array of texts, not a {type(strings).__name__}: for one text pass [text]"
        )
    else:
        strings = np.asarray(strings)
        shape, strings = strings.shape, strings.reshape(-1)
    ids = np.empty(len(strings), np.int64)
    for first in range(0, len(ids), BLOCK):
        texts = _texts(strings[first : first + BLOCK], first)
        ids[first : first + BLOCK] = ids_of(texts, seed)
    return torch.from_numpy(ids).view(shape)


def _texts(strings: Any, first: int) -> Texts:
    """Return some of the strings, of which the first is number ``first``."""
    if isinstance(strings, np.ndarray):
        if strings.dtype.kind == "S":
            return _of_fixed_width(np.ascontiguousarray(strings).view(np.uint8).reshape(len(strings), -1))
        if strings.dtype.kind == "U":
            points = np.ascontiguousarray(strings, strings.dtype.newbyteorder("=")).view(np.uint32)
            if not len(points) or points.max() < 128:  # ASCII, where a character is its byte
                return _of_fixed_width(points.astype(np.uint8).reshape(len(strings), -1))
        elif strings.dtype.kind not in "OT":
            raise UsageError(f"hash_ids takes texts, not an array of {strings.dtype}: integers are ids already")
        strings = strings.tolist()
    return _of_objects(strings, first)


def _of_fixed_width(matrix: Bytes) -> Texts:
    """Return texts that are the rows of a matrix, without the zeros at their ends."""
    count, width = matrix.shape
    lengths = np.full(count, width)
    if width and not matrix[:, -1].all():
        filled = matrix != 0
        lengths = np.where(filled.any(1), width - filled[:, ::-1].argmax(1), 0)
    return Texts(matrix.reshape(-1), np.arange(count) * width, lengths)


def _of_objects(strings: Sequence[Any], first: int) -> Texts:
    try:
        text = "".join(strings)
        if text.isascii():  # half the time of encoding each
            return _back_to_back(text.encode(), strings)
        encoded = [each.encode() for each in strings]
    except (TypeError, UnicodeEncodeError):  # bytes among them, or what cannot be hashed
        encoded = [_bytes(each, first + place) for place, each in enumerate(strings)]
    return _back_to_back(b"".join(encoded), encoded)


def _back_to_back(data: bytes, parts: Sequence[Any]) -> Texts:
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return Texts(np.frombuffer(data, np.uint8), np.cumsum(lengths) - lengths, lengths)


def _bytes(text: Any, place: int) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise UsageError(
            f"hash_ids takes texts, and at position {place} is {text!r:.60}, a {type(text).__name__}: leave out what "
            "is missing, or give it a text of its own"
        )
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"hash_ids takes texts that UTF-8 has, and at position {place} is {text!r:.60}: pass it as bytes"
        ) from None


# ---- pyarrow


def _ids_of_arrow(array: Any, seed: int) -> Ids:
    import pyarrow

    if isinstance(array, pyarrow.ChunkedArray):
        parts = [_ids_of_arrow(chunk, seed) for chunk in array.chunks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not isinstance(array, pyarrow.Array):
        raise UsageError(f"hash_ids takes an array of pyarrow, not a {type(array).__name__}: pass table.column(NAME)")
    if array.null_count:
        place = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise UsageError(f"hash_ids takes texts, and at position {place} is null: fill or drop what is missing")
    if isinstance(array, pyarrow.DictionaryArray):
        ids: Ids = _ids_of_arrow(array.dictionary, seed)[array.indices.to_numpy()]
        return ids
    wide = pyarrow.large_string(), pyarrow.large_binary()
    if array.type not in (*wide, pyarrow.string(), pyarrow.binary()):
        try:
            array = array.cast(wide[0] if "string" in str(array.type) else wide[1])
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
            raise UsageError(f"hash_ids takes an array of texts, not of pyarrow's {array.type}") from None
    return _ids_of_buffers(array, np.int64 if array.type in wide else np.int32, seed)


def _ids_of_buffers(array: Any, dtype: type, seed: int) -> Ids:
    _, offsets, data = array.buffers()
    ids = np.empty(len(array), np.int64)
    if not len(ids):
        return ids
    values = np.frombuffer(data or b"", np.uint8)
    bounds: Ids = np.frombuffer(offsets, dtype)[array.offset : array.offset + len(ids) + 1]
    for first in range(0, len(ids), BLOCK):
        starts = bounds[first : first + BLOCK + 1].astype(np.int64)
        ids[first : first + BLOCK] = ids_of(Texts(values, starts[:-1], np.diff(starts)), seed)
    return ids


# ---- XXH64


def ids_of(texts: Texts, seed: int) -> Ids:
    """Return the id of each text."""
    hashes = xxh64(texts, seed)
    hashes &= NON_NEGATIVE
    return hashes.view(np.int64)


def xxh64(texts: Texts, seed: int) -> Hashes:
    """Return the XXH64 hash of each text, each step for all texts at once."""
    data, at, lengths = texts.data, texts.starts.copy(), texts.lengths
    ends = at + lengths
    hashes = np.full(len(at), (seed + PRIMES[4]) % 2**64, np.uint64)
    long = np.flatnonzero(lengths >= STRIPE)
    if len(long):
        hashes[long] = _stripes(_words(data, 8), at, ends, long, seed)
    hashes += lengths.astype(np.uint64)
    for size, times in ((8, 3), (4, 1), (1, 3)):
        words = _words(data, size)
        for _ in range(times):
            some: Any = np.flatnonzero(ends - at >= size)
            if not len(some):
                break
            if len(some) == len(at):
                some = slice(None)  # twice as fast, and usual
            hashes[some] = _absorbed(hashes[some], words[at[some]].astype(np.uint64, copy=False), size)
            at[some] += size
    for shift, factor in ((33, P2), (29, P3)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= factor
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _words(data: Bytes, size: int) -> Any:
    """Return the word of ``size`` bytes that begins at each byte; those that reach past the end are not there."""
    return np.ndarray((max(0, len(data) - size + 1),), f"<u{size}", data, strides=(1,))


def _stripes(words: Any, at: Ids, ends: Ids, long: Ids, seed: int) -> Hashes:
    """Return the hashes of the whole stripes of the texts ``long``, and move ``at`` behind these."""
    p1, p2, *_ = PRIMES
    first = np.array([(seed + part) % 2**64 for part in (p1 + p2, p2, 0, -p1)], np.uint64)
    lanes = np.repeat(first[:, None], len(long), axis=1)
    offsets = np.arange(0, STRIPE, 8)[:, None]
    left = np.arange(len(long))
    while len(left):
        texts = long[left]
        lanes[:, left] = _round(lanes[:, left], words[at[texts] + offsets])
        at[texts] += STRIPE
        left = left[ends[texts] - at[texts] >= STRIPE]
    hashes: Hashes = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
    for lane in lanes:
        hashes ^= _round(np.zeros_like(lane), lane)
        hashes *= P1
        hashes += P4
    return hashes


def _absorbed(hashes: Hashes, words: Hashes, size: int) -> Any:
    """Return ``hashes`` after a word of 8, 4 or 1 bytes more."""
    if size == 8:
        return _rotated(hashes ^ _round(np.zeros_like(words), words), 27) * P1 + P4
    if size == 4:
        return _rotated(hashes ^ words * P1, 23) * P2 + P3
    return _rotated(hashes ^ words * P5, 11) * P1


def _round(lanes: Hashes, words: Hashes) -> Any:
    return _rotated(lanes + words * P2, 31) * P1


def _rotated(hashes: Hashes, by: int) -> Any:
    return hashes << np.uint64(by) | hashes >> np.uint64(64 - by)
