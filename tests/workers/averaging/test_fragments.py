"""Which layers are synchronized together, and after which steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import kvstore as kv
from workers.averaging.diloco import Schedule, layer_of, split


def times(schedule: Schedule, steps: int) -> tuple[list[list[int]], list[list[int]]]:
    """After which steps each fragment leaves, and arrives."""
    leaving: list[list[int]] = [[] for _ in range(schedule.fragments)]
    arriving: list[list[int]] = [[] for _ in range(schedule.fragments)]
    for step in range(1, steps + 1):
        for number in schedule.leaving(step):
            leaving[number].append(step)
        for number in schedule.arriving(step):
            arriving[number].append(step)
    return leaving, arriving


def test_one_fragment_is_due_at_the_end_of_each_period() -> None:
    assert times(Schedule(5), 16) == ([[5, 10, 15]], [[5, 10, 15]])


def test_fragments_take_turns_and_travel() -> None:
    leaving, arriving = times(Schedule(10, 3, 4), 30)
    assert leaving == [[3, 13, 23], [6, 16, 26], [10, 20, 30]]
    assert arriving == [[7, 17, 27], [10, 20, 30], [14, 24]]


@pytest.mark.parametrize(("inner_steps", "fragments", "overlap"), [(1, 1, 0), (7, 7, 6), (8, 3, 7), (100, 7, 13)])
def test_every_fragment_leaves_once_in_a_period_and_arrives_before_it_leaves_again(
    inner_steps: int, fragments: int, overlap: int
) -> None:
    leaving, arriving = times(Schedule(inner_steps, fragments, overlap), 3 * inner_steps)
    for left, came in zip(leaving, arriving, strict=True):
        assert len(left) == 3
        assert 1 <= left[0] <= inner_steps
        assert [later - earlier for earlier, later in pairwise(left)] == [inner_steps] * 2
        assert came == [step + overlap for step in left if step + overlap <= 3 * inner_steps]
    assert len({steps[0] for steps in leaving}) == fragments, "two fragments never leave after the same step"


def test_a_schedule_that_cannot_be() -> None:
    with pytest.raises(kv.UsageError, match="fragments=4 must be at most inner_steps=3"):
        Schedule(3, 4)
    with pytest.raises(kv.UsageError, match="overlap=3 must be less than inner_steps=3"):
        Schedule(3, 1, 3)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attention.weight", "blocks.3"),
        ("encoder.layers.0.1.bias", "encoder.layers.0"),
        ("fc.weight", "fc"),
        ("0.weight", "0"),
        ("weight", ""),
        ("7", ""),
    ],
)
def test_the_layer_of_a_parameter(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_layers_of_equal_size_are_dealt_out() -> None:
    params = {f"blocks.{layer}.{name}": torch.empty(4) for layer in range(5) for name in ("weight", "bias")}
    blocks = [[f"blocks.{layer}.weight", f"blocks.{layer}.bias"] for layer in range(5)]
    assert split(params, 2) == [blocks[0] + blocks[2] + blocks[4], blocks[1] + blocks[3]]
    assert split(params, 1) == [list(params)]


def test_a_large_layer_has_a_fragment_for_itself() -> None:
    sizes = {"embedding.weight": 100, "blocks.0.weight": 30, "blocks.1.weight": 30, "blocks.2.weight": 30, "none.w": 0}
    params = {name: torch.empty(size) for name, size in sizes.items()}
    assert split(params, 2) == [["embedding.weight"], ["blocks.0.weight", "blocks.1.weight", "blocks.2.weight"]]


def test_more_fragments_than_layers() -> None:
    with pytest.raises(kv.UsageError, match=r"fragments=3 must be at most the number of layers .* which is 2"):
        split({"a.weight": torch.empty(2), "a.bias": torch.empty(2), "b.weight": torch.empty(2)}, 3)
