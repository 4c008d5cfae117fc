"""The programs that are measured: what they say, time and count."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import build, pictures
from benchmarks.programs import stopwatch
from benchmarks.programs.servers import environment, megabytes
from benchmarks.programs.sockets import PIECE, pieces
from benchmarks.programs.steps import alone
from benchmarks.programs.stopwatch import WARM_UP, measured, timed
from benchmarks.programs.stranger import framed

STATUS = "Name:\tpython\nVmRSS:\t  500000 kB\nRssAnon:\t  300000 kB\nRssFile:\t   80000 kB\nRssShmem:\t  120000 kB\n"


def test_the_kernels_words_are_read():
    assert megabytes(STATUS) == {"all": 512.0, "own": 307.2, "shared": 122.88, "files": 81.92}
    assert megabytes("Name:\tkthreadd\n") == {}
    assert environment("A=b=c\0DMLC_ROLE=server\0\0") == {"A": "b=c", "DMLC_ROLE": "server"}


def test_alone_a_step_trains_and_the_rank_is_0():
    torch.manual_seed(0)
    model = build("resnet8")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step, rank = alone(model)
    step(pictures(0))
    assert rank == 0
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_frames_are_those_of_our_sockets():
    assert framed(b"ab", b"c").endswith(b"c")
    assert len(framed(b"ab")) > 2


@pytest.mark.parametrize("share", [1, PIECE, PIECE + 1, 3 * PIECE])
def test_the_pieces_of_a_share_are_all_of_it_in_order(share):
    cut = pieces(share)
    assert [piece.start for piece in cut] == list(range(0, share, PIECE))
    assert [piece.stop for piece in cut[:-1]] == [piece.start for piece in cut[1:]]
    assert cut[-1].stop == share


def test_rounds_are_timed_without_what_comes_before_them(monkeypatch):
    now = 0.0
    log = []

    class Clock:
        @staticmethod
        def perf_counter():
            return now

    def before():
        nonlocal now
        log.append("before")
        now += 100.0

    def one_round():
        nonlocal now
        log.append("round")
        now += 0.25

    monkeypatch.setattr(stopwatch, "time", Clock)
    assert timed(one_round, 2, before, warm_up=1) == [250.0, 250.0]
    assert log == ["before", "round"] * 3


def test_what_a_host_sends_is_counted_after_the_warm_up(monkeypatch, tmp_path):
    counter = tmp_path / "tx_bytes"
    rounds = 0

    def one_round():
        nonlocal rounds
        rounds += 1
        counter.write_text(f"{1000 if rounds <= WARM_UP else 1000 + 50 * (rounds - WARM_UP)}\n")

    monkeypatch.setattr(stopwatch, "SENT", counter)
    figures = measured(one_round, 4)
    assert len(figures["times"]) == 4
    assert figures["sent"] == 50
    counter.unlink()
    assert measured(lambda: None, 1)["sent"] == 0
