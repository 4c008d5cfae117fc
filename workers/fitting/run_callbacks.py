"""The callbacks of a run: which are called when, and their states for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from workers.callbacks.saving import do_batch_checkpoint, do_checkpoint
from workers.fitting.position import has_state

Callbacks: TypeAlias = "Callable[..., Any] | Iterable[Callable[..., Any]] | None"


class RunCallbacks:
    """Callbacks by moment. They are called in the order given, but savers of checkpoints come last.

    So a checkpoint has the effects of all other callbacks of its moment.
    """

    def __init__(self, callbacks: Mapping[str, Callbacks]) -> None:
        self._by_moment = {moment: sorted(_listed(given), key=_saves) for moment, given in callbacks.items()}
        callbacks_in_order = [callback for listed in self._by_moment.values() for callback in listed]
        self._each: list[Any] = list({id(callback): callback for callback in callbacks_in_order}.values())

    def at(self, moment: str) -> list[Callable[..., Any]]:
        return self._by_moment[moment]

    @property
    def savers(self) -> list[str]:
        """What saves checkpoints, and when; workers with the same list save together."""
        return [f"{type(each).__name__} {each.period}" for each in self._each if _saves(each)]

    def tell(self, what: str, *args: Any, moment: str | None = None) -> None:
        """Call the method ``what`` of each callback that has it, once; with ``moment``, only of that moment's."""
        for callback in self._each if moment is None else self._by_moment[moment]:
            if callable(method := getattr(callback, what, None)):
                method(*args)

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._stateful().items():
            if name in state:
                callback.load_state_dict(state[name])

    def _stateful(self) -> dict[str, Any]:
        by_name: dict[str, Any] = {}
        for callback in self._each:
            if has_state(callback):
                name = type(callback).__name__
                by_name[f"{name}.{sum(each.startswith(f'{name}.') for each in by_name)}"] = callback
        return by_name


def _listed(callbacks: Callbacks) -> list[Callable[..., Any]]:
    if callbacks is None:
        return []
    return [callbacks] if callable(callbacks) else list(callbacks)


def _saves(callback: Any) -> bool:
    return isinstance(callback, do_checkpoint | do_batch_checkpoint)
