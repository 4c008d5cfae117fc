"""The payloads of a message, checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstore import wire
from kvstore.codecs.base import CheckedPayload
from kvstore.codecs.options import Compression
from kvstore.codecs.table import check_payload
from kvstore.errors import WireError
from kvstore.values import from_buffer


def check_payloads(
    compression: Compression, message: wire.Push | wire.Values, sizes: Sequence[int]
) -> list[tuple[int, CheckedPayload]]:
    """Return the payloads of a message, each with the number of its elements.

    Args:
        compression: how they were encoded.
        message: its fields have passed their checks.
        sizes: how many elements each segment has that the message is about.

    Raises:
        WireError: the payloads are not those of these segments.
    """
    counts = message.segment_counts or [1] * len(message.lengths)
    if sum(counts) != len(sizes) or len(counts) != len(message.lengths):
        raise WireError(f"{len(message.lengths)} payloads of {sum(counts)} segments, where there are {len(sizes)}")
    ends = itertools.accumulate(counts)
    totals = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    payloads = wire.unpack_arrays(message.buffers, message.lengths)
    return [
        (total, check_payload(compression, from_buffer(payload, "uint8"), total))
        for total, payload in zip(totals, payloads, strict=True)
    ]
