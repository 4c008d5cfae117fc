"""The payloads of a message: which elements each is of, and messages that do not fit their segments."""

from __future__ import annotations

import pytest
import torch

from kvstore import wire
from kvstore.codecs import Compressor, parse
from kvstore.codecs.table import check_payloads
from kvstore.errors import WireError
from kvstore.values import to_buffer

FP16 = parse({"type": "fp16"})
SIZES = [3, 0, 4]
VALUES = torch.arange(7, dtype=torch.float32)


def message(counts: list[int], sizes: list[int]) -> wire.Values:
    """A reply with payloads of so many elements each, which are of so many segments."""
    encoded, payloads, start = Compressor(FP16).encode("w", VALUES), [], 0
    for size in sizes:
        payloads.append(to_buffer(encoded.payload(start, start + size)))
        start += size
    lengths = [payload.nbytes for payload in payloads]
    return wire.Values(1, lengths=lengths, segment_counts=counts, buffers=wire.pack_arrays(payloads))


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [([], [3, 0, 4]), ([1, 1, 1], [3, 0, 4]), ([3], [7]), ([2, 1], [3, 4]), ([1, 2], [3, 4])],
    ids=str,
)
def test_each_payload_has_the_elements_of_its_segments(counts: list[int], sizes: list[int]) -> None:
    checked = check_payloads(FP16, message(counts, sizes), SIZES)
    assert [size for size, _ in checked] == sizes
    out = torch.empty(7)
    for (_, payload), part in zip(checked, out.split(sizes), strict=True):
        payload.write(part, False)
    assert torch.equal(out, VALUES)


@pytest.mark.parametrize(
    ("counts", "sizes", "words"),
    [
        ([2], [7], "1 payloads of 2 segments, where there are 3"),
        ([4], [7], "1 payloads of 4 segments"),
        ([], [7], "1 payloads of 1 segments"),
        ([2, 1], [7], "1 payloads of 3 segments"),
        ([1, 2], [4, 3], "a payload of 8 bytes where 3 elements have 6"),
    ],
)
def test_payloads_of_other_segments_are_refused(counts: list[int], sizes: list[int], words: str) -> None:
    with pytest.raises(WireError, match=words):
        check_payloads(FP16, message(counts, sizes), SIZES)


def test_frames_that_are_missing_are_refused() -> None:
    cut = message([3], [7])
    with pytest.raises(WireError, match="expected 1 frames"):
        check_payloads(FP16, wire.Values(1, lengths=cut.lengths, segment_counts=[3], buffers=[]), SIZES)
