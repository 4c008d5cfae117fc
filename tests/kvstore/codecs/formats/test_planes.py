"""Payloads of planes, by a codec of this test: blocks of four elements that share a sum, which is easy to check."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvstore.codecs.base import Memo, Noise
from kvstore.codecs.quantization import Plane, PlaneCodec
from kvstore.errors import WireError

SIZE = 10


class Blocks(PlaneCodec):
    """Each element as int16; each block's number of elements as int32, for ``check_planes`` to look at."""

    planes = (Plane(torch.int32, 4), Plane(torch.int16, 1))

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        sizes, codes = planes
        sizes.copy_(torch.tensor([min(4, values.numel() - start) for start in range(0, values.numel(), 4)]))
        codes.copy_(values)
        return int((values > 8).sum())

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(planes[1][: out.numel()])

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        if bool((planes[0] > 4).any()):
            raise WireError("a block of more than 4")


def encoded(values: torch.Tensor):  # type: ignore[no-untyped-def]
    made = Blocks().begin(values.shape, values.device, Memo("w", torch.zeros(values.numel())))
    made.put(0, values)
    made.finish()
    return made


VALUES = torch.arange(SIZE, dtype=torch.float32)


def test_a_plane_has_an_item_for_each_block_that_has_begun() -> None:
    plane = Plane(torch.int32, 4)
    assert [plane.items(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("start", range(SIZE))
@pytest.mark.parametrize("length", [1, 2, 5, SIZE])
def test_any_range_is_decoded_added_and_spread(start: int, length: int) -> None:
    stop = min(SIZE, start + length)
    checked = Blocks().check(encoded(VALUES).payload(start, stop), stop - start)
    out = torch.full((stop - start,), 100.0)
    checked.write(out, True)
    assert out.tolist() == [100.0 + number for number in range(start, stop)]
    checked.write(out, False)
    assert torch.equal(out, VALUES[start:stop])
    targets = [torch.empty(size) for size in (min(1, stop - start), max(0, stop - start - 1))]
    checked.spread(targets)
    assert torch.equal(torch.cat(targets), VALUES[start:stop])


def test_a_payload_is_the_items_of_its_blocks_and_where_it_begins() -> None:
    made = encoded(VALUES)
    assert made.nbytes == made.payload(0, SIZE).numel() == 3 * 4 + SIZE * 2 + 1
    assert made.payload(5, 7).numel() == 4 + 3 * 2 + 1, "one block, from its first element on"
    assert int(made.payload(5, 7)[-1]) == 1
    assert made.clipped == 1


@pytest.mark.parametrize(
    ("change", "words"), [({-1: 4}, "4 elements into a block of 4"), ({-1: 1}, "a payload of"), ({0: 5}, "more than 4")]
)
def test_what_does_not_fit_is_refused(change: dict[int, int], words: str) -> None:
    payload = encoded(VALUES).payload(0, 8).clone()
    for place, value in change.items():
        payload[place] = value
    with pytest.raises(WireError, match=words):
        Blocks().check(payload, 8)
