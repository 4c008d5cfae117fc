"""What strangers say, and whom they attack."""

from __future__ import annotations

import random
import secrets

import pytest

from benchmarks.programs.stranger import KINDS, framed, listening
from kvstore.transport.sockets.stream import GREETING


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stranger_says_depends_on_its_seed_alone(kind):
    said = [KINDS[kind](random.Random(seed)) for seed in range(8)]
    assert said == [KINDS[kind](random.Random(seed)) for seed in range(8)]
    assert any(message.startswith(GREETING) for message in said)


def test_frames_are_those_of_our_sockets():
    assert framed(b"ab", b"c").endswith(b"c")
    assert len(framed(b"ab")) > 2


def test_jobs_without_the_mark_are_left_alone():
    assert listening(secrets.token_hex(8)) == []
