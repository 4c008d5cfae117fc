"""Which server holds which part: every element once, evenly, and the same whatever the order of the calls' keys."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs import quantization
from kvstore.errors import UsageError
from kvstore.job.config import Config
from kvstore.optim.fused import LANE
from kvstore.placement import BLOCK, WHOLE, place, split
from kvstore.spec import MAX_ELEMENTS, MAX_SEGMENTS, Spec

keys = st.integers(-5, 10**6) | st.text(min_size=1, max_size=5)
specs = st.dictionaries(
    keys,
    st.builds(
        lambda shape, dtype: Spec(tuple(shape), dtype),
        st.lists(st.integers(0, 60), max_size=3),
        st.sampled_from(["float16", "float32", "int64"]),
    ),
    max_size=12,
)
servers = st.integers(1, 8)


def test_no_cut_is_within_a_vector_or_a_block_of_int8() -> None:
    assert BLOCK % LANE == 0
    assert BLOCK % quantization.BLOCK == 0


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_split_is_exact_and_even(size: int, parts: int) -> None:
    ranges = split(size, parts)
    assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]]
    assert ranges[-1][1] == size
    assert {start % BLOCK for start, _ in ranges} == {0}
    blocks = [-(-(stop - start) // BLOCK) for start, stop in ranges]
    assert len(blocks) == max(1, min(parts, sum(blocks)))
    assert max(blocks) - min(blocks) <= 1


@given(specs, servers, st.integers(1, 2000), st.integers(1, 1 << 14) | st.just(WHOLE))
def test_every_element_is_on_one_server(specs: dict[int | str, Spec], servers: int, bound: int, longest: int) -> None:
    loads = [0] * servers
    placed = place(specs, loads, bound, longest)
    assert placed.keys() == specs.keys()
    held = [0] * servers
    for key, segments in placed.items():
        assert segments[0].start == 0
        assert segments[-1].stop == specs[key].size
        for before, after in itertools.pairwise(segments):
            assert before.stop == after.start
        on = [segment.server for segment in segments]
        assert on == sorted(on)
        if len(set(on)) > 1:
            assert specs[key].size >= bound
        if servers > 1 and specs[key].size >= bound:
            assert len(set(on)) == min(servers, -(-specs[key].size // BLOCK)) or not specs[key].size
        for segment in segments:
            size = segment.stop - segment.start
            assert segment.start % BLOCK == 0
            assert size > 0 or not specs[key].size
            assert size <= BLOCK or size * specs[key].itemsize <= longest
            held[segment.server] += (segment.stop - segment.start) * specs[key].itemsize
    assert held == loads


@given(specs, servers, st.integers(1, 2000), st.randoms(use_true_random=False))
def test_the_order_of_listing_does_not_matter(
    specs: dict[int | str, Spec], servers: int, bound: int, rng: random.Random
) -> None:
    shuffled = list(specs.items())
    rng.shuffle(shuffled)
    assert place(specs, [0] * servers, bound) == place(dict(shuffled), [0] * servers, bound)


@given(specs, st.integers(1, 2000))
def test_one_server_holds_everything_whole(specs: dict[int | str, Spec], bound: int) -> None:
    assert all(len(segments) == 1 for segments in place(specs, [0], bound).values())


def test_the_bound_is_the_first_size_that_is_cut() -> None:
    specs = {"below": Spec((999,), "float32"), "at": Spec((1000,), "float32")}
    placed = place(specs, [0, 0], 1000)
    assert {key: len(segments) for key, segments in placed.items()} == {"below": 1, "at": 2}


def test_an_array_of_one_block_is_too_small_to_be_cut() -> None:
    placed = place({"one": Spec((BLOCK,), "int8"), "more": Spec((BLOCK + 1,), "int8")}, [0, 0], 1)
    assert {key: len(segments) for key, segments in placed.items()} == {"one": 1, "more": 2}


def test_the_blocks_of_short_arrays_go_where_the_least_is() -> None:
    loads = [0] * 512
    place({key: Spec((3 * BLOCK + 1,), "float32") for key in range(1000)}, loads, 1000)
    blocks = [-(-load // (4 * BLOCK)) for load in loads]
    assert max(blocks) - min(blocks) <= 3, "on average a server has some eight, of which two may be of one element"


def test_what_servers_hold_already_counts() -> None:
    loads = [1000, 0, 500]
    assert place({"w": Spec((10,), "float32")}, loads, 100)["w"][0].server == 1
    assert loads == [1000, 40, 500]


@given(
    st.lists(st.integers(0, MAX_ELEMENTS), min_size=1, max_size=4),
    st.integers(1, 1000),
    st.integers(1, 2**62),
    st.integers(1, 2**62) | st.integers(1, 1 << 40),
)
@settings(deadline=None, max_examples=30)
def test_whatever_is_asked_for_there_are_few_segments_or_none(sizes: list[int], servers: int, bound: int, longest: int):
    loads = [0] * servers
    specs: dict[int | str, Spec] = {i: Spec((size,), "float32") for i, size in enumerate(sizes)}
    placed = None
    with suppress(UsageError):
        placed = place(specs, loads, bound, longest)
    if placed is None:
        assert not any(loads), "nothing is placed"
        assert sum(size // max(BLOCK, longest // 4 // BLOCK * BLOCK) + servers for size in sizes) > MAX_SEGMENTS
    else:
        assert sum(map(len, placed.values())) <= MAX_SEGMENTS
        assert sum(loads) == sum(spec.nbytes for spec in specs.values())


def test_as_many_segments_as_there_may_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.placement.MAX_SEGMENTS", 300)
    most = Spec((300 * BLOCK,), "float32")
    placed = place({"w": most}, [0, 0], 1000, 4)
    assert len(placed["w"]) == 300
    with pytest.raises(UsageError, match=r"300 of them of key 'w', .* or init fewer keys at once"):
        place({"b": Spec((1,), "float32"), "w": most}, [0, 0], 1000, 4)


def resnet50() -> dict[int | str, Spec]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    shapes += [(1000, 2048), (1000,)]
    return {i: Spec(shape, "float32") for i, shape in enumerate(shapes)}


def vgg16() -> dict[int | str, Spec]:
    widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convs = [(out, into, 3, 3) for into, out in zip([3, *widths], widths, strict=False)]
    linears = [(4096, 25088), (4096, 4096), (1000, 4096)]
    shapes = [shape for weight in (*convs, *linears) for shape in (weight, weight[:1])]
    return {f"layer{i}": Spec(shape, "float32") for i, shape in enumerate(shapes)}


def small_keys() -> dict[int | str, Spec]:
    rng = random.Random(1)
    return {i: Spec((rng.randint(1, 5000),), "float32") for i in range(2000)}


@pytest.mark.parametrize("servers", range(1, 9))
@pytest.mark.parametrize("model", [resnet50, vgg16, small_keys])
def test_servers_hold_the_same_within_five_percent(model: object, servers: int) -> None:
    loads = [0] * servers
    specs = model()  # type: ignore[operator]
    place(specs, loads, Config.bigarray_bound)
    mean = sum(spec.nbytes for spec in specs.values()) / servers
    assert max(loads) <= 1.05 * mean
    assert min(loads) >= 0.95 * mean


def test_resnet50_is_resnet50() -> None:
    assert sum(spec.size for spec in resnet50().values()) == 25_557_032
    assert sum(spec.size for spec in vgg16().values()) == 138_357_544
