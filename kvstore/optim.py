"""Optimizers by name: a description that can travel, and the updater that runs it on torch.optim.

A description is a name and numbers, nothing else. Local stores and servers build the same ``Updater`` from it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import UnknownName, UsageError, choices
from kvstore.spec import Key, check_key

log = logging.getLogger(__name__)

# Names that MXNet gives to what torch calls otherwise.
ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
# These need a closure, sparse gradients, or decide how to run rather than what to compute.
_NOT_HERE = frozenset({"LBFGS", "SparseAdam", "Optimizer"})
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
# These look at the shape of the whole tensor, so servers must not hold it in pieces.
_WHOLE = frozenset({"adafactor", "muon"})
_HALF = (torch.float16, torch.bfloat16)
# What the wire allows for one hyper-parameter.
MAX_TEXT = 64
MAX_LIST = 8


@functools.cache
def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in _NOT_HERE
    }
    return found | {"nag": torch.optim.SGD}


def names() -> list[str]:
    """The optimizers that can be set by name."""
    return sorted(_classes())


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


class Updater:
    """Updates weights with torch.optim, many at once, in place; keeps the state of each key.

    Half-precision weights are updated through a float32 copy that is part of the state, as in MXNet's
    ``multi_precision``.

    Args:
        optimizer: what to do.

    Raises:
        ValueError: torch refuses the hyper-parameters (a negative learning rate, say).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.lr = optimizer.lr
        self.rescale_grad = optimizer.rescale_grad
        self._params: dict[Key, torch.Tensor] = {}
        self._masters: set[Key] = set()
        self._torch = self._build(optimizer, torch.zeros(1, 1))
        self._torch.state.clear()

    def configure(self, optimizer: Optimizer) -> None:
        """Go on with other numbers for the same rule, keeping the state.

        Raises:
            ValueError: torch refuses the numbers; nothing has changed.
        """
        rebuilt, fresh = self._build(optimizer, torch.zeros(1, 1)), self._fresh(optimizer, torch.device("cpu"))
        rebuilt.state = self._torch.state
        for param, state in rebuilt.state.items():  # RMSprop that has a momentum now, Adam that becomes AMSGrad
            for name in [name for name in fresh if name not in state]:
                state[name] = torch.zeros_like(param)
        self._torch, self.optimizer = rebuilt, optimizer
        self.lr, self.rescale_grad = optimizer.lr, optimizer.rescale_grad

    def update(
        self,
        items: Sequence[tuple[Key, torch.Tensor, torch.Tensor]],
        name_of: Callable[[Key], Key] = lambda key: key,
    ) -> None:
        """Update weights in place.

        Args:
            items: (key, weight, gradient) of one shape and dtype each, floating point; the gradients are overwritten.
            name_of: the name under which ``lr_mult`` and ``wd_mult`` know a key.
        """
        params, grads = [], []
        for key, weight, grad in items:
            param = self._param(key, weight)
            params.append(param)
            grads.append(_aligned(grad.to(param.dtype).view(param.shape), param))
        if self.rescale_grad != 1.0:
            torch._foreach_mul_(grads, self.rescale_grad)
        if self.optimizer.clip_gradient is not None:
            torch._foreach_clamp_min_(grads, -self.optimizer.clip_gradient)
            torch._foreach_clamp_max_(grads, self.optimizer.clip_gradient)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        by_group: dict[tuple[float, float], list[torch.Tensor]] = {}
        for (key, _, _), param in zip(items, params, strict=True):
            by_group.setdefault(self._multipliers(name_of(key)), []).append(param)
        wd = self._torch.defaults.get("weight_decay", 0.0)
        template = {k: v for k, v in self._torch.param_groups[0].items() if k not in ("params", "lr", "weight_decay")}
        # Only the groups and parameters of this call: torch's step looks at all that it is given.
        self._torch.param_groups[:] = [
            template | {"params": members, "lr": self.lr * lr_mult, "weight_decay": wd * wd_mult}
            for (lr_mult, wd_mult), members in by_group.items()
        ] or [template | {"params": [], "lr": self.lr, "weight_decay": wd}]
        try:
            self._torch.step()
        finally:
            for param in params:
                param.grad = None
        for (_, weight, _), param in zip(items, params, strict=True):
            if param.dtype != weight.dtype:
                weight.copy_(param)

    def states(self, keys: Iterable[Key]) -> dict[tuple[Key, str], torch.Tensor]:
        """Return the state of ``keys``, those that have any, by (key, name of the state); numbers are 0-dim."""
        found: dict[tuple[Key, str], torch.Tensor] = {}
        for key in keys:
            param = self._params.get(key)
            if param is None:
                continue
            if key in self._masters:
                found[key, "master"] = param
            for name, value in self._torch.state.get(param, {}).items():
                if value is not None:
                    found[key, name] = torch.as_tensor(value)
        return found

    def load_states(self, states: Mapping[tuple[Key, str], torch.Tensor], weights: Mapping[Key, torch.Tensor]) -> None:
        """Take ``states`` as those of the ``weights`` they belong to, in place of what was there."""
        by_key: dict[Key, dict[str, torch.Tensor]] = {}
        for (key, name), value in states.items():
            by_key.setdefault(key, {})[name] = value
        for key, state in by_key.items():
            param = self._param(key, weights[key])
            master = state.pop("master", None)
            if master is not None:
                param.copy_(master.view(param.shape))
            shaped = {
                name: _aligned(value.clone().view(param.shape), param)
                if value.numel() == param.numel() and value.dim()
                else value.clone()
                for name, value in state.items()
            }
            self._torch.state[param] = self._beside(param, shaped)

    def _param(self, key: Key, weight: torch.Tensor) -> torch.Tensor:
        """The tensor that torch.optim knows ``key`` by: the weight's own memory, or its float32 copy."""
        if torch.empty_like(weight).stride() != weight.stride():
            raise UsageError(f"the weight of {key!r} is a view with gaps, which cannot be updated in place")
        param = self._params.get(key)
        half = weight.dtype in _HALF
        if param is not None and (param.device == weight.device if half else param.data_ptr() == weight.data_ptr()):
            return param
        state = self._torch.state.pop(param, None) if param is not None else None
        before = weight if param is None else param
        param = before.to(weight.device, torch.float32) if half else weight
        self._params[key] = param
        if half:
            self._masters.add(key)
        if state is None:  # Adagrad makes its state at construction
            state = self._build(self.optimizer, param).state.get(param)
        if state is not None:
            self._torch.state[param] = self._beside(param, state)
        return param

    def _beside(self, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` where torch wants that of ``param``: on its device, but for counts that steps read on the CPU."""
        fresh = self._fresh(self.optimizer, param.device) if param.device.type != "cpu" else {}
        homes = {name: value.device for name, value in fresh.items() if torch.is_tensor(value)}
        return {
            name: value.to(homes.get(name, param.device)) if torch.is_tensor(value) else value
            for name, value in state.items()
        }

    @classmethod
    def _fresh(cls, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
        """The state that a parameter on ``device`` has after a first step."""
        probe = torch.zeros(1, 1, device=device)
        probe.grad = torch.zeros_like(probe)
        made = cls._build(optimizer, probe)
        made.step()
        return dict(made.state[probe])

    def _multipliers(self, name: Key) -> tuple[float, float]:
        return self.optimizer.lr_mult.get(name, 1.0), self.optimizer.wd_mult.get(name, 1.0)

    @staticmethod
    def _build(optimizer: Optimizer, param: torch.Tensor) -> torch.optim.Optimizer:
        cls: Callable[..., torch.optim.Optimizer] = _classes()[optimizer.name]
        arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in optimizer.hyper.items()}
        if "fused" in inspect.signature(cls).parameters:
            arguments["fused"] = True
        return cls([param], lr=optimizer.lr, **arguments)


def _aligned(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the strides of ``param``: fused steps go through memory in order, whatever the strides."""
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _name_of(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name in _classes():
            return name
        raise UnknownName(f"no optimizer {optimizer!r}; choose from {', '.join(names())}")
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = cls.__name__.lower()
    if _classes().get(name) is not cls:
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
    parameters = inspect.signature(_classes()[name]).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in _HOW}


def _multipliers(given: dict[str, Any], name: str) -> dict[Key, float]:
    mults = given.pop(name, {})
    if not isinstance(mults, Mapping):
        raise UsageError(f"{name} maps keys to factors, it is not {type(mults).__name__}")
    return {check_key(key): finite(f"{name}[{key!r}]", value) for key, value in mults.items()}


def _plain(name: str, value: Any) -> Any:
    """``value`` as the wire can carry it: a number, bool, text, None, or a list of numbers."""
    if isinstance(value, str | list | tuple) and len(value) > (MAX_TEXT if isinstance(value, str) else MAX_LIST):
        raise UsageError(f"{name} is too long: at most {MAX_TEXT} characters, or {MAX_LIST} numbers")
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
