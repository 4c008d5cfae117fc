"""Work that autograd does not see: nothing is recorded, and the caller's mode is as it was, whatever happens."""

from __future__ import annotations

import pytest
import torch

from kvstore.values import without_grad


def test_nothing_is_recorded() -> None:
    leaf = torch.ones(3, requires_grad=True)
    doubled = without_grad(torch.mul, leaf, 2)
    assert doubled.tolist() == [2, 2, 2]
    assert not doubled.requires_grad


@pytest.mark.parametrize("recording", [True, False])
def test_the_mode_is_as_it_was(recording: bool) -> None:
    with torch.set_grad_enabled(recording):
        assert without_grad(torch.is_grad_enabled) is False
        assert torch.is_grad_enabled() is recording


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_mode_is_as_it_was_after_an_exception(recording: bool, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with torch.set_grad_enabled(recording):
        with pytest.raises(error):
            without_grad(fail)
        assert torch.is_grad_enabled() is recording


def test_arguments_by_name_are_passed_on() -> None:
    out = torch.empty(4)
    without_grad(torch.cat, [torch.zeros(2), torch.ones(2)], out=out)
    assert out.tolist() == [0, 0, 1, 1]
