"""What create() takes for distributed stores: a rule, a deadline and a bound, or an error that says what is valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.store_options import SSP_STALENESS, parse
from kvstore.errors import UnknownName, UsageError
from kvstore.rule import Rule


@pytest.mark.parametrize(
    ("canonical", "options", "rule"),
    [
        ("dist_sync", {}, Rule()),
        ("dist_sync", {"quorum": 3, "late": "keep"}, Rule(quorum=3, late="keep")),
        ("dist_device_sync", {"quorum": 1.0}, Rule(quorum=1)),
        ("dist_async", {"delay_compensation": 0.04}, Rule("async", compensation=0.04)),
        ("dist_async", {"aggregate": "host"}, Rule("async", aggregate="host")),
        ("dist_ssp", {"aggregate": "rounds"}, Rule("async", staleness=3)),
        ("dist_ssp", {}, Rule("async", staleness=3)),
        ("dist_ssp", {"staleness": 0}, Rule("async", staleness=0)),
        ("dist_ssp", {"staleness": np.int64(2)}, Rule("async", staleness=2)),
        ("dist_sync", {"quorum": torch.tensor(3), "check_finite": np.True_}, Rule(quorum=3, finite=True)),
    ],
)
def test_options_make_a_rule(canonical: str, options: dict[str, Any], rule: Rule) -> None:
    assert parse(canonical, canonical, options)[0] == rule


@pytest.mark.parametrize(
    ("canonical", "options", "error", "words"),
    [
        ("dist_sync", {"staleness": 3}, UnknownName, "no option 'staleness'; choose from timeout, bigarray_bound"),
        ("dist_async", {"quorum": 3}, UnknownName, "delay_compensation"),
        ("dist_ssp", {"staleness": -1}, UsageError, "staleness=-1 must be an integer, at least 0"),
        ("dist_ssp", {"staleness": 1.5}, UsageError, "an integer"),
        ("dist_sync", {"quorum": 0}, UsageError, "quorum=0"),
        ("dist_sync", {"late": "never"}, UsageError, "late='never' must be one of drop, keep"),
        ("dist_async", {"delay_compensation": -1}, UsageError, "at least 0"),
        ("dist_async", {"aggregate": "rack"}, UsageError, "aggregate='rack' must be one of rounds, host"),
        ("dist_sync", {"aggregate": "host"}, UnknownName, "no option 'aggregate'"),
        ("dist_ssp", {"aggregate": "host", "delay_compensation": 0.1}, UsageError, "sums them before that"),
    ],
)
def test_options_that_make_no_sense(
    canonical: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse(canonical, canonical, options)


def test_the_deadline_and_the_bound_are_the_jobs_unless_they_are_given() -> None:
    assert parse("dist_sync", "dist_sync", {})[1:] == (None, None)
    assert parse("dist_sync", "dist_sync", {"timeout": 2, "bigarray_bound": 1e6})[1:] == (2.0, 1_000_000)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"bigarray_bound": 0}, {"bigarray_bound": 1.5}])
def test_deadlines_and_bounds_have_a_least_value(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=f"{name}=.* must be .*at least"):
        parse("dist_sync", "dist_sync", options)


def test_a_bounded_store_has_a_bound_if_none_is_given() -> None:
    assert parse("dist_ssp", "dist_ssp", {"staleness": None})[0].staleness == SSP_STALENESS
    assert parse("dist_async", "dist_async", {})[0].staleness is None


@pytest.mark.parametrize("canonical", ["dist_sync", "dist_device_sync", "dist_async", "dist_ssp"])
def test_every_store_can_check_that_values_are_finite(canonical: str) -> None:
    assert parse(canonical, canonical, {"check_finite": True})[0].finite
