"""Updates with torch.optim: what an optimizer's description does to weights. Local stores and servers use the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from kvstore.errors import Mismatch, UsageError, WeightsInDoubt
from kvstore.optim.fused import FusedGroup, FusedParameter, Kind, alike, joined
from kvstore.optim.optimizer import Changes, Optimizer, classes
from kvstore.spec import Key, Spec, require_floats
from kvstore.values import spec_of, split_like

_HALF = (torch.float16, torch.bfloat16)
_NO_STATE: Mapping[str, torch.Tensor] = {}

Rates: TypeAlias = tuple[int, float, float]  # see ``Updater._rates``


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
        self._parameters: dict[Key, FusedParameter] = {}
        self._loose: dict[Key, dict[str, torch.Tensor]] = {}  # states of keys that are in no parameter
        self._templates = self._settings_of(optimizer)
        self._torch = self._build(optimizer, 0, torch.zeros(1, 1))
        self._begins = bool(self._torch.state)  # whether there is state before the first step, as Adagrad's
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
        rebuilt.state.clear()
        for key in list(self._parameters):  # numbers of groups and multipliers are other ones now
            self._loosen(key)
        for key, state in self._loose.items():
            its = fresh[optimizer.number_of(self._name_of(key))]
            like = [state[name] for name in state.keys() & its.keys() if torch.is_tensor(its[name]) and its[name].dim()]
            for name in its.keys() - state.keys() if like else ():
                state[name] = torch.zeros_like(like[0])  # RMSprop that has a momentum now, Adam that becomes AMSGrad
        self._torch, self._templates, self.optimizer = rebuilt, templates, optimizer
        self.lr, self.rescale_grad, self.changes = optimizer.lr, optimizer.rescale_grad, {}

    def update(self, items: Sequence[tuple[Key, torch.Tensor, torch.Tensor]]) -> None:
        """Update weights in place.

        Args:
            items: (key, weight, gradient) of one shape and dtype each, floating point; the gradients are overwritten.
        """
        parameters = [self._alone(key, weight) for key, weight, _ in items]
        kinds = list(map(self._kind, parameters, self._rates([key for key, _, _ in items])))
        group = FusedGroup(parameters, kinds, [weight for _, weight, _ in items])
        grads = [
            _aligned(grad.to(param.dtype).view(param.shape), param)
            for (_, _, grad), param in zip(items, group.params, strict=True)
        ]
        self.step([group], [grads])

    def group(self, keys: Sequence[Key], shapes: Sequence[Sequence[int]], flat: torch.Tensor) -> FusedGroup:
        """Prepare the update of weights that lie back to back, those that are updated alike as one.

        What comes back can be used until another is made with one of ``keys``, or ``configure`` or ``load_states`` is
        called.

        Args:
            keys: by which this updater knows the weights.
            shapes: theirs.
            flat: the weights, flat and contiguous, of floating point; updated in place.
        """
        for key in keys:
            self._loosen(key)
        rates = self._rates(keys)
        sizes = [math.prod(shape) for shape in shapes]
        ranges = [(place, place + 1) for place in range(len(keys))]
        if not self.optimizer.whole:
            ranges = alike(list(map(self._likeness, keys, rates)), sizes)
        parts = split_like(flat, [sum(sizes[start:stop]) for start, stop in ranges])
        weights = [
            part.view(shapes[start]) if stop - start == 1 else part
            for (start, stop), part in zip(ranges, parts, strict=True)
        ]
        parameters = self._new_parameters([(keys[start:stop], shapes[start:stop]) for start, stop in ranges], weights)
        kinds = [self._kind(parameter, rates[start]) for parameter, (start, _) in zip(parameters, ranges, strict=True)]
        return FusedGroup(parameters, kinds, weights, flat)

    def reads_only(self) -> bool:
        """Whether ``step`` leaves gradients as they are."""
        return self._fused and self.rescale_grad == 1.0 and self.optimizer.clip_gradient is None

    def step(self, groups: Sequence[FusedGroup], grads: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Update the weights of ``groups``: all, or none if the optimizer fails.

        Args:
            groups: whose weights to update, those with the same numbers in one call of the optimizer.
            grads: of each group, of the dtype of its params; see ``FusedGroup.take``. They are overwritten.

        Raises:
            WeightsInDoubt: the optimizer failed when it had updated some of them.
        """
        memory = [part for its in grads for part in ([its] if isinstance(its, torch.Tensor) else its)]
        if self.rescale_grad != 1.0:
            torch._foreach_mul_(memory, self.rescale_grad)
        if self.optimizer.clip_gradient is not None:
            torch._foreach_clamp_min_(memory, -self.optimizer.clip_gradient)
            torch._foreach_clamp_max_(memory, self.optimizer.clip_gradient)
        by_kind: dict[Kind, list[torch.Tensor]] = {}
        for group in groups:
            for (*same, old), members in group.members.items():
                kind: Kind = (*same, old or group.stepped)  # type: ignore[assignment]
                by_kind[kind] = [*by_kind[kind], *members] if kind in by_kind else members
        changed: dict[int, dict[str, Any]] = {}
        for (number, name), value in self.changes.items():
            changed.setdefault(number, {})[name] = tuple(value) if isinstance(value, list) else value
        try:
            for group, its in zip(groups, grads, strict=True):
                group.take(its)
            for place, ((number, lr_mult, wd_mult, _, _, old), members) in enumerate(by_kind.items()):
                self._call(self._settings(changed, number, lr_mult, wd_mult), members, first=not place, old=old)
        finally:
            for group in groups:
                group.drop()
        for group in groups:
            group.finish()

    def _call(self, settings: Mapping[str, Any], params: Sequence[torch.Tensor], *, first: bool, old: bool) -> None:
        """Update ``params``, which have one dtype and are on one device, in one call of the optimizer.

        A fused step is one kernel, which runs or does not. What other steps have changed, the tensors' versions tell.

        Args:
            first: whether nothing else of the same update has been changed before.
            old: whether they have state already, if they have any.
        """
        # Only the group and parameters of this call: torch's step looks at all that it is given.
        self._torch.param_groups[:] = [{**settings, "params": params}]
        before = [] if self._fused else self._versions(params)
        try:
            self._torch.step()
        except Exception as exc:
            for param in () if old else params:
                self._torch.state.pop(param, None)
            if first and all(tensor._version == version for tensor, version in before):
                raise
            raise WeightsInDoubt(
                f"{self.optimizer.name} failed in the middle of an update, of which a part has been made: {exc!r}"
            ) from exc

    def _versions(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Return ``params`` and their states, and how often torch has changed each in place."""
        tensors = [value for param in params for value in (param, *self._torch.state.get(param, {}).values())]
        return [(value, value._version) for value in tensors if torch.is_tensor(value) and value.dim()]

    def states(self, keys: Iterable[Key]) -> dict[tuple[Key, str], torch.Tensor]:
        """Return the state of ``keys``, those that have any, by (key, name of the state); numbers are 0-dim."""
        found: dict[tuple[Key, str], torch.Tensor] = {}
        for key in keys:
            its = self._loose.get(key, {})
            parameter = self._parameters.get(key)
            if parameter is not None:
                its = parameter.state(key, self._torch.state.get(parameter.param, {}))
            found |= {(key, name): value for name, value in its.items()}
        return found

    def load_states(self, states: Mapping[tuple[Key, str], torch.Tensor], weights: Mapping[Key, torch.Tensor]) -> None:
        """Take ``states`` as those of the ``weights`` they belong to, in place of what was there.

        Raises:
            Mismatch: they are not such as the optimizer makes itself.
            UsageError: a weight cannot be updated in place. In either case nothing has changed.
        """
        self.require_states(states, weights)
        for key, state in _by_key(states).items():
            self._loosen(key)
            self._loose[key] = {name: value.clone() for name, value in state.items()}

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

    def _alone(self, key: Key, weight: torch.Tensor) -> FusedParameter:
        """The parameter of ``key`` over its weight, wherever that is now."""
        parameter = self._parameters.get(key)
        if parameter is not None and len(parameter.keys) == 1:
            param = parameter.param
            if param is weight:
                return parameter
            if param.stride() == weight.stride() and (
                param.device == weight.device if parameter.master else param.data_ptr() == weight.data_ptr()
            ):
                return parameter
        _require_dense(key, weight)
        self._loosen(key)
        (parameter,) = self._new_parameters([([key], [weight.shape])], [weight])
        return parameter

    def _new_parameters(
        self, members: Sequence[tuple[Sequence[Key], Sequence[Sequence[int]]]], weights: Sequence[torch.Tensor]
    ) -> list[FusedParameter]:
        """Make a parameter of each list of keys, which are in none, and shapes: with the states that the keys have."""
        made: list[FusedParameter] = []
        new: dict[int, list[tuple[Key, torch.Tensor]]] = {}  # by number of the group, those that have no state
        for (keys, shapes), weight in zip(members, weights, strict=True):
            parameter, state = self._new_parameter(keys, shapes, weight)
            made.append(parameter)
            if state:
                own = {
                    n: _aligned(v, parameter.param) if v.shape == parameter.param.shape else v for n, v in state.items()
                }
                self._torch.state[parameter.param] = self._beside(keys[0], parameter.param, own)
            elif self._begins:
                new.setdefault(self._number(keys[0]), []).append((keys[0], parameter.param))
        for number, pairs in new.items():
            states = self._build(self.optimizer, number, *(param for _, param in pairs)).state
            self._torch.state |= {param: self._beside(key, param, states[param]) for key, param in pairs}
        return made

    def _new_parameter(
        self, keys: Sequence[Key], shapes: Sequence[Sequence[int]], weight: torch.Tensor
    ) -> tuple[FusedParameter, dict[str, torch.Tensor]]:
        """Return a new parameter: over its weights, or with a master of them; and the state that its keys have."""
        given = [self._loose.pop(key, _NO_STATE) for key in keys]
        state = {name: joined([its[name] for its in given]) for name in given[0]}
        master = weight.dtype in _HALF
        param = weight
        if master:
            param = _aligned(state.pop("master", weight).to(weight.device, torch.float32), weight)
        parameter = FusedParameter(tuple(keys), tuple(shapes), param, master)
        self._parameters.update(dict.fromkeys(keys, parameter))
        return parameter, state

    def _loosen(self, key: Key) -> None:
        """Take the parameter apart that ``key`` is in, if it is in one: each of its keys has its own state again."""
        parameter = self._parameters.get(key)
        if parameter is None:
            return
        state = self._torch.state.pop(parameter.param, {})
        for member in parameter.keys:
            del self._parameters[member]
            if its := parameter.state(member, state):
                self._loose[member] = its

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

    def _likeness(self, key: Key, rates: Rates) -> Hashable:
        """What keys must have in common to be updated as one; of a key that is in no parameter."""
        state = self._loose.get(key)
        if state is None:
            return rates
        counts = sorted((name, float(value)) for name, value in state.items() if not value.dim())
        return *rates, frozenset(state), tuple(counts)

    def _kind(self, parameter: FusedParameter, rates: Rates) -> Kind:
        return *rates, parameter.param.dtype, parameter.param.device, parameter.param in self._torch.state

    def _rates(self, keys: Sequence[Key]) -> list[Rates]:
        """For each key the number of its group of hyper-parameters, and its multipliers of rate and weight decay."""
        optimizer = self.optimizer
        if not (optimizer.groups or optimizer.lr_mult or optimizer.wd_mult):
            return [(0, 1.0, 1.0)] * len(keys)
        names = map(self._name_of, keys)
        return [
            (optimizer.number_of(name), optimizer.lr_mult.get(name, 1.0), optimizer.wd_mult.get(name, 1.0))
            for name in names
        ]

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
    def _build(optimizer: Optimizer, number: int, *params: torch.Tensor) -> torch.optim.Optimizer:
        cls: Callable[..., torch.optim.Optimizer] = classes()[optimizer.name]
        how = {"fused": True} if "fused" in inspect.signature(cls).parameters else {}
        return cls(params, **optimizer.hyper_of(number), **how)


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
