"""Payloads of some of the elements."""

from __future__ import annotations

import torch
from coded import in_parts

from kvstore.codecs import Compressor, parse


def test_a_segment_of_which_half_is_sent_costs_no_more_than_all_of_it() -> None:
    values = torch.zeros(1000)
    values[:300] = 1.0
    compression = parse({"type": "threshold", "threshold": 0.5})
    encoded = Compressor(compression).encode("w", values)
    assert [encoded.payload(0, 600).numel(), encoded.payload(0, 601).numel()] == [2400, 2400]
    assert [encoded.payload(0, 602).numel(), encoded.payload(300, 1000).numel()] == [2400, 0]
    assert torch.equal(in_parts(compression, encoded, [100, 299, 600, 601]), values)
