"""PowerSGD (arXiv:1905.13727): a matrix as the product of two thin factors, from one step of power iteration.

The right factor of a round is where the iteration of the next one starts, so over rounds the factors follow the
gradient's largest directions. Workers do not agree on a left factor first, as they would with an all-reduce, so the sum
of n workers' matrices has n times the rank. An array is a matrix of its first dimension by all others. Vectors, and
matrices that two factors would not halve, are sent as they are.

A payload has three int32 (columns, rank, how many elements of the first row come before the range), the range's rows of
the left factor, and the right factor; or all float32 values of the range, if those are fewer bytes. The length says
which. The product is computed as a sum of outer products. The order of additions in a matrix multiplication depends on
the shape, so an element's bits would depend on the range.
"""

from __future__ import annotations

from functools import partial

import torch

from kvstore.codecs.codec import (
    CHUNK,
    CheckedPayload,
    Codec,
    Encoded,
    Memo,
    concatenated_bytes,
    put_or_add,
    scratch,
    typed,
)
from kvstore.errors import WireError

_HEAD = 12  # bytes of the three int32
_HALVED = 2  # factors must be so many times smaller than the matrix
_WIDEST = 2**31 - 1  # columns


class PowerSGD(Codec):
    """Matrices as factors of ``rank``. The first right factor is random, from ``seed``, the same for every worker."""

    whole = True

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.seed = rank, seed

    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        return _Factors(self, shape, memo)

    def _check(self, payload: torch.Tensor, count: int) -> CheckedPayload:
        nbytes = payload.numel()
        if nbytes == 4 * count:
            return CheckedPayload(partial(put_or_add, typed(payload, torch.float32)))
        if nbytes < _HEAD or nbytes % 4:
            raise WireError(f"a payload of {nbytes} bytes for factors of {count} elements")
        columns, rank, before = typed(payload[:_HEAD], torch.int32).tolist()
        if not (1 <= rank <= self.rank and 0 <= before < columns):
            raise WireError(f"a payload of rank {rank}, {before} elements into {columns} columns")
        rows = -(-(before + count) // columns)
        if nbytes != _bytes(rows, columns, rank):
            raise WireError(f"a payload of {nbytes} bytes for factors of {rows} rows and {columns} columns")
        numbers = typed(payload[_HEAD:], torch.float32)
        left, right = numbers[: rows * rank].view(rows, rank), numbers[rows * rank :].view(rank, columns)
        return CheckedPayload(partial(_multiply, left, right, before))


def _multiply(left: torch.Tensor, right: torch.Tensor, before: int, target: torch.Tensor, add: bool) -> None:
    columns = right.shape[1]
    for row in range(0, len(left), _rows(columns)):
        product = _product(left[row : row + _rows(columns)], right)
        first = row * columns - before
        skipped, last = max(0, -first), min(target.numel(), first + product.numel())
        put_or_add(product[skipped : last - first], target[first + skipped : last], add)


class _Factors(Encoded):
    def __init__(self, codec: PowerSGD, shape: torch.Size, memo: Memo) -> None:
        super().__init__(shape.numel())
        self._codec, self._memo = codec, memo
        self._rows = shape[0] if shape else 1
        self._columns = self.size // max(1, self._rows)
        self._left = self._right = torch.empty(0, dtype=torch.float32, device="cpu")
        self._all: torch.Tensor | None = None  # all elements, if they are not sent as factors
        self._basis: torch.Tensor | None = None  # for the next round, if it changes

    def put(self, start: int, values: torch.Tensor) -> None:
        factors = _HALVED * self._codec.rank * (self._rows + self._columns)
        if factors > self.size or self._columns > _WIDEST or not self._factor(values.view(self._rows, self._columns)):
            self._all = values.clone()

    def _factor(self, matrix: torch.Tensor) -> bool:
        """Compute the factors; return False if float32 overflows."""
        basis, rank = self._memo.basis, self._codec.rank
        if basis is None:
            basis = self._memo.noise(self._codec.seed).normal(rank, self._columns).to(matrix.device)
        # A right factor has the gradient's magnitude: as a basis it would square magnitudes.
        basis = basis / basis.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        self._left = torch.linalg.qr(matrix @ basis.T).Q.contiguous()
        self._right = self._left.T @ matrix
        if not bool(torch.isfinite(self._right).all()):
            return False
        if bool(self._right.any(1).all()):  # a basis of zeros would stay zero
            self._basis = self._right
        return True

    def take(self, start: int, values: torch.Tensor, left: torch.Tensor) -> None:
        self.put(start, values)
        if self._all is not None:
            left.zero_()
            return
        matrix, lacking = (flat.view(self._rows, self._columns) for flat in (values, left))
        step = _rows(self._columns)
        for row in range(0, self._rows, step):
            part = matrix[row : row + step]
            product = _product(self._left[row : row + step], self._right).view_as(part)
            torch.sub(part, product, out=lacking[row : row + step])

    def finish(self) -> None:
        if self._basis is not None:
            self._memo.basis = self._basis
        self._left, self._right = self._left.cpu(), self._right.cpu()
        self._all = None if self._all is None else self._all.cpu()

    def _payload(self, start: int, stop: int) -> torch.Tensor:
        if self._all is not None:
            return concatenated_bytes([self._all[start:stop]])
        row, before = divmod(start, self._columns)
        left = self._left[row : -(-stop // self._columns)]
        if _bytes(len(left), self._columns, self._codec.rank) < 4 * (stop - start):
            head = torch.tensor([self._columns, self._codec.rank, before], dtype=torch.int32, device="cpu")
            return concatenated_bytes([head, left, self._right])
        step = _rows(self._columns)
        products = [_product(left[i : i + step], self._right).clone() for i in range(0, len(left), step)]
        return concatenated_bytes([torch.cat(products)[before : before + stop - start]])


def _bytes(rows: int, columns: int, rank: int) -> int:
    return _HEAD + 4 * rank * (rows + columns)


def _rows(columns: int) -> int:
    return max(1, CHUNK // columns)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of ``left``, rows of the left factor, and ``right``, flat; valid until the next call."""
    shape = (left.shape[0], right.shape[1])
    total = scratch("decoded", left, shape[0] * shape[1]).view(shape)
    torch.mul(left[:, :1], right[0], out=total)
    for i in range(1, right.shape[0]):
        term = scratch("term", total).view(shape)
        total.add_(torch.mul(left[:, i : i + 1], right[i], out=term))
    return total.view(-1)
