"""The same versions through Ray's object store: an actor knows where the newest is. Needs Ray and numpy alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from benchmarks.networks import elements, shapes_of
from benchmarks.programs.versions import options, take_part, wait_for

NAME = "newest"
NAMESPACE = "kvstore-bench"


class Newest:
    """Where the newest version is."""

    def __init__(self) -> None:
        self._number, self._stored = 0, []
        self._changed = asyncio.Condition()

    async def set(self, number: int, stored: list[Any]) -> None:
        """Note the version; ``stored`` has a reference to its arrays."""
        async with self._changed:
            self._number, self._stored = number, stored
            self._changed.notify_all()

    async def get(self, number: int) -> list[Any]:
        """Return a reference to the arrays of version ``number``, or a newer one, once there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._number >= number)
            return self._stored


def main() -> None:
    """Measure; the publisher reports."""
    args = options(["ray"])
    shapes = shapes_of(args.net)
    flat = np.zeros(elements(shapes), np.int16)
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    state = {f"layer{n}": part.reshape(shape) for n, (part, shape) in enumerate(zip(parts, shapes, strict=True))}
    place = args.folder / "address"
    if args.reader < 0:
        room = 5 * flat.nbytes + (100 << 20)
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=room,
            namespace=NAMESPACE,
            _node_ip_address="127.0.0.1",
        )
        newest = ray.remote(num_cpus=0)(Newest).options(name=NAME).remote()
        made = place.with_suffix(".made")
        made.write_text(context.address_info["address"])
        made.rename(place)
    else:
        wait_for(place)
        ray.init(place.read_text(), namespace=NAMESPACE, _node_ip_address="127.0.0.1")
        newest = ray.get_actor(NAME)

    def publish(number: int) -> None:
        ray.get(newest.set.remote(number, [ray.put(state)]))

    def wait(number: int) -> None:
        (stored,) = ray.get(newest.get.remote(number))
        arrays: Mapping[str, Any] = ray.get(stored)  # views of shared memory, only to be read
        for name, array in arrays.items():
            state[name][:] = array

    take_part(args, flat, publish if args.reader < 0 else wait)
    ray.shutdown()


if __name__ == "__main__":
    main()
