"""What a core spends on messages."""

from __future__ import annotations

import pytest

from benchmarks.cores import Core, Step, median_us
from benchmarks.networks import elements, shapes_of
from kvstore import wire


def test_a_core_is_measured_message_by_message() -> None:
    heard = []

    def handle(peer: bytes, message: object) -> list[tuple[bytes, wire.Alive]]:
        heard.append((peer, message))
        return [(peer, wire.Alive())] * 2

    core = Core("scheduler", handle)
    beat = wire.Beat(wire.Node("worker", 3, 1))
    step = core.take("beats", [(b"one", beat), (b"two", beat)])
    assert heard == [(b"one", beat), (b"two", beat)], "as they arrive at the other end"
    assert (step.role, step.name, len(step.each), step.sent) == ("scheduler", "beats", 2, 4)
    assert min(step.each) > 0
    assert core.last == [(b"two", wire.Alive())] * 2
    assert (step.received_bytes > 2, step.sent_bytes > 4) == (True, True)


def test_the_median_is_over_all_messages() -> None:
    steps = [Step("server", "a round", [each], [0.0], [0.0]) for each in (1.0, 2.0, 30.0)]
    assert median_us(steps) == 2.0


def test_nothing_sent_is_nothing_encoded() -> None:
    core = Core("server", lambda peer, message: [])
    assert core.take("answers", [(b"", wire.Ack(1))]).sent_bytes == 0


def test_a_step_adds_up() -> None:
    step = Step("server", "a round", [1.0, 2.0], [3.0, 4.0], [5.0, 6.0], 2)
    assert step.each == [9.0, 12.0]
    assert (step.decisions_s, step.all_s) == (7e-6, pytest.approx(21e-6))
    assert "2 messages in, 2 out" in step.words


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
        ValueError,
        match=f"no network '{name}'; choose from resnet50, vgg16, small, many, tiny, decoder, small-decoder, or a size",
    ):
        shapes_of(name)
