"""``check_finite``: which worker has contributed NaN or infinite values, and to which key. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.errors import NotFinite
from kvstore.values import PayloadRange, all_finite
from servers.store.bucket import Bucket, Contribution


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
        f"push {items[0].clock} of {keys}: each worker's values are finite, their sum is not in {bucket.dtype}; "
        "its segment has not been updated"
    )


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
