"""What a server must know of an optimizer's class: its hyper-parameters, and which arrays it can update together."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from kvstore.errors import ConfigError, UsageError, choices
from kvstore.job import settings
from kvstore.job.valid_values import ClassReference
from kvstore.optim.algorithms.tensorwise import MOMENTUM_STYLES, MxnetSGD, eager
from kvstore.optim.row_rules import RowRule

# Names that MXNet gives to what torch calls otherwise.
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
# These decide how to run rather than what to compute.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "generator"})


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer's class, and what a server must know of it."""

    cls: type[torch.optim.Optimizer]
    # whether each element is updated by itself. If not, arrays are neither cut over servers nor updated together with
    # others.
    elementwise: bool = True
    dims: int | None = None  # how many dimensions arrays must have; None for any number
    # other names of hyper-parameters, beside those that all optimizers have
    own_aliases: Mapping[str, str] = field(default_factory=dict)
    state_options: tuple[str, ...] = ()  # hyper-parameters that decide what the state means
    rows: RowRule | None = None  # how it updates rows of tables; None: it cannot
    # whether torch must step with one thread. Several would sum an array in an order that depends on their number, and
    # a server has more threads where its host has fewer servers.
    alone: bool = False
    unseen: bool = False  # whether its steps may change tensors so that torch does not count it, as through ``data``

    @property
    def hyperparameters(self) -> dict[str, Any]:
        parameters = inspect.signature(self.cls).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name not in _HOW}

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        return {}

    def require(self, hyper: Mapping[str, Any]) -> None:
        """Raise ``UsageError`` if a hyper-parameter is a word that it may not be."""
        for option, valid in self.words.items():
            if hyper.get(option, valid[0]) not in valid:
                raise UsageError(f"{option}={hyper[option]!r} is not valid; choose from {choices(valid)}")

    @property
    def aliases(self) -> dict[str, str]:
        """MXNet's names for hyper-parameters that there are, and the names here."""
        valid = self.hyperparameters
        return {old: new for old, new in (ALIASES | dict(self.own_aliases)).items() if new in valid}

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        make: Callable[..., torch.optim.Optimizer] = self.cls
        return make(params, **hyper)


class TorchClass(OptimizerClass):
    """A class of ``torch.optim``, fused where torch can."""

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        make: Callable[..., torch.optim.Optimizer] = eager(self.cls)
        how = {"fused": True} if "fused" in inspect.signature(self.cls).parameters else {}
        return make(params, **hyper, **how)


class SGDClass(TorchClass):
    """torch's SGD, with either kind of momentum."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return super().hyperparameters | {"momentum_style": MOMENTUM_STYLES[0]}

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        return {"momentum_style": MOMENTUM_STYLES}

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        """See ``OptimizerClass``: torch's own class for torch's momentum, which so costs nothing more."""
        options = dict(hyper)
        if options.pop("momentum_style", MOMENTUM_STYLES[0]) == MOMENTUM_STYLES[0]:
            return super().build(params, options)
        return MxnetSGD(params, **options, fused=True)


# The door for other optimizers: classes that the operator of this process allows, each under a name.
#
# Two things allow a class: the variable ``KVSTORE_OPTIMIZERS``, and a distribution that is installed with an entry
# point in the group ``kvstore.optimizers``. A message from the wire has a name and numbers. The name is looked up
# among the allowed ones, and nothing else is imported. Each class is checked before its first use. A class that keeps
# anything outside the state of each parameter is refused: a server would lose it, or share it among unrelated keys.
ENTRY_POINTS = "kvstore.optimizers"
# What to install for a module, where that has another name.
DISTRIBUTIONS = {"pytorch_optimizer": "pytorch-optimizer"}


@dataclass(frozen=True)
class AllowedClass(OptimizerClass):
    """A class that the operator has allowed.

    It may say of itself what ``Tensorwise`` does. If it does not, arrays stay whole: it may look at norms.
    """

    # a subclass to be built in its place, which counts updates of each parameter; None if it does so
    own_counts: type[torch.optim.Optimizer] | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return {name: default for name, default in super().hyperparameters.items() if _is_number(default)}

    def require(self, hyper: Mapping[str, Any]) -> None:
        for option, value in hyper.items():
            if not _is_number(value):
                raise UsageError(f"{option}={value!r} is not a number")

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        return OptimizerClass(self.own_counts or self.cls).build(params, hyper)


def allowed(taken: Iterable[str]) -> dict[str, ClassReference]:
    """Return where the classes are that are allowed, by name."""
    found: dict[str, ClassReference] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        reference = ClassReference(point.name.lower(), point.module, point.attr)
        if found.setdefault(reference.name, reference) != reference:
            raise ConfigError(f"two installed distributions have an optimizer {reference.name!r}; uninstall one")
    found |= {reference.name: reference for reference in settings.OPTIMIZERS.read(os.environ)}
    for name in taken:
        if name in found:
            raise ConfigError(
                f"{settings.OPTIMIZERS.name}, or an entry point in {ENTRY_POINTS}, gives {found[name]} the name "
                f"{name!r}, which another optimizer has; give it a name: other_{found[name]}"
            )
    return found


@functools.cache
def load(reference: ClassReference) -> AllowedClass:
    """Import a class that is allowed, and look at it."""
    try:
        cls: Any = importlib.import_module(reference.module)
        for part in reference.cls.split("."):
            cls = getattr(cls, part)
    except ModuleNotFoundError as exc:
        distribution = DISTRIBUTIONS.get((exc.name or "").partition(".")[0])
        what = f"the module {exc.name!r}" + (f" (pip install {distribution})" if distribution else "")
        raise UsageError(f"optimizer {reference.name!r} needs {what} on the servers and the workers") from exc
    except (AttributeError, ImportError) as exc:
        raise UsageError(f"optimizer {reference.name!r} is allowed as {reference}, which is not there: {exc}") from exc
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise UsageError(f"optimizer {reference.name!r} is allowed as {reference}, which is no torch.optim.Optimizer")
    try:
        made = _usable_step(cls)
    except Exception as exc:
        raise UsageError(f"optimizer {reference.name!r} ({reference}) cannot be used on servers: {exc}") from exc
    return AllowedClass(
        cls,
        elementwise=getattr(cls, "elementwise", False) is True,
        dims=getattr(cls, "dims", None),
        own_aliases=getattr(cls, "aliases", {}),
        state_options=getattr(cls, "state_options", ()),
        own_counts=with_own_counts(cls) if GROUPS_COUNT in made.group else None,
        unseen=True,
    )


@dataclass(frozen=True)
class _Step:
    """What a first step has made."""

    group: dict[str, Any]  # what it has changed in the param group
    states: dict[Any, Any]
    weight: torch.Tensor


def _usable_step(cls: type[torch.optim.Optimizer]) -> _Step:
    """Return what a first step makes; raise an exception that says why, unless a server can use ``cls``."""
    _, *parameters = inspect.signature(cls).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    required = [each.name for each in named if each.default is each.empty]
    if required:
        raise TypeError(f"its hyper-parameters need defaults, and {', '.join(required)} has none")
    made = _first_step(cls)
    if beside := sorted(made.group.keys() - {GROUPS_COUNT}):
        raise TypeError(f"it keeps {', '.join(beside)} in the param group, which all keys share")
    if made.states.keys() - {made.weight}:
        raise TypeError("it keeps state that belongs to no parameter")
    state = made.states.get(made.weight, {})
    if odd := sorted(str(name) for name, value in state.items() if not torch.is_tensor(value)):
        raise TypeError(f"it keeps {', '.join(odd)} of each parameter, which is no tensor and cannot be saved")
    return made


def _first_step(cls: type[torch.optim.Optimizer]) -> _Step:
    weight = torch.ones(2, 2, dtype=torch.float32, device="cpu")
    optimizer = OptimizerClass(cls).build([weight], {})
    before = {name: copy.copy(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
    weight.grad = torch.ones(2, 2, dtype=torch.float32, device="cpu")
    optimizer.step()
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    changed = {name: value for name, value in after.items() if name not in before or value != before[name]}
    return _Step(changed, dict(optimizer.state), weight)


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    return value is None or isinstance(value, int | float)


# Optimizers that count updates in the param group, as those of pytorch-optimizer do: here each key has its own count.
#
# A server updates keys in groups of its own making, and saves states key by key. A count that all keys share would be
# too high, and would be lost.
COUNT = "group_step"  # the name of the count in the state of a parameter
GROUPS_COUNT = "step"  # its name in the param group


def with_own_counts(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of ``cls`` that keeps the param group's count of updates in the state of each parameter."""

    class OwnCounts(cls):  # type: ignore[misc, valid-type]
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            (group,) = self.param_groups
            params = group["params"]
            by_count: dict[int, list[torch.Tensor]] = {}
            for param in params:
                count = self.state[param].get(COUNT, 0) if param in self.state else 0
                by_count.setdefault(int(count), []).append(param)
            try:
                for count, members in by_count.items():
                    self._step_from(count, members)
            finally:
                group["params"] = params

        def _step_from(self, count: int, members: list[torch.Tensor]) -> None:
            (group,) = self.param_groups
            group["params"] = members
            if count:
                group[GROUPS_COUNT] = count
                for param in members:
                    del self.state[param][COUNT]  # what it does not know, it may take for state of its own
            try:
                super().step()
                count = group[GROUPS_COUNT]
            finally:
                group.pop(GROUPS_COUNT, None)
                for param in members if count else ():
                    self.state[param][COUNT] = torch.tensor(float(count), dtype=torch.float32, device="cpu")

    return OwnCounts
