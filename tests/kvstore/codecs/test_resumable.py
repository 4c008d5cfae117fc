"""An encoding that is interrupted anywhere: a repeated call goes on, to the same bits."""

from __future__ import annotations

import pytest
import torch
from coded import COMPRESSIONS, NAMES, same_bits, whole
from interrupting import interrupted

from kvstore.codecs import Compression, Compressor, Encoded, ResumableEncodings


def payload(encoded: Encoded) -> torch.Tensor:
    return encoded.payload(0, encoded.size)


def given(compressor: Compressor, encoded: Encoded) -> torch.Tensor:
    """What was to be sent, to six digits: what arrives and what is kept."""
    return (whole(compressor.compression, encoded) + compressor.state()[0]["residual.0"]).round(decimals=5)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_after_an_interrupt_at_any_line_the_same_is_sent_and_kept(compression: Compression) -> None:
    values = torch.randn(30, 40, generator=torch.Generator().manual_seed(1))
    clean = Compressor(compression)
    clean.encode("w", values)
    expected, after, came = clean.encode("w", values), 0, True
    while came:
        compressor = Compressor(compression)
        compressor.encode("w", values)
        resumable: ResumableEncodings = {}
        came = interrupted(
            lambda compressor=compressor, resumable=resumable: compressor.encode("w", values, resumable), after
        )
        encoded = compressor.encode("w", values, resumable)
        if not compression.number("stochastic"):  # which may draw again
            assert torch.equal(payload(encoded), payload(expected)), after
        assert compressor.encode("w", values, resumable) is encoded, "it is complete, and not made again"
        assert compressor.statistics() == clean.statistics()
        assert torch.equal(given(compressor, encoded), given(clean, expected)), after
        for name, tensor in compressor.state()[0].items() if not compression.number("stochastic") else ():
            assert same_bits(tensor.reshape(-1), clean.state()[0][name].reshape(-1)), (after, name)
        after += 1
    assert after > 1


def test_another_call_has_encodings_of_its_own() -> None:
    compressor = Compressor(COMPRESSIONS[2])
    values = torch.full((8,), 0.3)
    first = compressor.encode("w", values, {})
    second = compressor.encode("w", values, {})
    assert not torch.equal(payload(first), payload(second)), "what the first lacked is in the second"
