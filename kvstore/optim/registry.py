"""The optimizers that can be set by name: torch's, MXNet's others, and those that the operator allows."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from kvstore.errors import UnknownName, choices, meant
from kvstore.optim.algorithms.adaptive import (
    FTML,
    AdaBelief,
    Ftrl,
    GroupAdaGrad,
    RowWiseAdagrad,
    RowWiseAdam,
)
from kvstore.optim.algorithms.langevin import SGLD
from kvstore.optim.algorithms.layerwise import LAMB, LANS, LARS
from kvstore.optim.algorithms.momentum import DCASGD, Signum
from kvstore.optim.algorithms.tensorwise import Tensorwise
from kvstore.optim.allowed import allowed, load
from kvstore.optim.optimizer_class import OptimizerClass, SGDClass, TorchClass
from kvstore.optim.rows.row_rules import AdagradRows, AdamRows, RowRule, SGDRows, TensorwiseRows

NOT_HERE = {
    "lbfgs": "it evaluates the loss several times a step, through a closure, which cannot travel to a server",
    "optimizer": "it is the base class",
}
# Names of updates that another name has, too. On rows of tables, adam is torch's SparseAdam.
SYNONYMS = {"sparseadam": "adam"}
_OURS = (AdaBelief, DCASGD, FTML, Ftrl, GroupAdaGrad, LAMB, LANS, LARS, RowWiseAdagrad, RowWiseAdam, SGLD, Signum)
_ROW_RULES: Mapping[str, RowRule] = {
    "sgd": SGDRows(),
    "adam": AdamRows(),
    "adamw": AdamRows(decoupled=True),
    "adagrad": AdagradRows(),
    "adabelief": TensorwiseRows(AdaBelief, wide=("exp_avg", "exp_avg_var")),
    "ftrl": TensorwiseRows(Ftrl, wide=("z", "n")),
    "groupadagrad": TensorwiseRows(GroupAdaGrad, narrow=("sum",)),
    "rowwiseadagrad": TensorwiseRows(RowWiseAdagrad, narrow=("sum",), initial="initial_accumulator_value"),
    "rowwiseadam": TensorwiseRows(RowWiseAdam, wide=("exp_avg",), narrow=("exp_avg_sq",)),
}


def _of_torch(name: str, cls: type[torch.optim.Optimizer]) -> OptimizerClass:
    # Adafactor and Muon look at the shape of the whole tensor; Muon takes matrices only.
    if name == "sgd":
        return SGDClass(cls, state_options=("momentum_style",), rows=_ROW_RULES[name])
    aliases = {"rmsprop": {"gamma1": "alpha", "rho": "alpha"}, "nadam": {"schedule_decay": "momentum_decay"}}
    return TorchClass(
        cls,
        name not in ("adafactor", "muon"),
        2 if name == "muon" else None,
        own_aliases=aliases.get(name, {}),
        rows=_ROW_RULES.get(name),
        alone=name == "adafactor",  # means over columns
    )


def _of_ours(cls: type[Tensorwise]) -> OptimizerClass:
    rows = _ROW_RULES.get(cls.__name__.lower())
    return OptimizerClass(cls, cls.elementwise, cls.dims, cls.aliases, cls.state_options, rows)


@functools.cache
def builtin() -> dict[str, OptimizerClass]:
    """Those that come with torch and with this package, by name."""
    torchs = {
        name.lower(): _of_torch(name.lower(), cls)
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and name.lower() not in NOT_HERE
        and name.lower() not in SYNONYMS
    }
    return torchs | {"nag": torchs["sgd"]} | {cls.__name__.lower(): _of_ours(cls) for cls in _OURS}


def names() -> list[str]:
    """The optimizers that are always there."""
    return sorted(builtin())


def names_for_rows() -> list[str]:
    """The optimizers that can update rows of tables."""
    return [name for name in names() if builtin()[name].rows is not None]


def find(name: str) -> OptimizerClass:
    """Return the optimizer called ``name``; one that the operator allows is imported now.

    Raises:
        UnknownName: there is none; the message lists those there are.
        UsageError: it is allowed, but not there, or not usable.
        ConfigError: what is allowed contradicts itself.
    """
    found = builtin().get(SYNONYMS.get(name, name))
    if found is not None:
        return found
    others = allowed(builtin())
    if name in others:
        return load(others[name])
    why = f": {NOT_HERE[name]}" if name in NOT_HERE else ""
    known = [*names(), *others]
    raise UnknownName(
        f"no optimizer {name!r}{why}; choose from {choices(known)}; KVSTORE_OPTIMIZERS allows others"
        f"{'' if why else meant(name, known)}"
    )


def name_of(cls: type) -> str | None:
    """Return the name of a class, if it is that of an optimizer that can be set by name."""
    name = cls.__name__.lower()
    if cls is torch.optim.SparseAdam:
        return SYNONYMS[name]
    if name in builtin():
        return name if builtin()[name].cls is cls else None
    for name, reference in allowed(builtin()).items():
        if cls.__name__ == reference.cls.rpartition(".")[2] and load(reference).cls is cls:
            return name
    return None
