"""A setting in one word."""

from __future__ import annotations

import pytest
from cifar.settings import parse_setting


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("fp16", ("fp16", {})),
        ("topk:ratio=0.05,k=3", ("topk", {"ratio": 0.05, "k": 3})),
        ("int8:stochastic=True,pull=bf16", ("int8", {"stochastic": True, "pull": "bf16"})),
    ],
)
def test_a_setting_is_a_name_and_what_is_set(text, parsed):
    assert parse_setting(text) == parsed
