"""How compression is described: what is wrong is said, with what would be right; what is right travels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from coded import COMPRESSIONS, NAMES

from kvstore.codecs import CLOSE, Compression, names, parse
from kvstore.codecs.options import described, travelling
from kvstore.errors import UnknownName, UsageError


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_a_description_travels(compression: Compression) -> None:
    assert parse(compression.options()) == compression


def test_every_type_has_defaults() -> None:
    for name in names():
        compression = parse({"type": name})
        assert compression.type == name
        assert compression.pull is None
    assert set(names()) >= CLOSE
    assert parse({"type": "2bit"}).number("threshold") == 0.5
    assert parse({"type": "topk"}).number("ratio") == 0.01
    assert parse({"type": "topk", "k": 3}).number("ratio") is None


def test_numbers_may_be_numpy_s() -> None:
    assert parse({"type": "2bit", "threshold": np.float32(0.5)}) == parse({"type": "2bit", "threshold": 0.5})
    assert parse({"type": "topk", "k": np.int64(3)}) == parse({"type": "topk", "k": 3})


def test_the_way_back_is_a_type_or_options() -> None:
    short = parse({"type": "2bit", "pull": "fp16"})
    assert short.pull == parse({"type": "fp16"})
    assert short == parse({"type": "2bit", "pull": {"type": "fp16"}})
    assert parse(short.options()) == short
    both = parse({"type": "topk", "k": 9, "pull": {"type": "topk", "ratio": 0.5}})
    assert both.pull is not None
    assert both.pull.number("ratio") == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": "3bit"}, "choose from 1bit, 2bit, bf16, fp16, int8, powersgd, randomk, threshold, topk"),
        ({"type": 2}, "choose from 1bit"),
        ({"type": ["2bit"]}, "choose from 1bit"),
        ({"type": "2bit", "treshold": 0.5}, "choose from pull, threshold, type"),
        ({"type": "fp16", "threshold": 0.5}, "choose from pull, type"),
        ({"type": "2bit", "pull": "half"}, "no compression 'half'"),
    ],
)
def test_unknown_names_are_answered_with_the_known(options: dict[str, object], said: str) -> None:
    with pytest.raises(UnknownName, match=said):
        parse(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a 'type'"),
        ({"compression": "2bit"}, "needs a 'type'"),
        ({"type": "2bit", "threshold": 0}, "threshold=0 must be a number from"),
        ({"type": "2bit", "threshold": -1.0}, "threshold"),
        ({"type": "2bit", "threshold": "0.5"}, "threshold='0.5'"),
        ({"type": "2bit", "threshold": True}, "threshold=True"),
        ({"type": "1bit", "threshold": math.nan}, "threshold=nan"),
        ({"type": "1bit", "threshold": math.inf}, "threshold=inf"),
        ({"type": "threshold", "threshold": 0.0}, "threshold"),
        ({"type": "topk", "ratio": 0.0}, "ratio"),
        ({"type": "topk", "ratio": 1.5}, "ratio"),
        ({"type": "topk", "k": 0}, "k=0 must be an integer from 1"),
        ({"type": "topk", "k": 2.0}, "k=2.0 must be an integer"),
        ({"type": "randomk", "k": 2, "ratio": 0.5}, "give ratio or k, not both"),
        ({"type": "topk", "momentum": 1.0}, "momentum"),
        ({"type": "topk", "warmup_steps": -1}, "warmup_steps"),
        ({"type": "int8", "stochastic": 1}, "stochastic=1 must be True or False"),
        ({"type": "int8", "seed": 2**32}, "seed"),
        ({"type": "powersgd", "rank": 0}, "rank"),
        ({"type": "powersgd", "rank": 10**9}, "rank"),
        ({"type": "fp16", "pull": 16}, "compression must be a dict"),
        ({"type": "fp16", "pull": {"type": "fp16", "pull": "fp16"}}, "the way back alone"),
        ("2bit", "compression must be a dict"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(options)


def test_a_threshold_of_one_worker_in_the_sum_of_several() -> None:
    assert parse({"type": "2bit", "threshold": 0.5}).of_sum(3) == parse({"type": "2bit", "threshold": 1.5})
    assert parse({"type": "threshold", "threshold": 2.0**126}).of_sum(3).number("threshold") == 2.0**126
    for options in ({"type": "1bit", "threshold": 0.5}, {"type": "topk", "k": 3}, {"type": "fp16"}):
        assert parse(options).of_sum(3) == parse(options)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_it_arrives_as_it_was(compression: Compression) -> None:
    assert described(travelling(compression)) == compression
    assert described(travelling(replace(compression, pull=parse({"type": "fp16"})))) == compression, "one way each"


def test_none_is_none() -> None:
    assert travelling(None) is None
    assert described(None) is None


def test_what_is_none_is_refused() -> None:
    with pytest.raises(UnknownName, match="3bit"):
        described(["3bit", []])
    with pytest.raises(UsageError, match="threshold"):
        described(["2bit", [["threshold", -1.0]]])
