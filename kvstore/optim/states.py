"""The states that an optimizer keeps of each key: momentum, counts of steps, float32 copies of half-precision weights.

torch.optim keeps one state for each parameter, and a parameter may hold several keys (see ``fused``). This module keeps
one state for each key, however keys are fused. A key's state may belong to no parameter at all: after it has been
loaded, or while keys are being fused in another way.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from kvstore import wire
from kvstore.errors import Mismatch, UsageError
from kvstore.optim.fused import FusedParameter, Kind, joined
from kvstore.optim.optimizer import Optimizer
from kvstore.optim.optimizer_class import COUNT
from kvstore.optim.param_groups import ParamGroups, Rates, build, first_state
from kvstore.spec import Key, Spec, require_floats
from kvstore.values import from_buffer, spec_of, split_like, to_buffer

StateTensors: TypeAlias = "dict[tuple[Key, str], torch.Tensor]"  # by (key, name of the state); numbers are 0-dim
StateParts: TypeAlias = "list[tuple[Sequence[Key], str, torch.Tensor]]"  # keys, name of the state, and its value

_HALF = (torch.float16, torch.bfloat16)
_NO_STATE: Mapping[str, torch.Tensor] = {}


class StateStore:
    """The states of all keys of one optimizer, and the parameters that the keys are in.

    Args:
        groups: the optimizer's; see ``configure``.
    """

    def __init__(self, groups: ParamGroups) -> None:
        # torch's own: the state of each parameter that has one. torch.optim reads and writes it.
        self.by_param: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._groups = groups
        self._parameters: dict[Key, FusedParameter] = {}
        self._loose: dict[Key, dict[str, torch.Tensor]] = {}  # states of keys that are in no parameter
        # Whether there is state before the first step, as Adagrad's.
        self._early = bool(build(groups.optimizer, 0, torch.zeros(1, 1, dtype=torch.float32, device="cpu")).state)

    def configure(self, groups: ParamGroups) -> None:
        """Keep the states for another description of the same rule; no key is in a parameter after that.

        A state that the new description does not use is dropped, as rows drop theirs: a checkpoint could not be
        resumed with it, because ``require`` compares with what this description makes.
        """
        firsts, before = _first_states(groups.optimizer), _first_states(self._groups.optimizer)
        for key in list(self._parameters):  # numbers of groups and multipliers are other ones now
            self.release(key)
        unused = {key: before[self._groups.number(key)].keys() for key in self._loose}
        self._groups = groups
        for key, state in self._loose.items():
            first = firsts[groups.number(key)]
            for name in unused[key] - first.keys():  # no other: some states begin later than with the first step
                state.pop(name, None)
            arrays = [
                state[name]
                for name in state.keys() & first.keys()
                if torch.is_tensor(first[name]) and first[name].dim()
            ]
            for name in first.keys() - state.keys() if arrays else ():
                state[name] = torch.zeros_like(arrays[0])  # RMSprop that has a momentum now, Adam that becomes AMSGrad
        self._loose = {key: state for key, state in self._loose.items() if state}

    # ---- out, and in

    def of(self, keys: Iterable[Key]) -> StateTensors:
        states: StateTensors = {}
        for key in keys:
            state: Mapping[str, torch.Tensor] = self._loose.get(key, _NO_STATE)
            parameter = self._parameters.get(key)
            if parameter is not None:
                state = parameter.state(key, self.by_param.get(parameter.tensor, _NO_STATE))
            states |= {(key, name): value for name, value in state.items()}
        return states

    def parts(self, keys: Iterable[Key]) -> StateParts:
        """Return the states of ``keys``, those of keys that are fused as one tensor."""
        parts: StateParts = []
        seen: set[int] = set()
        for key in keys:
            parameter = self._parameters.get(key)
            if parameter is None:
                parts += [((key,), name, value) for name, value in self._loose.get(key, _NO_STATE).items()]
            elif id(parameter) not in seen:
                seen.add(id(parameter))
                whole = parameter.whole(self.by_param.get(parameter.tensor, _NO_STATE))
                parts += [(parameter.keys, name, value) for name, value in whole.items()]
        return parts

    def load(self, states: Mapping[tuple[Key, str], torch.Tensor], weights: Mapping[Key, torch.Tensor]) -> None:
        """Take ``states`` as those of the ``weights`` they belong to, in place of what was there.

        Raises:
            Mismatch: they are not such as the optimizer makes itself.
            UsageError: a weight cannot be updated in place. In either case nothing has changed.
        """
        self.require(states, weights)
        self.restore(states)

    def restore(self, states: Mapping[tuple[Key, str], torch.Tensor]) -> None:
        """``load`` states that the same optimizer has made for the same weights, in another process."""
        for key, state in _by_key(states).items():
            self.release(key)
            self._loose[key] = {name: value.clone() for name, value in state.items()}

    def require(self, states: Mapping[tuple[Key, str], torch.Tensor], weights: Mapping[Key, torch.Tensor]) -> None:
        """Raise as ``load`` would; what is in the weights does not matter."""
        for key, state in _by_key(states).items():
            self._require_fitting(key, weights[key], state)

    def _require_fitting(self, key: Key, weight: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Raise ``Mismatch`` unless torch can go on with ``state``: its fused steps read and write without a look."""
        name = self._groups.name_of(key)
        require_floats([(name, spec_of(weight))])
        _require_dense(name, weight)
        expected = self._specs_after_a_step(key, weight)
        given = {which: spec_of(value) for which, value in state.items()}
        unstepped = (
            {"master": expected["master"]} if "master" in expected else {}
        )  # SGD without momentum keeps no other state
        if given not in (expected, unstepped):
            raise Mismatch(
                f"these are not {self._groups.optimizer.name}'s states of key {name!r}: "
                f"{_words(given)} were given, {_words(expected)} belong there"
            )
        for count in state.keys() & {"step", COUNT}:
            if not 0 <= (step := float(state[count])) < math.inf:
                raise Mismatch(f"{count} of key {name!r} is {step}, and counts updates")

    def _specs_after_a_step(self, key: Key, weight: torch.Tensor) -> dict[str, Spec]:
        model = StateStore(self._groups)
        tensor = model.alone(key, torch.zeros_like(weight)).tensor
        tensor.grad = torch.zeros_like(tensor)
        stepped = build(self._groups.optimizer, self._groups.number(key), tensor)
        stepped.state = model.by_param
        stepped.step()
        return {name: spec_of(value) for (_, name), value in model.of([key]).items()}

    # ---- which parameters the keys are in

    def alone(self, key: Key, weight: torch.Tensor) -> FusedParameter:
        """Return the parameter that is ``key`` alone, over its weight, wherever that is now."""
        parameter = self._parameters.get(key)
        if parameter is not None and len(parameter.keys) == 1:
            tensor = parameter.tensor
            if tensor is weight:
                return parameter
            if tensor.stride() == weight.stride() and (
                tensor.device == weight.device if parameter.master else tensor.data_ptr() == weight.data_ptr()
            ):
                return parameter
        _require_dense(key, weight)
        self.release(key)
        (parameter,) = self.fuse([([key], [weight.shape])], [weight])
        return parameter

    def fuse(
        self, members: Sequence[tuple[Sequence[Key], Sequence[Sequence[int]]]], weights: Sequence[torch.Tensor]
    ) -> list[FusedParameter]:
        """Return new parameters, with the states that their keys have."""
        parameters: list[FusedParameter] = []
        stateless: dict[int, list[tuple[Key, torch.Tensor]]] = {}  # by number of the group
        for (keys, shapes), weight in zip(members, weights, strict=True):
            parameter, state = self._fused(keys, shapes, weight)
            parameters.append(parameter)
            tensor = parameter.tensor
            if state:
                own = {
                    n: aligned(value, tensor) if value.shape == tensor.shape else value for n, value in state.items()
                }
                self.by_param[tensor] = self._placed(keys[0], tensor, own)
            elif self._early:
                stateless.setdefault(self._groups.number(keys[0]), []).append((keys[0], tensor))
        for number, pairs in stateless.items():
            states = build(self._groups.optimizer, number, *(tensor for _, tensor in pairs)).state
            self.by_param |= {tensor: self._placed(key, tensor, states[tensor]) for key, tensor in pairs}
        return parameters

    def _fused(
        self, keys: Sequence[Key], shapes: Sequence[Sequence[int]], weight: torch.Tensor
    ) -> tuple[FusedParameter, dict[str, torch.Tensor]]:
        """Return a new parameter: over its weights, or with a master of them; and the state that its keys have."""
        loose = [self._loose.pop(key, _NO_STATE) for key in keys]
        state = {name: joined([state[name] for state in loose]) for name in loose[0]}
        master = weight.dtype in _HALF
        tensor = weight
        if master:
            tensor = aligned(state.pop("master", weight).to(weight.device, torch.float32), weight)
        parameter = FusedParameter(tuple(keys), tuple(shapes), tensor, master)
        self._parameters.update(dict.fromkeys(keys, parameter))
        return parameter, state

    def release(self, key: Key) -> None:
        """Take the parameter apart that ``key`` is in, if it is in one: each of its keys has its own state again."""
        parameter = self._parameters.get(key)
        if parameter is None:
            return
        shared = self.by_param.pop(parameter.tensor, {})
        for member in parameter.keys:
            del self._parameters[member]
            if state := parameter.state(member, shared):
                self._loose[member] = state

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            self.by_param.pop(param, None)

    def likeness(self, key: Key, rates: Rates) -> Hashable:
        """Return what keys must have in common to be fused, for a key that is in no parameter."""
        state = self._loose.get(key)
        if state is None:
            return rates
        counts = sorted((name, float(value)) for name, value in state.items() if not value.dim())
        return *rates, frozenset(state), tuple(counts)

    def kind(self, parameter: FusedParameter, rates: Rates) -> Kind:
        """Return what parameters must have in common to be updated in one call of torch's."""
        return *rates, parameter.tensor.dtype, parameter.tensor.device, parameter.tensor in self.by_param

    def _placed(self, key: Key, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` where torch wants that of ``param``: on its device, but for counts that steps read on the CPU."""
        optimizer, number = self._groups.optimizer, self._groups.number(key)
        first = first_state(optimizer, number, param.device) if param.device.type != "cpu" else {}
        devices = {name: value.device for name, value in first.items() if torch.is_tensor(value)}
        return {
            name: value.to(devices.get(name, param.device)) if torch.is_tensor(value) else value
            for name, value in state.items()
        }


def aligned(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the strides of ``param``: fused steps go through memory in order, whatever the strides."""
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _require_dense(key: Key, weight: torch.Tensor) -> None:
    if torch.empty_like(weight).stride() != weight.stride():
        raise UsageError(
            f"the weight of {key!r} has gaps between its elements (strides {tuple(weight.stride())} for shape "
            f"{tuple(weight.shape)}), and cannot be updated in place; pass a contiguous one"
        )


def _first_states(optimizer: Optimizer) -> list[dict[str, Any]]:
    cpu = torch.device("cpu")
    return [first_state(optimizer, number, cpu) for number in range(len(optimizer.groups) + 1)]


def _by_key(states: Mapping[tuple[Key, str], torch.Tensor]) -> dict[Key, dict[str, torch.Tensor]]:
    by_key: dict[Key, dict[str, torch.Tensor]] = {}
    for (key, name), value in states.items():
        by_key.setdefault(key, {})[name] = value
    return by_key


def _words(specs: Mapping[str, Spec]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in specs.items()) or "none"


class SegmentState(NamedTuple):
    """One tensor of the state of segment ``id``."""

    id: int
    name: str
    value: torch.Tensor


def pack_states(states: Iterable[SegmentState]) -> dict[str, Any]:
    """Return the fields of ``OptimizerStates`` and ``PutStates`` that carry ``states``: their tensors, not copies."""
    listed = [SegmentState(number, name, value.detach().contiguous()) for number, name, value in states]
    specs = [spec_of(state.value) for state in listed]
    return {
        "ids": [state.id for state in listed],
        "names": [state.name for state in listed],
        "shapes": [list(spec.shape) for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "buffers": wire.pack_arrays([to_buffer(state.value) for state in listed]),
    }


def unpack_states(message: wire.OptimizerStates | wire.PutStates | wire.StatesState) -> list[SegmentState]:
    """Return the states that a message carries, in its own memory."""
    values = _unpacked(message, message.buffers)
    return list(map(SegmentState, message.ids, message.names, values))


def pack_parts(parts: Iterable[tuple[Sequence[int], str, torch.Tensor]]) -> tuple[dict[str, Any], list[wire.Buffer]]:
    """Return the fields of ``Updated`` that describe states, and the frames of these: their tensors, not copies."""
    listed = list(parts)
    specs = [spec_of(value) for _, _, value in listed]
    fields = {
        "owners": [number for numbers, _, _ in listed for number in numbers],
        "counts": [len(numbers) for numbers, _, _ in listed],
        "names": [name for _, name, _ in listed],
        "shapes": [list(spec.shape) for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
    }
    return fields, wire.pack_arrays([to_buffer(value) for _, _, value in listed])


def unpack_parts(
    message: wire.Updated, frames: Sequence[wire.Buffer], shapes: Mapping[int, Sequence[int]]
) -> dict[tuple[Key, str], torch.Tensor]:
    """Return the states that ``message`` describes and ``frames`` carry, by segment and name, in their memory."""
    owners = iter(message.owners)
    states: dict[tuple[Key, str], torch.Tensor] = {}
    for count, name, value in zip(message.counts, message.names, _unpacked(message, frames), strict=True):
        numbers = list(itertools.islice(owners, count))
        if count == 1 or not value.dim():
            states |= {(number, name): value for number in numbers}
            continue
        sizes = [math.prod(shapes[number]) for number in numbers]
        if sum(sizes) != value.numel():
            raise ValueError(f"{value.numel()} elements of {name} for segments of {sizes}")
        parts = zip(numbers, split_like(value.view(-1), sizes), strict=True)
        states |= {(number, name): part.view(tuple(shapes[number])) for number, part in parts}
    return states


def _unpacked(
    message: wire.OptimizerStates | wire.PutStates | wire.StatesState | wire.Updated, frames: Sequence[wire.Buffer]
) -> list[torch.Tensor]:
    """Return the tensors that ``message`` describes, in the memory of ``frames``."""
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
    parts = wire.unpack_arrays(frames, [spec.nbytes for spec in specs])
    return [from_buffer(part, spec.dtype).view(spec.shape) for spec, part in zip(specs, parts, strict=True)]
