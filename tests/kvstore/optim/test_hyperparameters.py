"""The values of hyper-parameters: numbers of any library, and what the wire can carry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import UsageError
from kvstore.optim.hyperparameters import finite, is_number, plain, positive
from kvstore.wire.fields import MAX_HYPER_LIST, MAX_HYPER_TEXT


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array([2]), torch.tensor(2.0), torch.tensor([[2]])])
def test_numbers_of_any_library_become_pythons(value: Any) -> None:
    assert finite("x", value) == 2
    assert type(finite("x", value)) in (int, float)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "2", None, True, [2], np.ones(2), 10**400, torch.tensor(True), torch.ones((), device="meta")],
)
def test_what_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match="momentum="):
        finite("momentum", value)


def test_integers_that_the_wire_has_no_room_for_become_floats() -> None:
    assert isinstance(finite("x", 2**63 - 1), int)
    assert isinstance(finite("x", 2**63), float)


@pytest.mark.parametrize("value", [0, -1.5])
def test_what_must_be_positive_is(value: float) -> None:
    assert positive("clip_gradient", 0.5) == 0.5
    with pytest.raises(UsageError, match=f"clip_gradient={value!r} must be positive"):
        positive("clip_gradient", value)


def test_a_bool_is_no_number() -> None:
    assert is_number(1)
    assert is_number(1.5)
    assert not is_number(True)
    assert not is_number("1")


@pytest.mark.parametrize("value", [None, True, "cosine", 3, 0.25])
def test_plain_values_stay(value: Any) -> None:
    assert plain("x", value) is value


def test_lists_are_of_numbers() -> None:
    assert plain("betas", (0.9, torch.tensor(0.5), None)) == [0.9, 0.5, None]
    assert plain("nesterov", np.True_) is True
    with pytest.raises(UsageError, match="betas="):
        plain("betas", [0.9, "x"])


@pytest.mark.parametrize("value", ["x" * (MAX_HYPER_TEXT + 1), [0.5] * (MAX_HYPER_LIST + 1)])
def test_what_is_too_long_is_refused(value: Any) -> None:
    assert plain("x", value[:-1]) == value[:-1]
    with pytest.raises(UsageError, match="too long"):
        plain("x", value)


def test_what_the_wire_has_no_form_for_is_refused() -> None:
    with pytest.raises(UsageError, match="x="):
        plain("x", {"a": 1})
