"""Errors of the system are ignored where they do not matter, and those that a signal's handler raises are not."""

from __future__ import annotations

import errno

import pytest

from kvstore.transport.system_errors import ignored, require_systems

SYSTEMS = [ConnectionResetError(errno.ECONNRESET, "reset"), TimeoutError(errno.ETIMEDOUT, "timed out")]
OTHERS = [TimeoutError("the alarm"), OSError("made by hand")]


@pytest.mark.parametrize("error", SYSTEMS)
def test_errors_with_a_number_are_ignored(error: OSError) -> None:
    with ignored():
        raise error
    require_systems(error)


@pytest.mark.parametrize("error", OTHERS)
def test_errors_without_one_are_raised(error: OSError) -> None:
    with pytest.raises(type(error)) as caught, ignored():
        raise error
    assert caught.value is error
    with pytest.raises(type(error)):
        require_systems(error)


def test_other_classes_are_ignored_if_they_are_named() -> None:
    with ignored(ValueError):
        raise ValueError
    with pytest.raises(KeyError), ignored(ValueError):
        raise KeyError
    with pytest.raises(KeyboardInterrupt), ignored(ValueError):
        raise KeyboardInterrupt


def test_what_is_no_error_of_the_system_is_not_this_modules_to_judge() -> None:
    require_systems(ValueError("another class"))
