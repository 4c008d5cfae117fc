"""The hyper-parameters that a Trainer updates with now, as torch's ``param_groups``, and their way to who updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from kvstore import UsageError
from kvstore.optim.hyperparameters import finite
from kvstore.optim.optimizer import Optimizer
from workers.trainer.parameters import Collected, Parameter

Schedule: TypeAlias = Callable[[int], float]
Snapshot: TypeAlias = "list[dict[str, Any]]"

_NOT_NUMBERS = ("params", "initial_lr", "lr_mult", "wd_mult")


class Loaded(NamedTuple):
    """What a file says: how many updates were made, and the hyper-parameters of each group."""

    num_update: int
    groups: Snapshot


class Updates(Protocol):
    """Who updates: a store, or this process."""

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        """Use these from the next update on."""


class Rates:
    """What schedulers write and updates read.

    Args:
        groups: torch's ``param_groups``, all hyper-parameters in each; whoever writes into them sets what is used next.
        optimizer: what who updates was told; with as many groups, or with none where there is one.
        where: who updates.
        schedule: gives the learning rate by the number of the update; MXNet's ``lr_scheduler``.
        num_update: number of updates made before.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        optimizer: Optimizer,
        where: Updates,
        schedule: Schedule | None = None,
        num_update: int = 0,
    ) -> None:
        self.groups = groups
        self.num_update = num_update
        self._optimizer = optimizer
        self._where = where
        self._schedule = schedule
        self._names = [name for name in groups[0] if name not in _NOT_NUMBERS]
        # The groups whose rate is the optimizer's, not one of their own.
        own = ["lr" in group.hyper for group in optimizer.groups] or [False]
        self._following = [group for group, its in zip(groups, own, strict=True) if not its]
        if schedule is not None and len(self._following) < len(groups):
            raise UsageError(
                "an lr_scheduler sets one learning rate, and a group has its own: give that lr_mult instead of lr, or "
                "use a scheduler of torch's with trainer.optimizer"
            )
        self._scheduled: float | None = None
        # Learning rates are always told, so that workers which disagree about them get an error.
        self._applied = [{name: value for name, value in its.items() if name != "lr"} for its in self._now()]

    @property
    def learning_rate(self) -> float:
        """The rate of the groups that have none of their own; else the first group's."""
        if self._schedule is not None:
            return float(self._schedule(self.num_update))
        return float((self._following or self.groups)[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next update on, for all groups that have none of their own.

        Raises:
            UsageError: all have, or a schedule decides.
        """
        if self._schedule is not None:
            raise UsageError("the lr_scheduler sets the learning rate; leave it out to set it yourself")
        if not self._following:
            raise UsageError("every group has its own learning rate: set trainer.optimizer.param_groups[i]['lr']")
        self._set(finite("learning_rate", lr))

    def rescale(self, batch_size: int | None, parts: int) -> float:
        """Return what the sum of ``parts`` gradients is multiplied by; None for a batch says that each is a mean.

        Raises:
            UsageError: a ``batch_size`` that is not positive.
        """
        if batch_size is not None and batch_size <= 0:
            raise UsageError(f"batch_size={batch_size} must be positive")
        return self._optimizer.rescale_grad / (parts if batch_size is None else batch_size)

    def apply(self) -> Snapshot:
        """Tell who updates what has changed; return all that the next update uses."""
        if self._schedule is not None:
            if self._scheduled is not None and any(group["lr"] != self._scheduled for group in self.groups):
                raise UsageError("the lr_scheduler of optimizer_params and something else both set the learning rate")
            self._scheduled = finite("learning_rate", self._schedule(self.num_update + 1))
            self._set(self._scheduled)
        now = self._now()
        if now != self._applied:
            changed = [
                {name: value for name, value in new.items() if name not in old or value != old[name]}
                for new, old in zip(now, self._applied, strict=True)
            ]
            if self._optimizer.groups:
                self._where.set_hyperparameters(groups=changed)
            else:
                self._where.set_hyperparameters(learning_rate=changed[0].pop("lr", None), **changed[0])
            self._applied = now
        return now

    def save(self) -> str:
        """Return a text for ``read``."""
        return json.dumps({"num_update": self.num_update, "groups": self._now()})

    def read(self, text: str, path: str) -> Loaded:
        """Return the hyper-parameters of ``text``, which comes from ``path``, as far as they are numbers; for ``take``.

        Raises:
            UsageError: it is not what ``save`` has made for such groups.
        """
        try:
            found = json.loads(text)
            num_update, groups = int(found["num_update"]), [dict(group) for group in found["groups"]]
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise UsageError(f"the hyper-parameters in {path} are damaged: {exc}") from None
        if not 0 <= num_update < 2**53:
            raise UsageError(f"the hyper-parameters in {path} are damaged: {num_update} updates")
        if len(groups) != len(self.groups):
            raise UsageError(f"{path} is of a run with {len(groups)} parameter groups, and here are {len(self.groups)}")
        fresh = [
            {name: _renewed(name, mine[name], theirs.get(name)) for name in self._names}
            for mine, theirs in zip(self.groups, groups, strict=True)
        ]
        return Loaded(num_update, fresh)

    def take(self, loaded: Loaded) -> None:
        """Go on with these hyper-parameters."""
        for mine, theirs in zip(self.groups, loaded.groups, strict=True):
            mine.update(theirs)
        self.num_update, self._scheduled = loaded.num_update, None

    def _set(self, lr: float) -> None:
        for group in self._following:
            group["lr"] = lr

    def _now(self) -> Snapshot:
        return [{name: group[name] for name in self._names} for group in self.groups]


def _renewed(name: str, mine: Any, theirs: Any) -> Any:
    """``theirs``, from a file, if it can stand in the place of ``mine``; else ``mine``."""
    if type(theirs) in (int, float) and type(mine) in (int, float):
        return finite(name, theirs)
    if isinstance(mine, tuple) and isinstance(theirs, list):
        return tuple(each if each is None else finite(name, each) for each in theirs)
    return mine


def settings(collected: Collected, given: Mapping[str, Any]) -> tuple[dict[str, Any], Schedule | None, int]:
    """Return what a store's ``set_optimizer`` takes for ``optimizer_params``, the schedule, and updates made before.

    Raises:
        UsageError: an ``lr_scheduler`` that is none, or a ``begin_num_update`` that is no count.
    """
    options = dict(given)
    schedule, begun = options.pop("lr_scheduler", None), options.pop("begin_num_update", 0)
    if type(begun) is not int or begun < 0:
        raise UsageError(f"begin_num_update={begun!r} must be an int of at least 0")
    for name in ("lr_mult", "wd_mult"):
        if isinstance(options.get(name), Mapping):
            options[name] = collected.by_key(options[name])
    if schedule is not None:
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) or not callable(schedule):
            raise UsageError(
                "lr_scheduler is a function of the number of the update, as workers.schedules has them; one of torch's "
                "is made for trainer.optimizer and steps by itself"
            )
        lr = options.pop("learning_rate", options.pop("lr", None))
        if lr is not None and hasattr(schedule, "base_lr"):
            schedule.base_lr = finite("learning_rate", lr)
        options["learning_rate"] = schedule(begun + 1)
    if collected.groups is not None:
        options["groups"] = [
            {"keys": [param.key for param in collected.params if param.group == position], **group}
            for position, group in enumerate(collected.groups)
        ]
    return options, schedule, begun


def changed(before: Snapshot | None, after: Snapshot) -> list[tuple[str, Any]]:
    """Return what differs: names, and the values before."""
    pairs = [] if before is None else zip(before, after, strict=True)
    return [(name, old[name]) for old, new in pairs for name, value in new.items() if value != old[name]]


def param_groups(optimizer: Optimizer, params: Sequence[Parameter]) -> list[dict[str, Any]]:
    """Return torch's ``param_groups`` for a description: the tensors of each group, and all its hyper-parameters."""
    return [
        {
            "params": [tensor for param in params if param.group == position for tensor in param.tensors],
            **optimizer.defaults(position + 1 if optimizer.groups else 0),
        }
        for position in range(len(optimizer.groups) or 1)
    ]
