"""The parameter groups of torch.optim: which settings a description gives to each key, and torch's optimizers of them.

The keys of one description may differ in their hyper-parameters (its groups) and in the factors of their learning rate
and weight decay (its multipliers). What torch makes of a group's hyper-parameters is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kvstore.optim.optimizer import MULTIPLIERS, Changes, Optimizer
from kvstore.spec import Key


class Rates(NamedTuple):
    """The number of a key's group, and the factors of its learning rate and weight decay."""

    group: int = 0
    lr_mult: float = 1.0
    wd_mult: float = 1.0


class ParamGroups:
    """The parameter groups of one description.

    Args:
        name_of: gives the name by which ``optimizer`` knows a key; by default the key itself.

    Raises:
        ValueError: torch refuses the hyper-parameters (a negative learning rate, say).
    """

    def __init__(self, optimizer: Optimizer, name_of: Callable[[Key], Key] | None = None) -> None:
        self.optimizer = optimizer
        self.name_of = name_of or _same
        numbers = range(len(optimizer.groups) + 1)
        self._settings = [
            _settings(build(optimizer, number, torch.zeros(1, 1, dtype=torch.float32, device="cpu")))
            for number in numbers
        ]

    def number(self, key: Key) -> int:
        return self.optimizer.number_of(self.name_of(key))

    def rates(self, keys: Sequence[Key]) -> list[Rates]:
        optimizer = self.optimizer
        if not (optimizer.groups or optimizer.lr_mult or optimizer.wd_mult):
            return [Rates()] * len(keys)
        names = map(self.name_of, keys)
        return [
            Rates(optimizer.number_of(name), optimizer.lr_mult.get(name, 1.0), optimizer.wd_mult.get(name, 1.0))
            for name in names
        ]

    def settings(self, rates: Rates, lr: float, changes: Changes) -> dict[str, Any]:
        """Return what torch is to update parameters of these rates with: a param group without its parameters."""
        number, lr_mult, wd_mult = rates
        changed: dict[int, dict[str, Any]] = {}
        for (group, name), value in changes.items():
            changed.setdefault(group, {})[name] = tuple(value) if isinstance(value, list) else value
        for_group = changed.setdefault(number, {})
        lr_mult, wd_mult = for_group.pop("lr_mult", lr_mult), for_group.pop("wd_mult", wd_mult)
        own = self.optimizer.groups[number - 1].hyper if number else {}
        common = {name: value for name, value in {"lr": lr, **changed.get(0, {})}.items() if name not in MULTIPLIERS}
        settings = self._settings[number] | {name: value for name, value in common.items() if name not in own}
        settings |= for_group
        settings["lr"] *= lr_mult
        if "weight_decay" in settings:
            settings["weight_decay"] *= wd_mult
        return settings


def build(optimizer: Optimizer, number: int, *params: torch.Tensor) -> torch.optim.Optimizer:
    """Return torch's optimizer of ``params`` with the hyper-parameters of group ``number``, fused where torch can."""
    return optimizer.found.build(params, optimizer.hyper_of(number))


def first_state(optimizer: Optimizer, number: int, device: torch.device) -> dict[str, Any]:
    """Return the state that a parameter of group ``number`` on ``device`` has after a first step."""
    probe = torch.zeros(1, 1, dtype=torch.float32, device=device)
    probe.grad = torch.zeros_like(probe)
    stepped = build(optimizer, number, probe)
    stepped.step()
    return dict(stepped.state[probe])


def _settings(built: torch.optim.Optimizer) -> dict[str, Any]:
    (group,) = built.param_groups
    return {name: value for name, value in group.items() if name != "params"}


def _same(key: Key) -> Key:
    return key
