"""Optimizers by name: a description that can travel, because it is a name and numbers and nothing else."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import UnknownName, UsageError, choices
from kvstore.spec import Key, check_key
from kvstore.wire.fields import MAX_HYPER_LIST, MAX_HYPER_TEXT

log = logging.getLogger(__name__)

# Names that MXNet gives to what torch calls otherwise.
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
# These need a closure, sparse gradients, or decide how to run rather than what to compute.
_NOT_HERE = frozenset({"LBFGS", "SparseAdam", "Optimizer"})
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
# These look at the shape of the whole tensor, so servers must not hold it in pieces.
_WHOLE = frozenset({"adafactor", "muon"})


@functools.cache
def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """The classes of ``torch.optim`` that can be used, by name."""
    found = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in _NOT_HERE
    }
    return found | {"nag": torch.optim.SGD}


def names() -> list[str]:
    """The optimizers that can be set by name."""
    return sorted(classes())


@dataclass(frozen=True)
class Optimizer:
    """A description of an optimizer.

    Attributes:
        name: one of ``names()``.
        lr: the learning rate.
        hyper: torch's other hyper-parameters, by torch's names.
        rescale_grad: gradients are multiplied by it first.
        clip_gradient: then clipped to plus and minus this.
        lr_mult, wd_mult: factors to ``lr`` and ``weight_decay`` by key.
    """

    name: str
    lr: float
    hyper: dict[str, Any] = field(default_factory=dict)
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_mult: dict[Key, float] = field(default_factory=dict)
    wd_mult: dict[Key, float] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether it needs whole tensors."""
        return self.name in _WHOLE

    def same_rule(self, other: Optimizer | None) -> bool:
        """Whether state made by ``other`` still means the same under this one."""
        return other is not None and self.name == other.name


def describe(optimizer: Any, hyperparameters: Mapping[str, Any]) -> Optimizer:
    """Return the description of an optimizer given by name, class or unused instance, and hyper-parameters.

    Args:
        optimizer: a name (any of ``names()``, upper or lower case), a class of ``torch.optim``, or an instance that has
            made no step, whose defaults are taken.
        hyperparameters: torch's names or MXNet's (``learning_rate``, ``wd``, ``beta1``, ``beta2``, ``epsilon``), and
            ``rescale_grad``, ``clip_gradient``, ``lr_mult``, ``wd_mult``.

    Raises:
        UnknownName: no such optimizer or hyper-parameter; the message lists those there are.
        UsageError: a value that is no number, or an optimizer that cannot travel by name.
    """
    name, given = _name_of(optimizer), dict(hyperparameters)
    for old, new in ALIASES.items():
        if old in given:
            if new in given:
                raise UsageError(f"{old} and {new} are the same; give one of them")
            given[new] = given.pop(old)
    valid = _hyperparameters(name)
    if isinstance(optimizer, torch.optim.Optimizer):
        # Some classes are special cases of others and have defaults that they do not let anybody choose.
        given = {key: value for key, value in optimizer.defaults.items() if key in valid} | given
    if "betas" in valid and ("beta1" in given or "beta2" in given):
        betas = tuple(given.get("betas", valid["betas"]))
        given["betas"] = (given.pop("beta1", betas[0]), given.pop("beta2", betas[1]))
    if name == "nag":
        given = {"momentum": 0.9, "nesterov": True} | given
    lr = given.pop("lr", valid.pop("lr"))
    rescale, clip = given.pop("rescale_grad", 1.0), given.pop("clip_gradient", None)
    lr_mult, wd_mult = _multipliers(given, "lr_mult"), _multipliers(given, "wd_mult")
    for key in given:
        if key not in valid:
            extra = {"lr", "rescale_grad", "clip_gradient", "lr_mult", "wd_mult", *ALIASES}
            raise UnknownName(f"{name} has no hyper-parameter {key!r}; choose from {choices({*valid, *extra})}")
    return Optimizer(
        name,
        finite("learning_rate", lr),
        {key: _plain(key, value) for key, value in sorted(given.items())},
        finite("rescale_grad", rescale),
        None if clip is None else _positive("clip_gradient", clip),
        lr_mult,
        wd_mult,
    )


def _name_of(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name in classes():
            return name
        raise UnknownName(f"no optimizer {optimizer!r}; choose from {', '.join(names())}")
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = cls.__name__.lower()
    if classes().get(name) is not cls:
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__} cannot travel to a server; use one of torch.optim's: "
            f"{', '.join(names())}"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's is there from the start
            raise UsageError("this optimizer has made steps, and its state would be lost; pass an unused one")
        if len(optimizer.param_groups) > 1:
            raise UsageError("this optimizer has several parameter groups; use lr_mult and wd_mult by key instead")
    return name


def _hyperparameters(name: str) -> dict[str, Any]:
    parameters = inspect.signature(classes()[name]).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in _HOW}


def _multipliers(given: dict[str, Any], name: str) -> dict[Key, float]:
    mults = given.pop(name, {})
    if not isinstance(mults, Mapping):
        raise UsageError(f"{name} maps keys to factors, it is not {type(mults).__name__}")
    return {check_key(key): finite(f"{name}[{key!r}]", value) for key, value in mults.items()}


def _plain(name: str, value: Any) -> Any:
    """``value`` as the wire can carry it: a number, bool, text, None, or a list of numbers."""
    if isinstance(value, str | list | tuple) and len(value) > (
        MAX_HYPER_TEXT if isinstance(value, str) else MAX_HYPER_LIST
    ):
        raise UsageError(f"{name} is too long: at most {MAX_HYPER_TEXT} characters, or {MAX_HYPER_LIST} numbers")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return [None if item is None else finite(name, item) for item in value]
    return finite(name, value)


def finite(name: str, value: Any) -> float | int:
    """Return ``value`` as a finite Python number.

    Raises:
        UsageError: it is none; the message calls it ``name``.
    """
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if isinstance(value, int) and abs(value) >= 2**63:  # more than the wire has for one
        value = float(value) if abs(value) < 2**1000 else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name}={value!r} is not a finite number")
    return value


def _positive(name: str, value: Any) -> float | int:
    number = finite(name, value)
    if number <= 0:
        raise UsageError(f"{name}={number!r} must be positive; None does without")
    return number


def log_replaced(old: Optimizer | None, new: Optimizer) -> None:
    """Say so when another optimizer takes over and the old one's state is dropped."""
    if old is not None and not new.same_rule(old):
        log.warning("set_optimizer: %s replaces %s, whose state is dropped", new.name, old.name)
