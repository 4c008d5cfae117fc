"""MXNet's files of arrays (``.params``), without MXNet: read into tensors, and written back to the same bytes.

All numbers are little-endian, and nothing is padded:

    file    u64 0x112, u64 0, u64 number of arrays, arrays, u64 number of names, for each name: u64 length, UTF-8
    array   u32 magic, i32 storage, [if sparse: noted], shape, i32 kind of device, i32 its number, i32 dtype,
            [if sparse: for each kind of index: i32 dtype, shape], values, [indices]
    noted   shape: of the values, as it was before MXNet waited for them, so it may be too small; MXNet does not use it
    shape   i32 number of dimensions, i64 for each

MXNet 1 writes magic ``V2``. ``V3`` has numpy's shapes: there a shape without dimensions is that of one number,
elsewhere it stands for "no array", after which nothing more comes. ``V1`` has no storage. Files from before there was a
magic begin arrays with the number of dimensions, each of which has 32 bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.errors import CheckpointError
from kvstore.job.files import foreign_format, require_plain
from kvstore.spec import MAX_DIMS, MAX_ELEMENTS
from kvstore.values import to_buffer

HEAD = struct.pack("<QQ", 0x112, 0)
V1, V2, V3, NO_MAGIC = 0xF993FAC8, 0xF993FAC9, 0xF993FACA, 0
MAGICS = (V1, V2, V3, NO_MAGIC)
DENSE, ROW_SPARSE, CSR = "dense", "row_sparse", "csr"
INDICES = {DENSE: (), ROW_SPARSE: ("ids",), CSR: ("indptr", "indices")}  # by storage, as MXNet numbers them
# By their numbers in MXNet.
DTYPES = (
    "float32",
    "float64",
    "float16",
    "uint8",
    "int32",
    "int8",
    "int64",
    "bool",
    "int16",
    "uint16",
    "uint32",
    "uint64",
    "bfloat16",
)
LEAST_BYTES = 4  # of an array: the number of dimensions, 0, in files without magic


@dataclass(frozen=True)
class MXNetArray:
    """An array of a file.

    Attributes:
        magic: how it is written, one of ``MAGICS``.
        storage: a key of ``INDICES``.
        shape: of the whole array; None if there is no array.
        device: where it was: MXNet's kind of device (1 is the CPU), and its number.
        parts: the values, and a tensor for each of ``INDICES``; none if there is no array.
        noted: of a sparse array, the shape of the values that the file says; it is kept so that the same is written.
    """

    magic: int
    storage: str
    shape: tuple[int, ...] | None
    device: tuple[int, int] = (1, 0)
    parts: tuple[torch.Tensor, ...] = ()
    noted: tuple[int, ...] = ()


class MXNetFile(NamedTuple):
    """What a file has. It has a name for each array, such as ``arg:fc1_weight``, or no names."""

    arrays: list[MXNetArray]
    names: list[str]

    @property
    def plain_names(self) -> list[str]:
        """A name for each array as torch would have it: without ``arg:`` and ``aux:``; its number if it has none."""
        if not self.names:
            return [str(number) for number in range(len(self.arrays))]
        plain = [name.removeprefix("arg:").removeprefix("aux:") for name in self.names]
        return plain if len(set(plain)) == len(plain) else self.names


def read_params(path: Path) -> MXNetFile:
    """Return the arrays of the file ``path``, which is mapped into memory: their values are read when they are used.

    Raises:
        CheckpointError: the file is missing, is no such file, or is damaged; the message says where.
    """
    try:
        require_plain(path)
        size = path.stat().st_size
        # Mapped for this process alone: who changes a tensor does not change the file.
        data = np.memmap(path, np.uint8, "c") if size else np.empty(0, np.uint8)
    except OSError as exc:
        raise CheckpointError(f"{path}: missing or unreadable ({exc.strerror})") from None
    if data[: len(HEAD)].tobytes() != HEAD:
        other = foreign_format(path) or "no file of MXNet's arrays: it does not begin as they do"
        raise CheckpointError(f"{path} is {other}")
    try:
        return parsed(np.asarray(data))
    except CheckpointError as exc:
        raise CheckpointError(f"{path}: damaged: {exc}") from None


def parsed(data: Any) -> MXNetFile:
    """Return the arrays whose file is ``data``, bytes of numpy, over the same memory where that is aligned.

    Raises:
        CheckpointError: the bytes are no such file. Nothing is allocated for numbers that do not fit the file's length.
    """
    try:
        return _parsed(data, numbers=False)
    except CheckpointError as exc:
        try:
            return _parsed(data, numbers=True)
        except CheckpointError:
            raise exc from None


def parsed_array(data: Any) -> MXNetArray:
    """Return the one array that the bytes ``data`` are; see ``parsed``."""
    cursor = _Cursor(data)
    array = _array(cursor, 0, numbers=False)
    if cursor.left:
        raise CheckpointError(f"{cursor.left} bytes come after an array")
    return array


def _parsed(data: Any, numbers: bool) -> MXNetFile:
    """``parsed``; ``numbers``: whether a shape without dimensions is that of one number.

    MXNet 1.9 saves ``mx.nd.array(3.5)`` so outside of ``np_shape``, and cannot load it.
    """
    cursor = _Cursor(data)
    if cursor.take(len(HEAD), "the head").tobytes() != HEAD:
        raise CheckpointError("it does not begin as MXNet's files do")
    count = cursor.count("arrays", LEAST_BYTES)
    arrays = [_array(cursor, number, numbers) for number in range(count)]
    names = [cursor.name() for _ in range(cursor.count("names", 8))]
    if names and len(names) != count:
        raise CheckpointError(f"it has {count} arrays, but {len(names)} names")
    if len(set(names)) < len(names):
        raise CheckpointError("two arrays have the same name")
    if cursor.left:
        raise CheckpointError(f"{cursor.left} bytes come after the names")
    return MXNetFile(arrays, names)


def checked_shape(shape: tuple[int, ...], said: str = "a shape is ") -> tuple[int, ...]:
    """Return ``shape``. Raises ``CheckpointError`` if it is negative, or too large to be counted, empty or not."""
    if min(shape, default=0) < 0 or math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{said}{list(shape)}")
    return shape


class _Cursor:
    """A place in the bytes of a file, from which the next is read."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, nbytes: int, what: str) -> Any:
        if nbytes > self.left:
            raise CheckpointError(
                f"at byte {self._at}, {what} would have {nbytes} bytes, of which {self.left} are there"
            )
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def numbers(self, kinds: str, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{kinds}", self.take(struct.calcsize(f"<{kinds}"), what).tobytes())

    def count(self, what: str, least: int) -> int:
        """Return how many ``what`` follow, each of ``least`` bytes or more."""
        (count,) = self.numbers("Q", f"the number of {what}")
        if count * least > self.left:
            raise CheckpointError(f"at byte {self._at - 8} it says {count} {what}, and {self.left} bytes are left")
        return count

    def name(self) -> str:
        (length,) = self.numbers("Q", "the length of a name")
        try:
            return str(self.take(length, "a name").tobytes(), "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"the name before byte {self._at} is not in UTF-8") from None

    def shape(self, dims: int | None = None, kind: str = "q") -> tuple[int, ...]:
        """Return a shape of ``dims`` dimensions, or of as many as come first."""
        if dims is None:
            (dims,) = self.numbers("i", "a shape")
        if not 0 <= dims <= MAX_DIMS:
            raise CheckpointError(f"before byte {self._at}, a shape has {dims} dimensions, not 0 to {MAX_DIMS}")
        return checked_shape(self.numbers(kind * dims, "a shape"), f"before byte {self._at}, a shape is ")

    def dtype(self) -> str:
        (number,) = self.numbers("i", "a dtype")
        if not 0 <= number < len(DTYPES):
            raise CheckpointError(f"before byte {self._at}, a dtype has number {number}, not 0 to {len(DTYPES) - 1}")
        return DTYPES[number]

    def tensor(self, dtype: str, shape: Sequence[int], what: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        raw = self.take(math.prod(shape) * kind.itemsize, what)
        if not raw.size:
            return torch.empty(tuple(shape), dtype=kind, device="cpu")
        if raw.ctypes.data % kind.itemsize:
            raw = raw.copy()  # torch's kernels may rely on it
        if dtype == "bool" and raw.max() > 1:
            raise CheckpointError(f"before byte {self._at}, {what} are bools, and are neither 0 nor 1")
        return torch.from_numpy(raw).view(kind).view(tuple(shape))


def _array(cursor: _Cursor, number: int, numbers: bool) -> MXNetArray:
    what = f"array {number}"
    (magic,) = cursor.numbers("I", what)
    storage = DENSE
    noted: tuple[int, ...] = ()
    if magic in (V2, V3):
        (kind,) = cursor.numbers("i", what)
        if not 0 <= kind < (len(INDICES) if magic == V2 else 1):
            raise CheckpointError(f"{what} has storage {kind}, which is unknown")
        storage = list(INDICES)[kind]
        noted = cursor.shape() if storage != DENSE else ()
        (dims,) = cursor.numbers("i", f"the shape of {what}")
        absent = dims == -1 if magic == V3 else dims == 0 and not numbers
        shape = () if absent else cursor.shape(dims)
    elif magic == V1:
        shape = cursor.shape()
        absent = not shape
    elif magic <= MAX_DIMS:
        shape = cursor.shape(magic, "I")
        absent, magic = not shape, NO_MAGIC
    else:
        raise CheckpointError(f"{what} begins with 0x{magic:08x}, which no version of MXNet writes")
    if absent:
        return MXNetArray(magic, storage, None, noted=noted)
    device = cursor.numbers("ii", f"the device of {what}")
    dtype = cursor.dtype()
    kinds = [(name, cursor.dtype(), cursor.shape()) for name in INDICES[storage]]
    if any(kind not in ("int32", "int64") or len(length) != 1 for _, kind, length in kinds):
        raise CheckpointError(f"the indices of {what} are no lists of integers of 32 or 64 bits")
    if storage == CSR and len(shape) != 2:
        raise CheckpointError(f"{what} is csr, and of shape {list(shape)}")
    held = shape if storage == DENSE else (*kinds[-1][2], *(shape[1:] if storage == ROW_SPARSE else ()))
    values = cursor.tensor(dtype, held, f"the values of {what}")
    indices = [cursor.tensor(kind, length, f"the {name} of {what}") for name, kind, length in kinds]
    require_indices(what, shape, indices)
    return MXNetArray(magic, storage, shape, (device[0], device[1]), (values, *indices), noted)


def require_indices(what: str, shape: Sequence[int], indices: Sequence[torch.Tensor]) -> None:
    """Raise ``CheckpointError`` unless the indices of a sparse array can be those of one of ``shape``."""
    if len(indices) == 1:
        (ids,) = indices
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < shape[0] and bool((ids[1:] > ids[:-1]).all())):
            raise CheckpointError(f"the ids of {what} do not rise from 0 on to at most {shape[0] - 1}")
    elif indices:
        indptr, columns = indices
        if len(indptr) != shape[0] + 1:
            raise CheckpointError(f"{what} has {shape[0]} rows, but {len(indptr)} places where rows begin or end")
        if int(indptr[0]) != 0 or int(indptr[-1]) != len(columns) or bool((indptr[1:] < indptr[:-1]).any()):
            raise CheckpointError(f"the rows of {what} do not follow each other from 0 to {len(columns)}")
        if len(columns) and not (int(columns.min()) >= 0 and int(columns.max()) < shape[1]):
            raise CheckpointError(f"the columns of {what} are not from 0 to {shape[1] - 1}")


def written(file: MXNetFile) -> Iterator[bytes | memoryview]:
    """Yield the bytes of ``file``, piece by piece."""
    yield HEAD + struct.pack("<Q", len(file.arrays))
    for array in file.arrays:
        yield _described(array)
        for part in array.parts:
            yield to_buffer(part.contiguous())
    encoded = [name.encode() for name in file.names]
    yield struct.pack("<Q", len(encoded)) + b"".join(struct.pack("<Q", len(name)) + name for name in encoded)


def _described(array: MXNetArray) -> bytes:
    shape = () if array.shape is None else array.shape
    if array.magic == NO_MAGIC:
        head = struct.pack(f"<I{len(shape)}I", len(shape), *shape)
    elif array.magic == V1:
        head = struct.pack("<I", V1) + _shape(shape)
    else:
        head = struct.pack("<Ii", array.magic, list(INDICES).index(array.storage))
        head += _shape(array.noted) if array.storage != DENSE else b""
        head += struct.pack("<i", -1) if array.shape is None and array.magic == V3 else _shape(shape)
    if array.shape is None:
        return head
    values, *indices = array.parts
    head += struct.pack("<iii", *array.device, _number(values))
    return head + b"".join(struct.pack("<i", _number(index)) + _shape(index.shape) for index in indices)


def _shape(shape: Sequence[int]) -> bytes:
    return struct.pack(f"<i{len(shape)}q", len(shape), *shape)


def _number(tensor: torch.Tensor) -> int:
    return DTYPES.index(str(tensor.dtype).removeprefix("torch."))
