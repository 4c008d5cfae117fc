"""Updates with torch.optim: what an optimizer's description does to weights. Local stores and servers use the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvstore.errors import Mismatch, UsageError
from kvstore.optim import Changes, Optimizer, classes
from kvstore.spec import Key, Spec, require_floats
from kvstore.values import spec_of

_HALF = (torch.float16, torch.bfloat16)

Kind: TypeAlias = tuple[int, float, float, bool]  # see ``Group.members``


@dataclass
class Group:
    """Weights that are updated together.

    Attributes:
        params: the tensors that torch.optim knows them by.
        members: the same, by the number of their group of hyper-parameters, their multipliers of learning rate and
            weight decay, and whether they have state already: torch's fused SGD takes the first momentum it finds for
            all.
        halves: (weight, param) where the param is a float32 copy.
        stepped: whether they have been updated; then all have state.
    """

    params: list[torch.Tensor]
    members: dict[Kind, list[torch.Tensor]]
    halves: list[tuple[torch.Tensor, torch.Tensor]]
    stepped: bool = False


class Updater:
    """Updates weights with torch.optim, many at once, in place; keeps the state of each key.

    Half-precision weights are updated through a float32 copy that is part of the state, as in MXNet's
    ``multi_precision``.

    Args:
        optimizer: what to do.
        name_of: gives the name by which the optimizer's groups and multipliers know a key; by default the key itself.

    Attributes:
        lr, rescale_grad, changes: what the next updates use instead of the optimizer's own; see
            ``Optimizer.require_changes``.

    Raises:
        ValueError: torch refuses the hyper-parameters (a negative learning rate, say).
    """

    def __init__(self, optimizer: Optimizer, name_of: Callable[[Key], Key] | None = None) -> None:
        self.optimizer = optimizer
        self.lr = optimizer.lr
        self.rescale_grad = optimizer.rescale_grad
        self.changes: Changes = {}
        self._name_of = name_of or (lambda key: key)
        self._params: dict[Key, torch.Tensor] = {}
        self._masters: set[Key] = set()
        self._templates = self._settings_of(optimizer)
        self._torch = self._build(optimizer, 0, torch.zeros(1, 1))
        self._torch.state.clear()
        self._fused = bool(self._torch.defaults.get("fused"))

    def configure(self, optimizer: Optimizer) -> None:
        """Go on with other numbers for the same rule, keeping the state.

        Raises:
            ValueError: torch refuses the numbers; nothing has changed.
        """
        templates = self._settings_of(optimizer)
        fresh = [self._fresh(optimizer, number, torch.device("cpu")) for number in range(len(templates))]
        rebuilt = self._build(optimizer, 0, torch.zeros(1, 1))
        rebuilt.state = self._torch.state
        for key, param in self._params.items():  # RMSprop that has a momentum now, Adam that becomes AMSGrad
            state = rebuilt.state.get(param)
            if state is not None:
                for name in fresh[optimizer.number_of(self._name_of(key))].keys() - state.keys():
                    state[name] = torch.zeros_like(param)
        self._torch, self._templates, self.optimizer = rebuilt, templates, optimizer
        self.lr, self.rescale_grad, self.changes = optimizer.lr, optimizer.rescale_grad, {}

    def update(self, items: Sequence[tuple[Key, torch.Tensor, torch.Tensor]]) -> None:
        """Update weights in place.

        Args:
            items: (key, weight, gradient) of one shape and dtype each, floating point; the gradients are overwritten.
        """
        group = self.group([key for key, _, _ in items], [weight for _, weight, _ in items])
        grads = [
            _aligned(grad.to(param.dtype).view(param.shape), param)
            for (_, _, grad), param in zip(items, group.params, strict=True)
        ]
        self.step([group], grads, grads)

    def group(self, keys: Sequence[Key], weights: Sequence[torch.Tensor]) -> Group:
        """Prepare the update of some weights; what comes back can be used until ``configure`` is called.

        Args:
            keys: by which this updater knows the weights.
            weights: of floating point; updated in place.
        """
        params = [self._param(key, weight) for key, weight in zip(keys, weights, strict=True)]
        members: dict[Kind, list[torch.Tensor]] = {}
        for key, param in zip(keys, params, strict=True):
            members.setdefault((*self._kind(key), param in self._torch.state), []).append(param)
        halves = [(weight, param) for weight, param in zip(weights, params, strict=True) if param.dtype != weight.dtype]
        return Group(params, members, halves)

    def reads_only(self) -> bool:
        """Whether ``step`` leaves gradients as they are."""
        return self._fused and self.rescale_grad == 1.0 and self.optimizer.clip_gradient is None

    def step(self, groups: Sequence[Group], grads: Sequence[torch.Tensor], memory: list[torch.Tensor]) -> None:
        """Update the weights of ``groups``.

        Args:
            groups: whose weights to update, in one call of the optimizer.
            grads: the gradients, in the order of the groups' params, of their shapes and dtypes.
            memory: contiguous tensors that hold all of ``grads``, perhaps many in one; overwritten.
        """
        if self.rescale_grad != 1.0:
            torch._foreach_mul_(memory, self.rescale_grad)
        if self.optimizer.clip_gradient is not None:
            torch._foreach_clamp_min_(memory, -self.optimizer.clip_gradient)
            torch._foreach_clamp_max_(memory, self.optimizer.clip_gradient)
        params = groups[0].params if len(groups) == 1 else [param for group in groups for param in group.params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        by_kind: dict[Kind, list[torch.Tensor]] = {}
        for group in groups:
            for (number, lr_mult, wd_mult, old), members in group.members.items():
                kind = number, lr_mult, wd_mult, old or group.stepped
                by_kind[kind] = [*by_kind[kind], *members] if kind in by_kind else members
        changed: dict[int, dict[str, Any]] = {}
        for (number, name), value in self.changes.items():
            changed.setdefault(number, {})[name] = tuple(value) if isinstance(value, list) else value
        # Only the groups and parameters of this call: torch's step looks at all that it is given.
        self._torch.param_groups[:] = [
            self._settings(changed, *kind[:3]) | {"params": members} for kind, members in by_kind.items()
        ]
        try:
            self._torch.step()
        finally:
            for param in params:
                param.grad = None
        for group in groups:
            group.stepped = True
            for weight, param in group.halves:
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
        """Take ``states`` as those of the ``weights`` they belong to, in place of what was there.

        Raises:
            Mismatch: they are not such as the optimizer makes itself.
            UsageError: a weight cannot be updated in place. In either case nothing has changed.
        """
        self.require_states(states, weights)
        for key, state in _by_key(states).items():
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
            self._torch.state[param] = self._beside(key, param, shaped)

    def require_states(
        self, states: Mapping[tuple[Key, str], torch.Tensor], weights: Mapping[Key, torch.Tensor]
    ) -> None:
        """Raise as ``load_states`` would; what is in the weights does not matter."""
        for key, state in _by_key(states).items():
            self._require_fitting(key, weights[key], state)

    def _require_fitting(self, key: Key, weight: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Raise ``Mismatch`` unless torch can go on with ``state``: its fused steps read and write without a look."""
        name = self._name_of(key)
        require_floats([(name, spec_of(weight))])
        _require_dense(name, weight)
        model = Updater(self.optimizer, lambda _: name)
        model.update([(key, torch.zeros_like(weight), torch.zeros_like(weight))])
        wanted = {which: spec_of(value) for (_, which), value in model.states([key]).items()}
        given = {which: spec_of(value) for which, value in state.items()}
        if given != wanted:
            raise Mismatch(
                f"these are not {self.optimizer.name}'s states of key {name!r}: "
                f"{_words(given)} were given, {_words(wanted)} belong there"
            )
        if "step" in state and not 0 <= (step := float(state["step"])) < math.inf:
            raise Mismatch(f"step of key {name!r} is {step}, and counts updates")

    def _param(self, key: Key, weight: torch.Tensor) -> torch.Tensor:
        """The tensor that torch.optim knows ``key`` by: the weight's own memory, or its float32 copy."""
        param = self._params.get(key)
        half = weight.dtype in _HALF
        if param is weight:
            return param
        if (
            param is not None
            and param.stride() == weight.stride()
            and (param.device == weight.device if half else param.data_ptr() == weight.data_ptr())
        ):
            return param
        _require_dense(key, weight)
        state = self._torch.state.pop(param, None) if param is not None else None
        before = weight if param is None else param
        param = before.to(weight.device, torch.float32) if half else weight
        self._params[key] = param
        if half:
            self._masters.add(key)
        if state is None:  # Adagrad makes its state at construction
            state = self._build(self.optimizer, self._number(key), param).state.get(param)
        if state is not None:
            self._torch.state[param] = self._beside(key, param, state)
        return param

    def _beside(self, key: Key, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` where torch wants that of ``param``: on its device, but for counts that steps read on the CPU."""
        fresh = self._fresh(self.optimizer, self._number(key), param.device) if param.device.type != "cpu" else {}
        homes = {name: value.device for name, value in fresh.items() if torch.is_tensor(value)}
        return {
            name: value.to(homes.get(name, param.device)) if torch.is_tensor(value) else value
            for name, value in state.items()
        }

    @classmethod
    def _fresh(cls, optimizer: Optimizer, number: int, device: torch.device) -> dict[str, Any]:
        """The state that a parameter of group ``number`` on ``device`` has after a first step."""
        probe = torch.zeros(1, 1, device=device)
        probe.grad = torch.zeros_like(probe)
        made = cls._build(optimizer, number, probe)
        made.step()
        return dict(made.state[probe])

    def _number(self, key: Key) -> int:
        return self.optimizer.number_of(self._name_of(key))

    def _kind(self, key: Key) -> tuple[int, float, float]:
        name = self._name_of(key)
        return (
            self.optimizer.number_of(name),
            self.optimizer.lr_mult.get(name, 1.0),
            self.optimizer.wd_mult.get(name, 1.0),
        )

    def _settings(
        self, changed: Mapping[int, Mapping[str, Any]], number: int, lr_mult: float, wd_mult: float
    ) -> dict[str, Any]:
        """What torch should update a group with, now."""
        own = self.optimizer.groups[number - 1].hyper if number else {}
        common = {"lr": self.lr, **changed.get(0, {})}
        made = self._templates[number] | {name: value for name, value in common.items() if name not in own}
        made |= changed.get(number, {})
        made["lr"] *= lr_mult
        if "weight_decay" in made:
            made["weight_decay"] *= wd_mult
        return made

    @classmethod
    def _settings_of(cls, optimizer: Optimizer) -> list[dict[str, Any]]:
        """What torch makes of the hyper-parameters of each group, by number."""
        made = [cls._build(optimizer, number, torch.zeros(1, 1)) for number in range(len(optimizer.groups) + 1)]
        return [{name: value for name, value in its.param_groups[0].items() if name != "params"} for its in made]

    @staticmethod
    def _build(optimizer: Optimizer, number: int, param: torch.Tensor) -> torch.optim.Optimizer:
        cls: Callable[..., torch.optim.Optimizer] = classes()[optimizer.name]
        how = {"fused": True} if "fused" in inspect.signature(cls).parameters else {}
        return cls([param], **optimizer.hyper_of(number), **how)


@contextmanager
def refusals(optimizer: Optimizer) -> Iterator[None]:
    """Turn torch's refusal of hyper-parameters into the caller's error; for updaters in the caller's process."""
    try:
        yield
    except (ValueError, TypeError) as exc:
        raise UsageError(f"{optimizer.name}: {exc}") from None


def _require_dense(key: Key, weight: torch.Tensor) -> None:
    if torch.empty_like(weight).stride() != weight.stride():
        raise UsageError(f"the weight of {key!r} is a view with gaps, which cannot be updated in place")


def _by_key(states: Mapping[tuple[Key, str], torch.Tensor]) -> dict[Key, dict[str, torch.Tensor]]:
    found: dict[Key, dict[str, torch.Tensor]] = {}
    for (key, name), value in states.items():
        found.setdefault(key, {})[name] = value
    return found


def _words(specs: Mapping[str, Spec]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in specs.items()) or "none"


def _aligned(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the strides of ``param``: fused steps go through memory in order, whatever the strides."""
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
