"""Optimizers by name: a description that can be sent, because it is a name and numbers and nothing else."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from kvstore.cached import cached
from kvstore.errors import UnknownName, UsageError, choices, meant
from kvstore.optim.algorithms.adaptive import (
    FTML,
    AdaBelief,
    Ftrl,
    GroupAdaGrad,
    RowWiseAdagrad,
    RowWiseAdam,
)
from kvstore.optim.algorithms.layerwise import LAMB, LANS, LARS, SGLD
from kvstore.optim.algorithms.tensorwise import DCASGD, Signum, Tensorwise
from kvstore.optim.hyperparameters import finite, is_number, plain, positive
from kvstore.optim.optimizer_class import OptimizerClass, SGDClass, TorchClass, allowed, load
from kvstore.optim.row_rules import AdagradRows, AdamRows, RowRule, SGDRows, TensorwiseRows
from kvstore.plain import scalar
from kvstore.spec import Key, Spec, check_key
from kvstore.table import TableSpec
from kvstore.wire.fields import MAX_GROUPS

log = logging.getLogger(__name__)

# MXNet's names for what is always on here, and for other implementations of the same update.
_IGNORED = frozenset({"multi_precision", "aggregate_num", "use_fused_step"})
LAZY = "lazy_update"  # MXNet's name for whether rows of tables without a gradient stay as they are
MULTIPLIERS = ("lr_mult", "wd_mult")

Changes: TypeAlias = Mapping[tuple[int, str], Any]  # by number of the group and name; see ``Optimizer.changes``


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
    return sorted(builtin())


def names_for_rows() -> list[str]:
    return [name for name in names() if builtin()[name].rows is not None]


def find(name: str) -> OptimizerClass:
    """Return the optimizer called ``name``; one that the operator allows is imported now."""
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


@dataclass(frozen=True)
class ParameterGroup:
    """Keys with hyper-parameters of their own, by torch's names; what is not in ``hyper`` is the optimizer's."""

    keys: tuple[Key, ...]
    hyper: dict[str, Any]


@dataclass(frozen=True)
class Optimizer:
    """A description of an optimizer.

    Groups have numbers: 0 is that of the keys that are in none, then come ``groups`` in their order.
    """

    name: str  # one of ``names()``
    lr: float
    hyper: dict[str, Any] = field(default_factory=dict)  # torch's other hyper-parameters, by torch's names
    rescale_grad: float = 1.0  # gradients are multiplied by it first
    clip_gradient: float | None = None  # then clipped to plus and minus this
    # lr_mult, wd_mult: factors to ``lr`` and ``weight_decay`` by key
    lr_mult: dict[Key, float] = field(default_factory=dict)
    wd_mult: dict[Key, float] = field(default_factory=dict)
    groups: tuple[ParameterGroup, ...] = ()  # keys with other hyper-parameters, perhaps with another ``lr``

    @cached
    def found(self) -> OptimizerClass:
        return find(self.name)

    @cached
    def whole(self) -> bool:
        return not self.found.elementwise

    @property
    def random(self) -> bool:
        return bool(getattr(self.found.cls, "random", False))

    @cached
    def rule(self) -> str:
        """What states must have in common to be those of this optimizer: its name, and options that they depend on."""
        valid = self.found.hyperparameters
        options = {name: self.hyper.get(name, valid[name]) for name in self.found.state_options}
        return " ".join([self.name, *(f"{name}={value}" for name, value in options.items() if value != valid[name])])

    def same_rule(self, other: Optimizer | None) -> bool:
        return other is not None and self.rule == other.rule

    def number_of(self, key: Key) -> int:
        return self._numbers.get(key, 0)

    def hyper_of(self, number: int) -> dict[str, Any]:
        """Return the hyper-parameters of a group, with its learning rate, as torch's constructors take them."""
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in ({"lr": self.lr} | self.hyper | self._own(number)).items()
            if name != LAZY
        }

    def lazy(self, number: int) -> bool:
        """Whether updates of a table in this group leave rows as they are that no push has a gradient for."""
        return bool((self.hyper | self._own(number)).get(LAZY, True))

    def _own(self, number: int) -> dict[str, Any]:
        return self.groups[number - 1].hyper if number else {}

    def defaults(self, number: int) -> dict[str, Any]:
        """Return all hyper-parameters of a group, those that were not given too, by torch's names."""
        return self.found.hyperparameters | self.hyper_of(number)

    def changes(self, base: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()) -> dict[tuple[int, str], Any]:
        """Return new values of hyper-parameters, of all keys and of each group, as pushes carry them."""
        if len(groups) > len(self.groups):
            raise UsageError(f"{len(groups)} groups were given, but set_optimizer had {len(self.groups)}")
        changed = {
            (number, name): plain(name, value)
            for number, given in enumerate([base, *groups])
            for name, value in _torch_names(self.name, given, self.hyper_of(number)).items()
            if name != LAZY or value != self.lazy(number)
        }
        self.require_changes(changed)
        return changed

    def require_changes(self, changes: Changes) -> dict[tuple[int, str], Any]:
        """Return the optimizer's own values of what ``changes`` has other ones of.

        Raises:
            UsageError: updates cannot go on with ``changes`` and the states that there are.
        """
        own: dict[tuple[int, str], Any] = {}
        for (number, name), value in changes.items():
            if number > len(self.groups):
                raise UsageError(f"there is no group {number}: set_optimizer had {len(self.groups)}")
            valid = self.defaults(number) | ({LAZY: self.lazy(number)} if self.found.rows else {})
            if name in MULTIPLIERS:
                valid = {name: self._multiplier(number, name)}
            if name not in valid:
                raise UnknownName(
                    f"{self.name} has no hyper-parameter {name!r}; choose from {choices(valid)}{meant(name, valid)}"
                )
            before = own[number, name] = valid[name]
            fits = (
                is_number(value) and is_number(before)
                if not isinstance(before, list | tuple)
                else isinstance(value, list | tuple) and len(value) == len(before)
            )
            if value == before or (fits and (name != "momentum" or (value and before))):
                continue
            raise UsageError(
                f"{name} cannot become {value!r} from {before!r} between updates: "
                + ("give the optimizer one from the start" if fits else "only numbers can change; call set_optimizer")
            )
        return own

    def _multiplier(self, number: int, name: str) -> float:
        """Return the factor ``name`` that all keys of a group have; raise ``UsageError`` if it is not one for all."""
        factors = self._factors.get((number, name), [1.0])
        if len(factors) > 1:
            raise UsageError(
                f"the {name} of a group cannot change if its keys have factors of their own, as here "
                f"{', '.join(f'{factor:g}' for factor in factors)}: make them groups, each with its {name}"
            )
        return factors[0]

    @cached
    def _factors(self) -> dict[tuple[int, str], list[float]]:
        """The different factors of the keys of each group, by its number and the factor's name."""
        found: dict[tuple[int, str], set[float]] = {}
        for name, factors in (("lr_mult", self.lr_mult), ("wd_mult", self.wd_mult)):
            for number, group in enumerate(self.groups, 1):
                found[number, name] = {factors.get(key, 1.0) for key in group.keys}
            # There may be other keys in no group, whose factor is 1.
            found[0, name] = {1.0} | {factor for key, factor in factors.items() if not self.number_of(key)}
        return {which: sorted(factors) for which, factors in found.items() if factors}

    @cached
    def _numbers(self) -> dict[Key, int]:
        return {key: number for number, group in enumerate(self.groups, 1) for key in group.keys}


def describe(optimizer: Any, hyperparameters: Mapping[str, Any]) -> Optimizer:
    """Return the description of an optimizer given by name, class or unused instance, and hyper-parameters.

    Args:
        optimizer: a name (any of ``names()``, upper or lower case), a class of ``torch.optim``, or an instance that has
            made no step, whose hyper-parameters are taken.
        hyperparameters: torch's names or MXNet's (``learning_rate``, ``wd``, ``beta1``, ``beta2``, ``epsilon``), and
            ``rescale_grad``, ``clip_gradient``, ``lr_mult``, ``wd_mult``; and ``groups``: dicts with ``keys`` and
            hyper-parameters that differ for these, among them ``lr_mult`` and ``wd_mult`` as numbers.
            ``lazy_update=False``, of tables, updates all rows at each update, with gradients of 0 where there are none.
            MXNet's ``multi_precision``, ``aggregate_num`` and ``use_fused_step`` change nothing.

    Raises:
        UnknownName: no such optimizer or hyper-parameter; the message lists those there are.
        UsageError: a value that is no number, a key in two groups, or an optimizer that cannot travel by name.
    """
    given = dict(hyperparameters)
    groups = given.pop("groups", ())
    name = _name_of(optimizer, grouped=bool(groups))
    rescale, clip = given.pop("rescale_grad", 1.0), given.pop("clip_gradient", None)
    lr_mult, wd_mult = _multipliers(given, "lr_mult"), _multipliers(given, "wd_mult")
    found = find(name)
    valid = found.hyperparameters
    defaults = dict(valid)
    if isinstance(optimizer, torch.optim.Optimizer):
        # Some classes are special cases of others and have defaults that they do not let anybody choose.
        own = optimizer.defaults if len(optimizer.param_groups) > 1 else optimizer.param_groups[0]
        taken = {key: value for key, value in own.items() if key in valid}
        defaults |= taken
        given = taken | _torch_names(name, given, defaults)
    hyper = _torch_names(name, given, defaults)
    if hyper.get(LAZY) is True:  # as it is without
        del hyper[LAZY]
    if name == "nag":
        hyper = {"momentum": 0.9, "nesterov": True} | hyper
    lr = finite("learning_rate", hyper.pop("lr", valid["lr"]))
    hyper = {key: plain(key, value) for key, value in sorted(hyper.items())}
    found.require(hyper)
    return Optimizer(
        name,
        lr,
        hyper,
        finite("rescale_grad", rescale),
        None if clip is None else positive("clip_gradient", clip),
        lr_mult,
        wd_mult,
        _groups(name, groups, valid | {"lr": lr} | hyper, lr_mult, wd_mult),
    )


def require_shapes(optimizer: Optimizer | None, specs: Iterable[tuple[Key, Spec]]) -> None:
    """Raise ``UsageError`` unless ``optimizer`` can update arrays, and tables, like these."""
    if optimizer is None:
        return
    dims = optimizer.found.dims
    for key, spec in specs:
        if isinstance(spec, TableSpec):
            require_rule(optimizer, spec.table.name(key), spec.table.grows)
        elif dims is not None and len(spec.shape) != dims:
            raise UsageError(
                f"{optimizer.name} updates {'matrices' if dims == 2 else f'arrays of {dims} dimensions'} only, and key "
                f"{key!r} is {spec}; put other arrays into another store, or another Trainer, with another optimizer"
            )


def require_rule(optimizer: Optimizer, key: Key, grows: bool) -> None:
    """Raise ``UsageError`` unless ``optimizer`` can update the rows of table ``key``."""
    if optimizer.found.rows is None:
        raise UsageError(
            f"{optimizer.name} cannot update key {key!r}, a table: it has no rule for rows; choose from "
            f"{', '.join(names_for_rows())}, or put the table into another store"
        )
    if grows and not optimizer.lazy(optimizer.number_of(key)):
        raise UsageError(
            f"{LAZY}=False updates all rows of a table, and key {key!r} is a table that grows: its other rows are not "
            f"there; give its keys a group with {LAZY}=True, or the table a shape"
        )


def _groups(
    name: str, given: Any, base: Mapping[str, Any], lr_mult: dict[Key, float], wd_mult: dict[Key, float]
) -> tuple[ParameterGroup, ...]:
    """Return the groups of a description; their multipliers are added to ``lr_mult`` and ``wd_mult``."""
    if isinstance(given, Mapping | str) or not isinstance(given, Sequence) or len(given) > MAX_GROUPS:
        raise UsageError(f"groups is a list of at most {MAX_GROUPS} dicts with 'keys' and hyper-parameters")
    found = find(name)
    lazy = base.get(LAZY, True)
    groups: list[ParameterGroup] = []
    seen: set[Key] = set()
    for group in given:
        if not isinstance(group, Mapping) or not isinstance(group.get("keys"), list | tuple):
            raise UsageError(f"a group is a dict with a list of 'keys' and hyper-parameters, not {group!r:.80}")
        own = {key: value for key, value in group.items() if key != "keys"}
        keys = tuple(check_key(key) for key in group["keys"])
        for key in keys:
            if key in seen:
                raise UsageError(f"key {key!r} is in two groups")
            seen.add(key)
        for which, mults in (("lr_mult", lr_mult), ("wd_mult", wd_mult)):
            if which in own:
                factor = finite(which, own.pop(which))
                mults.update({key: factor for key in keys if key not in mults})
        hyper = {key: plain(key, value) for key, value in sorted(_torch_names(name, own, base).items())}
        found.require(hyper)
        if hyper.get(LAZY) == lazy:
            del hyper[LAZY]
        for option in found.state_options:
            if hyper.get(option, base[option]) != base[option]:
                raise UsageError(f"{option} is one for all keys; pass it to set_optimizer, not with a group")
        groups.append(ParameterGroup(keys, hyper))
        if "lr" in hyper:
            finite("learning_rate", hyper["lr"])
    return tuple(groups)


def _torch_names(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` by torch's names; if only one beta is given, ``defaults`` has the other."""
    valid, aliases = find(name).hyperparameters, find(name).aliases
    named = {key: value for key, value in given.items() if key not in _IGNORED}
    if find(name).rows is None:
        named.pop(LAZY, None)
    elif LAZY in named:
        named[LAZY] = scalar(named[LAZY])
        if not isinstance(named[LAZY], bool):
            raise UsageError(f"{LAZY}={named[LAZY]!r} must be True or False")
    for old, new in aliases.items():
        if old in named:
            if new in named:
                raise UsageError(f"{old} and {new} are the same; give one of them")
            named[new] = named.pop(old)
    pair = ("beta1", "beta2") if "betas" in valid else ()
    if any(beta in named for beta in pair):
        betas = tuple(named.get("betas", defaults.get("betas", valid["betas"])))
        named["betas"] = (named.pop("beta1", betas[0]), named.pop("beta2", betas[1]))
    for key in named:
        if key not in valid and key not in (LAZY, *MULTIPLIERS):  # a change of a group may have these
            known = {*valid, "rescale_grad", "clip_gradient", *MULTIPLIERS, *aliases, *pair}
            raise UnknownName(f"{name} has no hyper-parameter {key!r}; choose from {choices(known)}{meant(key, known)}")
    return named


def _name_of(optimizer: Any, *, grouped: bool) -> str:
    if isinstance(optimizer, str):
        name = optimizer.lower()
        find(name)
        return SYNONYMS.get(name, name)
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    named = name_of(cls)
    if named is None:
        why = NOT_HERE.get(cls.__name__.lower()) if cls.__module__.startswith("torch.optim") else None
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__} cannot travel to a server"
            + (f": {why}" if why else "")
            + f"; choose from {', '.join(names())}, or allow it with KVSTORE_OPTIMIZERS"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's is there from the start
            raise UsageError("this optimizer has made steps, and its state would be lost; pass an unused one")
        if len(optimizer.param_groups) > 1 and not grouped:
            raise UsageError(
                "this optimizer has several parameter groups, of tensors; pass groups=[{'keys': [...], ...}] and a name"
            )
    return named


def _multipliers(given: dict[str, Any], name: str) -> dict[Key, float]:
    mults = given.pop(name, {})
    if not isinstance(mults, Mapping):
        raise UsageError(f"{name} maps keys to factors, it is not {type(mults).__name__}")
    return {check_key(key): finite(f"{name}[{key!r}]", value) for key, value in mults.items()}


def log_replaced(old: Optimizer | None, new: Optimizer) -> None:
    if old is not None and not new.same_rule(old):
        log.warning("set_optimizer: %s replaces %s, whose state is dropped", new.rule, old.rule)
