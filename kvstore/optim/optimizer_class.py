"""What a server must know of an optimizer's class: its hyper-parameters, and which arrays it can update together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import UsageError, choices
from kvstore.optim.algorithms.momentum import MOMENTUM_STYLES, MxnetSGD
from kvstore.optim.eager import eager
from kvstore.optim.rows.row_rules import RowRule

# Names that MXNet gives to what torch calls otherwise.
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
# These decide how to run rather than what to compute.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "generator"})


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer's class, and what a server must know of it.

    Attributes:
        cls: the class.
        elementwise: whether each element is updated by itself. If not, arrays are neither cut over servers nor updated
            together with others.
        dims: how many dimensions arrays must have; None for any number.
        own_aliases: other names of hyper-parameters, beside those that all optimizers have.
        state_options: hyper-parameters that decide what the state means.
        rows: how it updates rows of tables; None: it cannot.
        alone: whether torch must step with one thread. Several would sum an array in an order that depends on their
            number, and a server has more threads where its host has fewer servers.
        unseen: whether its steps may change tensors so that torch does not count it, as through ``data``.
    """

    cls: type[torch.optim.Optimizer]
    elementwise: bool = True
    dims: int | None = None
    own_aliases: Mapping[str, str] = field(default_factory=dict)
    state_options: tuple[str, ...] = ()
    rows: RowRule | None = None
    alone: bool = False
    unseen: bool = False

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The default of each hyper-parameter, by the names of ``cls``."""
        parameters = inspect.signature(self.cls).parameters
        return {name: parameter.default for name, parameter in parameters.items() if name not in _HOW}

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        """The hyper-parameters that are words, and which these may be."""
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
        """Return an optimizer of ``params``.

        Raises:
            ValueError, TypeError: it refuses the hyper-parameters.
        """
        make: Callable[..., torch.optim.Optimizer] = self.cls
        return make(params, **hyper)


class TorchClass(OptimizerClass):
    """A class of ``torch.optim``, fused where torch can."""

    def build(self, params: Iterable[torch.Tensor], hyper: Mapping[str, Any]) -> torch.optim.Optimizer:
        """See ``OptimizerClass``."""
        make: Callable[..., torch.optim.Optimizer] = eager(self.cls)
        how = {"fused": True} if "fused" in inspect.signature(self.cls).parameters else {}
        return make(params, **hyper, **how)


class SGDClass(TorchClass):
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
