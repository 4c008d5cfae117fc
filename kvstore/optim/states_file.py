"""Optimizer states in a file: safetensors, with the keys and the optimizer's name in its metadata. No pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvstore.errors import KVStoreError, UsageError
from kvstore.job.files import foreign_format, replacing, require_plain
from kvstore.optim.states import StateTensors
from kvstore.spec import Key, Spec, check_key
from kvstore.values import spec_of

FORMAT = "kvstore optimizer states 1"
_RESIDUAL = "residual:"  # no name of a state begins so: those begin with a number


class Residuals(NamedTuple):
    """The residuals of one worker's compression; see ``Compressor.state``."""

    rank: int
    tensors: Mapping[str, torch.Tensor]
    plain: Mapping[str, object]


def write(
    path: str | os.PathLike[str],
    optimizer: str,
    states: StateTensors,
    residuals: Residuals | None = None,
    note: str | None = None,
) -> None:
    """Write the states, by (key, name of the state), to ``path``: the old file or the new one, never half of one."""
    keys = list(dict.fromkeys(key for key, _ in states))
    number = {key: i for i, key in enumerate(keys)}
    tensors = {
        f"{number[key]}/{name}": value.detach().cpu().contiguous().clone() for (key, name), value in states.items()
    }
    metadata = {"format": FORMAT, "optimizer": optimizer, "keys": json.dumps(keys)}
    if note is not None:
        metadata["note"] = note
    if residuals is not None:
        tensors |= {f"{_RESIDUAL}{name}": value for name, value in residuals.tensors.items()}
        metadata["residuals"] = json.dumps({"rank": residuals.rank, "plain": residuals.plain})
    with replacing(Path(path), mode=0o600) as draft:
        save_file(tensors, draft, metadata)


def read(path: str | os.PathLike[str]) -> tuple[str, StateTensors]:
    """Return the optimizer's name and the states that ``write`` wrote."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UsageError(f"{path} is not a file of optimizer states; pass one that save_optimizer_states wrote")
        keys = dict(enumerate(check_key(key) for key in json.loads(metadata["keys"])))
        states: StateTensors = {}
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name.startswith(_RESIDUAL):
                continue
            number, _, state = name.partition("/")
            tensor = file.get_tensor(name)
            spec_of(tensor)  # of a dtype that can travel
            states[keys[int(number)], state] = tensor
        return metadata["optimizer"], states


def read_residuals(path: str | os.PathLike[str]) -> Residuals | None:
    """Return the residuals of the worker that wrote ``path``; None if it did not compress."""
    with _opened(path) as file:
        text = (file.metadata() or {}).get("residuals")
        if text is None:
            return None
        described = json.loads(text)
        names = [name for name in file.keys() if name.startswith(_RESIDUAL)]  # noqa: SIM118 - not a dict
        tensors = {name.removeprefix(_RESIDUAL): file.get_tensor(name) for name in names}
        return Residuals(int(described["rank"]), tensors, dict(described["plain"]))


def read_note(path: str | os.PathLike[str]) -> str | None:
    """Return the note that ``write`` was given for ``path``, if any."""
    with _opened(path) as file:
        return (file.metadata() or {}).get("note")


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """Return the keys that have states in ``path``."""
    with _opened(path) as file:
        return [check_key(key) for key in json.loads((file.metadata() or {}).get("keys", "[]"))]


def alike(path: str | os.PathLike[str], one: Key, other: Key) -> bool:
    """Return whether two keys have the same states in ``path``."""
    with _opened(path) as file:
        keys = json.loads((file.metadata() or {}).get("keys", "[]"))
        by_key: list[dict[str, torch.Tensor]] = []
        for key in (one, other):
            prefix = f"{keys.index(key)}/" if key in keys else "/"
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
            by_key.append({name.removeprefix(prefix): file.get_tensor(name) for name in names})
    first, second = by_key
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The file, to read from in the block: what goes wrong there is its damage."""
    try:
        require_plain(Path(path))
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except KVStoreError as exc:  # of a key, or a tensor's dtype, unless it is already about the file
        if f"{exc}".startswith(f"{path}"):
            raise
        raise UsageError(f"{path} is damaged: {exc}") from None
    except (SafetensorError, AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        if (other := foreign_format(path)) is not None:
            raise UsageError(f"{path} is {other}") from None
        raise UsageError(f"{path} is damaged: {exc}") from None


def require_optimizer(saved: str, current: str, path: str | os.PathLike[str]) -> None:
    if saved != current:
        raise UsageError(f"{path} holds the states of {saved}, but the optimizer is {current}")


def require_keys(states: StateTensors, specs: Mapping[Key, Spec], path: str | os.PathLike[str]) -> None:
    """Raise ``UsageError`` unless every key with state in ``path`` has been initialized, and is of some such shape.

    Who loads them looks closer; see ``StateStore.load``.
    """
    for (key, name), value in states.items():
        if key not in specs:
            raise UsageError(f"{path} holds state of key {key!r}, which has not been initialized")
        if value.dim() and tuple(value.shape) not in _shapes(specs[key].shape):
            raise UsageError(f"{path} holds {name} of shape {list(value.shape)} for key {key!r}, which is {specs[key]}")


def _shapes(shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The shapes that state of an array of ``shape`` may have: its own, or (Adafactor) one dimension summed up."""
    return {shape, (*shape[:-1], 1), (*shape[:-2], 1, *shape[-1:])} if len(shape) > 1 else {shape}
