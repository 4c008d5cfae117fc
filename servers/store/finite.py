"""``check_finite``: which worker has contributed NaN or infinite values, and to which key. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.errors import NotFinite
from kvstore.spec import Key
from kvstore.values import PayloadRange, all_finite
from servers.store.row_target import RowContribution
from servers.store.target import Bucket, Contribution


def require_finite(bucket: Bucket, items: Sequence[Contribution], total: torch.Tensor) -> None:
    """Raise ``NotFinite``, with worker, key and push, unless ``total``, the sum of ``items``, is finite.

    While all is well only the sum is read: that is one pass over memory that has just been written.
    """
    if all_finite(total):
        return
    for item in items:
        for part in item.ranges:
            key = _key_of(bucket, part)
            if key is not None:
                raise NotFinite(
                    f"push {item.clock} of {key!r} by {item.who} has NaN or infinite elements; "
                    "its segment has not been updated"
                )
    keys = ", ".join(repr(key) for key in dict.fromkeys(bucket.segments.keys[:3]))
    raise NotFinite(
        f"push {items[0].clock} of {keys}: each worker's values are finite, their sum is not in {_dtype(total)}; "
        "its segment has not been updated"
    )


def not_finite_rows(key: Key, items: Sequence[RowContribution]) -> NotFinite:
    """Return the error, with key, row, worker and push, for a sum of ``items`` that is not finite."""
    for item in items:
        finite = np.isfinite(item.rows).all(axis=1)
        if not finite.all():
            position = int(np.flatnonzero(~finite)[0])
            return NotFinite(
                f"push {item.clock} of {key!r} by {item.who} has NaN or infinite elements in row {item.ids[position]} "
                f"(position {position}); no row of this update has been changed"
            )
    return NotFinite(
        f"push {items[0].clock} of {key!r}: each worker's rows are finite, their sum is not in {items[0].rows.dtype}; "
        "no row of this update has been changed"
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _key_of(bucket: Bucket, part: PayloadRange) -> int | str | None:
    """Return the key of the first segment with elements in ``part`` that are not finite; None if all are."""
    values = part.values
    if all_finite(values):
        return None
    for key, start, size in zip(bucket.segments.keys, bucket.starts, bucket.sizes, strict=True):
        first, last = max(start, part.start), min(start + size, part.stop)
        if first < last and not all_finite(values[first - part.start : last - part.start]):
            return key
    return None
