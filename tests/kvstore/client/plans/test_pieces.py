"""Pieces: small where a store is small, and never beyond what was asked for."""

from __future__ import annotations

import pytest

from kvstore.client.plans import PARTS, Pieces


@pytest.mark.parametrize(
    ("nbytes", "piece"),
    [
        (0, 160),
        (4 * PARTS * 160, 160),
        (4 * PARTS * 200, 200),
        (4 * PARTS * 640, 640),
        (10**9, 640),
    ],
)
def test_each_server_has_so_many_pieces_of_a_small_store(nbytes: int, piece: int) -> None:
    assert Pieces(640, 160, 4).of(nbytes) == piece


@pytest.mark.parametrize("pieces", [Pieces(640), Pieces(640, 0, 4), Pieces(640, 1000, 4)])
@pytest.mark.parametrize("nbytes", [0, 10**9])
def test_without_a_least_size_all_stores_are_alike(pieces: Pieces, nbytes: int) -> None:
    assert pieces.of(nbytes) == 640
