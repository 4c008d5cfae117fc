from __future__ import annotations

import colorsys

import pytest
import torch
from cifar.batches import seeded
from cifar.distort import affine, recolor


def pictures(count=4):
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=seeded(1))


def test_nothing_asked_for_changes_nothing():
    assert affine(pictures(), None).equal(pictures())
    assert (recolor(pictures(), None).int() - pictures().int()).abs().max() <= 1


@pytest.mark.parametrize("amount", [{"hue": 36}, {"saturation": 50}, {"lightness": 50}])
def test_colours_move_as_colorsys_says(amount, monkeypatch):
    """All random numbers are 1, so that every picture moves by the whole amount."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    by = amount.get("hue", 0) / 180, amount.get("lightness", 0) / 255, amount.get("saturation", 0) / 255
    colors = pictures(1)[:, :, :4, :4]
    shown = recolor(colors, None, **amount)
    for before, after in zip(colors.flatten(2)[0].T.tolist(), shown.flatten(2)[0].T.tolist(), strict=True):
        h, l, s = colorsys.rgb_to_hls(*(value / 255 for value in before))  # noqa: E741
        wanted = colorsys.hls_to_rgb((h + by[0]) % 1, min(1, l + by[1]), min(1, s + by[2]))
        assert after == pytest.approx([255 * value for value in wanted], abs=1)


def test_a_quarter_turn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    turned = affine(pictures(), None, angle=90)
    either = [pictures().rot90(times, (2, 3)) for times in (1, -1)]
    assert any((turned.int() - each.int()).abs().max() <= 1 for each in either)


def test_twice_the_size_shows_the_middle():
    corner = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    corner[:, :, 8:24, 8:24] = 200
    assert (affine(corner, None, scale=(2, 2)) > 0).float().mean() > 0.95
    assert (affine(corner, None, scale=(0.5, 0.5)) > 100).float().mean() == pytest.approx(1 / 16, abs=0.01)


def test_a_wider_aspect_is_as_much_lower(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    square = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    square[:, :, 8:24, 8:24] = 200
    shown = affine(square, None, aspect=0.25)[0, 0] > 100
    high, wide = shown.any(1).sum(), shown.any(0).sum()
    assert {int(high), int(wide)} == {14, 18}
