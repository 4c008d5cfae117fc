"""The programs that are measured: what they say, time and count."""

from __future__ import annotations

import json
import random
import secrets
import socket

import numpy as np
import pytest
import torch

from benchmarks.models import build, pictures
from benchmarks.programs import stopwatch
from benchmarks.programs.servers import environment, megabytes
from benchmarks.programs.sockets import PIECE, pieces, raw, receive
from benchmarks.programs.steps import alone
from benchmarks.programs.stopwatch import WARM_UP, measured, parser, report, timed
from benchmarks.programs.stranger import KINDS, framed, listening
from kvstore.transport.sockets.stream import GREETING

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


@pytest.mark.parametrize("share", [1, PIECE, PIECE + 1, 3 * PIECE])
def test_the_pieces_of_a_share_are_all_of_it_in_order(share):
    cut = pieces(share)
    assert [piece.start for piece in cut] == list(range(0, share, PIECE))
    assert [piece.stop for piece in cut[:-1]] == [piece.start for piece in cut[1:]]
    assert cut[-1].stop == share


def test_reading_goes_on_until_the_buffer_is_full_or_the_other_end_is_gone():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        array = np.zeros(4, np.float32)
        sent = np.arange(4, dtype=np.float32)
        theirs.sendall(raw(sent)[:6])
        theirs.sendall(raw(sent)[6:])
        receive(ours, raw(array))
        assert array.tolist() == [0, 1, 2, 3]
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours, raw(array))


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


def test_figures_are_left_as_json(tmp_path):
    args = parser().parse_args(["--report", str(tmp_path / "r"), "--rounds", "4"])
    report(args.report, times=[1.0], rank=args.rounds)
    assert json.loads((tmp_path / "r").read_text()) == {"times": [1.0], "rank": 4}
