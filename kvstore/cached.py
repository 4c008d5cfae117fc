"""``functools.cached_property`` as it is since Python 3.12: without a lock.

Before 3.12, all instances of a class shared one lock. A signal handler's exception could leave it locked for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached(Generic[T]):  # noqa: N801 - it is used as a decorator
    """A property that is computed when it is first read, and then kept. Two threads may both compute it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> cached[T] | T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)  # later reads find it there
        return value
