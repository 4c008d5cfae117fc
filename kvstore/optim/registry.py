"""The optimizers that can be set by name: torch's, and those of MXNet that torch lacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import UnknownName
from kvstore.optim.algorithms.adaptive import FTML, AdaBelief, Ftrl, GroupAdaGrad
from kvstore.optim.algorithms.langevin import SGLD
from kvstore.optim.algorithms.layerwise import LAMB, LANS, LARS
from kvstore.optim.algorithms.momentum import DCASGD, MOMENTUM_STYLES, MxnetSGD, Signum
from kvstore.optim.algorithms.tensorwise import Tensorwise

NOT_HERE = {
    "lbfgs": "it evaluates the loss several times a step, through a closure, which cannot travel to a server",
    "sparseadam": "it is for sparse gradients, and stores hold dense ones; adam takes those",
    "optimizer": "it is the base class",
}
# Names that MXNet gives to what torch calls otherwise.
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
# These decide how to run rather than what to compute.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "generator"})
_OURS = (AdaBelief, DCASGD, FTML, Ftrl, GroupAdaGrad, LAMB, LANS, LARS, SGLD, Signum)


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer, and what a server must know of it.

    Attributes:
        cls: the class.
        elementwise: whether each element is updated by itself. If not, arrays are neither cut over servers nor updated
            together with others.
        dims: how many dimensions arrays must have; None for any number.
        aliases: MXNet's names for hyper-parameters, and those of ``cls``.
        state_options: hyper-parameters that decide what the state means.
    """

    cls: type[torch.optim.Optimizer]
    elementwise: bool = True
    dims: int | None = None
    own_aliases: Mapping[str, str] = field(default_factory=dict)
    state_options: tuple[str, ...] = ()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The default of each hyper-parameter, by the names of ``cls``."""
        parameters = inspect.signature(self.cls).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name not in _HOW}

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        """The hyper-parameters that are words, and which these may be."""
        return {}

    @property
    def aliases(self) -> dict[str, str]:
        """MXNet's names for hyper-parameters that there are, and the names here."""
        valid = self.hyperparameters
        return {old: new for old, new in (ALIASES | dict(self.own_aliases)).items() if new in valid}

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer of ``params``, fused where torch can.

        Raises:
            ValueError, TypeError: it refuses the hyper-parameters.
        """
        make: Callable[..., torch.optim.Optimizer] = self.cls
        how = {"fused": True} if "fused" in inspect.signature(make).parameters else {}
        return make(params, **hyper, **how)


class SGDClass(OptimizerClass):
    """torch's SGD, with either kind of momentum."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """See ``OptimizerClass``."""
        return super().hyperparameters | {"momentum_style": MOMENTUM_STYLES[0]}

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        """See ``OptimizerClass``."""
        return {"momentum_style": MOMENTUM_STYLES}

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        """See ``OptimizerClass``: torch's own class for torch's momentum, which so costs nothing more."""
        options = dict(hyper)
        if options.pop("momentum_style", MOMENTUM_STYLES[0]) == MOMENTUM_STYLES[0]:
            return super().build(params, options)
        return MxnetSGD(params, **options, fused=True)


def _of_torch(name: str, cls: type[torch.optim.Optimizer]) -> OptimizerClass:
    # Adafactor and Muon look at the shape of the whole tensor; Muon takes matrices only.
    if name == "sgd":
        return SGDClass(cls, state_options=("momentum_style",))
    aliases = {"rmsprop": {"gamma1": "alpha", "rho": "alpha"}, "nadam": {"schedule_decay": "momentum_decay"}}
    return OptimizerClass(
        cls, name not in ("adafactor", "muon"), 2 if name == "muon" else None, own_aliases=aliases.get(name, {})
    )


def _of_ours(cls: type[Tensorwise]) -> OptimizerClass:
    return OptimizerClass(cls, cls.elementwise, cls.dims, cls.aliases, cls.state_options)


@functools.cache
def builtin() -> dict[str, OptimizerClass]:
    """Those that come with torch and with this package, by name."""
    torchs = {
        name.lower(): _of_torch(name.lower(), cls)
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name.lower() not in NOT_HERE
    }
    return torchs | {"nag": torchs["sgd"]} | {cls.__name__.lower(): _of_ours(cls) for cls in _OURS}


def names() -> list[str]:
    """The optimizers that can be set by name."""
    return sorted(builtin())


def find(name: str) -> OptimizerClass:
    """Return the optimizer called ``name``.

    Raises:
        UnknownName: there is none; the message lists those there are.
    """
    found = builtin().get(name)
    if found is None:
        why = f": {NOT_HERE[name]}" if name in NOT_HERE else ""
        raise UnknownName(f"no optimizer {name!r}{why}; choose from {', '.join(names())}")
    return found
