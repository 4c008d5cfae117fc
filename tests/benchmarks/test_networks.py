"""The arrays of networks by name."""

from __future__ import annotations

import pytest

from benchmarks.networks import elements, shapes_of


@pytest.mark.parametrize(
    ("name", "arrays", "numbers"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("small", 2000, 256_000),
        ("many", 100_000, 200_000),
        ("tiny", 1, 256),
        ("40MB", 1, 10_000_000),
        ("1KB", 1, 250),
        ("1GB", 1, 250_000_000),
        ("1B", 1, 1),
    ],
)
def test_shapes(name, arrays, numbers):
    shapes = shapes_of(name)
    assert (len(shapes), elements(shapes)) == (arrays, numbers)


@pytest.mark.parametrize("name", ["resnet", "40", "MB", "4TB", "-1MB"])
def test_an_unknown_network_is_told_those_there_are(name):
    with pytest.raises(
        ValueError, match=f"no network '{name}'; choose from resnet50, vgg16, small, many, tiny, or a size"
    ):
        shapes_of(name)
