"""The callbacks of a run: who is called when, and what checkpoints remember of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from workers.callbacks.saving import do_batch_checkpoint, do_checkpoint

Callbacks: TypeAlias = "Callable[..., Any] | Iterable[Callable[..., Any]] | None"


class Called:
    """Callbacks by moment. Of one moment they are called in the order given, but those that save come last.

    So a checkpoint has what the others have made of the moment, wherever in the list it stands.

    Args:
        callbacks: by moment: one, several, or None.
    """

    def __init__(self, callbacks: Mapping[str, Callbacks]) -> None:
        self._by_moment = {moment: sorted(_listed(its), key=_saves) for moment, its in callbacks.items()}
        every = [callback for listed in self._by_moment.values() for callback in listed]
        self._each: list[Any] = list({id(callback): callback for callback in every}.values())

    def at(self, moment: str) -> list[Callable[..., Any]]:
        """Return those of a moment."""
        return self._by_moment[moment]

    def tell(self, what: str, *args: Any, moment: str | None = None) -> None:
        """Call the method ``what`` of all that have it, each once; or only of those of a moment."""
        for callback in self._each if moment is None else self._by_moment[moment]:
            if callable(method := getattr(callback, what, None)):
                method(*args)

    def state_dict(self) -> dict[str, Any]:
        """Return what they remember, by name."""
        return {name: callback.state_dict() for name, callback in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give them what they have remembered, as far as it is there."""
        for name, callback in self._stateful().items():
            if name in state:
                callback.load_state_dict(state[name])

    def _stateful(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in self._each:
            if all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")):
                name = type(callback).__name__
                found[f"{name}.{sum(each.startswith(f'{name}.') for each in found)}"] = callback
        return found


def _listed(callbacks: Callbacks) -> list[Callable[..., Any]]:
    if callbacks is None:
        return []
    return [callbacks] if callable(callbacks) else list(callbacks)


def _saves(callback: Any) -> bool:
    return isinstance(callback, do_checkpoint | do_batch_checkpoint)
