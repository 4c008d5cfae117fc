"""The payloads of a message, checked: what decodes each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstore.codecs.base import Opened
from kvstore.codecs.options import Compression
from kvstore.codecs.table import opened
from kvstore.errors import WireError
from kvstore.values import from_buffer
from kvstore.wire import Push, Values, tear


def opened_each(compression: Compression, message: Push | Values, sizes: Sequence[int]) -> list[tuple[int, Opened]]:
    """Return the elements that each of a message's payloads has, and what decodes it.

    Args:
        compression: how they were encoded.
        message: checked as far as messages are.
        sizes: the elements of each segment that it is about.

    Raises:
        WireError: they are no such payloads.
    """
    spans = message.spans or [1] * len(message.lengths)
    if sum(spans) != len(sizes) or len(spans) != len(message.lengths):
        raise WireError(f"{len(message.lengths)} payloads of {sum(spans)} segments, where there are {len(sizes)}")
    ends = itertools.accumulate(spans)
    totals = [sum(sizes[end - count : end]) for end, count in zip(ends, spans, strict=True)]
    payloads = tear(message.buffers, message.lengths)
    return [
        (total, opened(compression, from_buffer(payload, "uint8"), total))
        for total, payload in zip(totals, payloads, strict=True)
    ]
