"""A worker's rounds of push and pull, each of all arrays of a network."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import kvstore as kv
from benchmarks.networks import shapes_of
from benchmarks.programs.servers import memory_of_servers
from benchmarks.programs.stopwatch import measured, parser, report

# In an arena arrays are not cut: whole ones can be handed over as they are.
NEVER_CUT = 2**40


class Exported:
    """A numpy array that has DLPack, and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._array = tensor.numpy()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


ARRAYS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    "numpy": torch.Tensor.numpy,
    "dlpack": Exported,
}


def main() -> None:
    """Measure; rank 0 reports. Without an optimizer the last sum is checked."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("--type", default="dist_sync")
    options.add_argument("--optimizer", default="none")
    options.add_argument("--memory", choices=["ordinary", "arena"], default="ordinary")
    options.add_argument("--arrays", choices=list(ARRAYS), default="torch", help="what the caller has")
    options.add_argument("--check-finite", action="store_true", help="let servers refuse NaN and infinity")
    options.add_argument("--sample-every", type=int, default=0, help="note the servers' memory every so many rounds")
    options.add_argument("--compression", type=json.loads, help="what set_gradient_compression takes, as JSON")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the arrays are")
    args = options.parse_args()

    arena = args.memory == "arena"
    store = kv.create(args.type, check_finite=args.check_finite, **({"bigarray_bound": NEVER_CUT} if arena else {}))
    shapes = shapes_of(args.net)
    keys = list(range(len(shapes)))
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", store.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    weights = [torch.zeros(shape, device=device) for shape in shapes]
    gradients = [store.empty(shape) if arena else torch.empty(shape, device=device) for shape in shapes]
    torch.manual_seed(0)
    for gradient in gradients:
        gradient.normal_()
    expected = gradients[0] * store.num_workers
    kind = ARRAYS[args.arrays]
    given = list(map(kind, gradients)), list(map(kind, weights))
    if args.optimizer != "none":
        momentum = {"momentum": 0.9} if args.optimizer == "sgd" else {}
        store.set_optimizer(args.optimizer, learning_rate=0.01, **momentum)
    store.barrier()
    start = time.perf_counter()
    store.init(keys, given[1])
    init = 1000 * (time.perf_counter() - start)
    store.set_gradient_compression(args.compression)

    memory: list[tuple[int, list[dict[str, float]]]] = []
    started = 0

    def note_memory() -> None:
        nonlocal started
        if args.sample_every and store.rank == 0 and started % args.sample_every == 0:
            memory.append((started, memory_of_servers()))
        started += 1

    def before() -> None:
        note_memory()
        store.barrier()

    figures = measured(lambda: store.pushpull(keys, given[0], out=given[1], copy=not arena), args.rounds, before)
    exact = args.optimizer == "none" and args.type in ("dist_sync", "dist_device_sync") and args.compression is None
    if exact and not torch.allclose(weights[0], expected):
        raise SystemExit("the sum is wrong")
    note_memory()
    if store.rank == 0:
        report(args.report, **figures, init=init, memory=memory)
    store.close()


if __name__ == "__main__":
    main()
