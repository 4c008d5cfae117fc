"""Where arrays are cut changes no bit: each optimizer on 1, 2, 3 and 5 servers, and from some on to others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from placed import entries_of

from kvstore.client.entries import Segment
from kvstore.client.requests import assemble, cut
from kvstore.optim.optimizer import describe, find, names
from kvstore.optim.states import StateTensors
from kvstore.optim.updater import Updater
from kvstore.placement import WHOLE, place
from kvstore.spec import Key, Spec

ROUNDS = 3
# Most lengths are no multiple of anything. Those of one server are updated as one array, where they are whole vectors.
SHAPES: dict[Key, tuple[int, ...]] = {
    "long": (33_013,),  # so long that torch steps with several threads
    "cut": (1003,),
    "deep": (3, 5, 67),
    "even": (128,),
    "small": (7,),
    "one": (),
}
MATRICES: dict[Key, tuple[int, ...]] = {"tall": (50_021, 1), "row": (1, 50_021), "wide": (2, 16_411), "some": (33, 67)}
LONG = 10_000  # elements: in other dtypes than float32 there are none of so many
HYPER: dict[str, list[dict[str, Any]]] = {
    "adam": [{}, {"amsgrad": True, "weight_decay": 0.01}],
    "dcasgd": [{"momentum": 0.9}],
    "nag": [{"momentum": 0.9}],
    "rmsprop": [{}, {"momentum": 0.9, "centered": True}],
    "sgd": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"momentum": 0.9, "momentum_style": "mxnet"},
    ],
    "signum": [{}, {"momentum": 0.0, "weight_decay": 0.01}],
}
SAME = [name for name in names() if not getattr(find(name).cls, "random", False)]  # others' noise differs by the run
CASES = [(name, hyper) for name in SAME for hyper in HYPER.get(name, [{}])]
SERVERS = (1, 2, 5)  # and on 3 a run is resumed


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Servers:
    """Arrays on so many servers, each of which updates its segments as if they had been pushed together.

    A host's cores are shared by its servers, so the threads of each are the fewer, the more there are.
    """

    def __init__(self, number: int, name: str, hyper: dict[str, Any], values: dict[Key, torch.Tensor]) -> None:
        optimizer = describe(name, {"learning_rate": 0.05, "rescale_grad": 1 / 3, **hyper})
        specs = {key: Spec(tuple(value.shape), str(value.dtype)[6:]) for key, value in values.items()}
        bounds = (WHOLE, WHOLE) if optimizer.whole else (900, 40_000)
        self._entries = entries_of(specs, place(specs, [0] * number, *bounds))
        self._threads = 2 if number == 1 else 1
        self._held: list[tuple[list[Segment], torch.Tensor, Updater]] = []
        for server in range(number):
            segments = [each for key in specs for each in self._entries[key].segments if each.server == server]
            if segments:
                self._held.append((segments, self._of(segments, values), Updater(optimizer)))

    def _of(self, segments: list[Segment], values: dict[Key, torch.Tensor]) -> torch.Tensor:
        return torch.cat([values[each.key].reshape(-1)[each.start : each.stop] for each in segments])

    def _shape(self, segment: Segment) -> tuple[int, ...]:
        entry = self._entries[segment.key]
        return (segment.stop - segment.start,) if entry.cut else tuple(entry.spec.shape)

    def step(self, grads: dict[Key, torch.Tensor]) -> None:
        torch.set_num_threads(self._threads)
        for segments, flat, updater in self._held:
            group = updater.group([each.id for each in segments], list(map(self._shape, segments)), flat)
            group.point(flat)
            updater.step([group], [self._of(segments, grads).to(group.params[0].dtype)])

    def states(self) -> StateTensors:
        found = {}
        for segments, _, updater in self._held:
            by_id = {each.id: each for each in segments}
            states = updater.states.of(by_id)
            found |= {(by_id[int(number)], name): value for (number, name), value in states.items()}
        return assemble(found, self._entries)

    def load(self, states: StateTensors) -> None:
        of_segments = cut(states, self._entries)
        for segments, flat, updater in self._held:
            sizes = [each.stop - each.start for each in segments]
            parts = zip(segments, flat.split(sizes), strict=True)
            weights: dict[Key, torch.Tensor] = {each.id: part.view(self._shape(each)) for each, part in parts}
            own = {(each.id, name): value for (each, name), value in of_segments.items() if each in segments}
            updater.states.load(own, weights)

    def values(self) -> dict[Key, torch.Tensor]:
        parts: dict[Key, list[tuple[int, torch.Tensor]]] = {}
        for segments, flat, _ in self._held:
            for each, part in zip(segments, flat.split([each.stop - each.start for each in segments]), strict=True):
                parts.setdefault(each.key, []).append((each.start, part))
        whole = {key: torch.cat([part for _, part in sorted(of, key=lambda of: of[0])]) for key, of in parts.items()}
        return {key: value.view(self._entries[key].spec.shape) for key, value in whole.items()}

    def sha256(self) -> str:
        every = {repr(key): value for key, value in (self.values() | self.states()).items()}
        found = hashlib.sha256()
        for key in sorted(every):
            found.update(key.encode() + every[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def arrays(name: str, dtype: torch.dtype, seed: int) -> dict[Key, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = find(name)
    shapes = (MATRICES if optimizer.dims == 2 else SHAPES | MATRICES) if not optimizer.elementwise else SHAPES
    every = dtype == torch.float32
    return {
        key: torch.randn(shape, generator=generator).to(dtype)
        for key, shape in shapes.items()
        if every or math.prod(shape) < LONG
    }


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float64, marks=pytest.mark.release),
        torch.bfloat16,
    ],  # float64 goes the way of float32
    ids=str,
)
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
def test_the_number_of_servers_changes_no_bit(name: str, hyper: dict[str, Any], dtype: torch.dtype) -> None:
    first, grads = arrays(name, dtype, 0), [arrays(name, dtype, 1 + step) for step in range(ROUNDS)]
    found = {}
    for number in SERVERS:
        servers = Servers(number, name, hyper, first)
        for each in grads[:-1]:
            servers.step(each)
        if number == 2:
            resumed = Servers(3, name, hyper, servers.values())
            resumed.load(servers.states())
            resumed.step(grads[-1])
            found["on 2, and resumed on 3"] = resumed.sha256()
        servers.step(grads[-1])
        found[f"on {number}"] = servers.sha256()
    assert len(set(found.values())) == 1, found
