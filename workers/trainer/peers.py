"""What a trainer asks the other workers before a step: flags, and the norm of the summed gradient, to clip it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from kvstore import DeadlineExceeded, KVStore, Unsupported, UsageError
from kvstore.spec import shorten
from workers.common.sparse_gradients import is_sparse, no_rows
from workers.common.stores import updates_each_push
from workers.common.torch_internals import multiply, write_count
from workers.trainer.parameters import Key, Parameter, stale
from workers.trainer.rates import Snapshot


class Peers:
    """Sums over all workers, beside the training.

    Its methods are collective: all workers call them. Where every push is an update (``dist_async``, ``dist_ssp``),
    each worker decides alone, and nothing is sent.
    """

    def __init__(self, store: KVStore | None) -> None:
        self._store = store
        self._companion: KVStore | None = None
        self._known: set[str] = set()
        self._joined = False  # whether this worker has joined since the last ``join`` of all ended

    @property
    def alone(self) -> bool:
        store = self._store
        return store is None or store.num_workers == 1 or updates_each_push(store.type)

    def count(self, name: str, flags: Sequence[bool]) -> list[int]:
        numbers = torch.tensor([float(flag) for flag in flags], dtype=torch.float32, device="cpu")
        if not self.alone:
            self._sum({name: [numbers]})
        return [int(number) for number in numbers.tolist()]

    def left_out(self, params: Sequence[Parameter]) -> list[int]:
        """Return the positions of parameters without a gradient on any worker; zeros where another has one."""
        without = set(stale(params))
        flags = [position not in without for position in range(len(params))]
        counts = self.count("gradients", [*flags, *(any(map(is_sparse, param.tensors)) for param in params)])
        sparse = counts[len(params) :]
        for param, count, rows_only in zip(params, counts, sparse, strict=False):
            for tensor in param.tensors if count else ():
                if tensor.grad is None:
                    tensor.grad = no_rows(tensor) if rows_only else torch.zeros_like(tensor)
        return [position for position in range(len(params)) if not counts[position]]

    def norm(self, grads: Mapping[Key, Sequence[torch.Tensor]], norm_type: float) -> torch.Tensor:
        """Return the norm of the sum of gradients over all devices and workers."""
        if self.alone and all(len(per_device) == 1 for per_device in grads.values()):
            sums = [per_device[0] for per_device in grads.values()]
        elif self.alone:
            sums = [
                torch.stack([grad.to(per_device[0].device) for grad in per_device]).sum(0)
                for per_device in grads.values()
            ]
        else:
            copies = {f"grad/{key}": [grad.clone() for grad in per_device] for key, per_device in grads.items()}
            self._sum(copies)
            sums = [per_device[0] for per_device in copies.values()]
        norms: list[torch.Tensor] = [torch.linalg.vector_norm(total, norm_type).to(sums[0].device) for total in sums]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

    def most(self, number: int) -> int:
        if self._store is None or self.alone:
            return number
        numbers = torch.zeros(self._store.max_workers, dtype=torch.int64, device="cpu")
        numbers[self._store.rank] = number
        self._sum({"most": [numbers]})
        return int(numbers.max())

    def announce_join(self) -> None:
        """Leave the sums like ``join``, but return at once, so that the trainer's store can be joined next."""
        if self._store is not None and not self.alone and not self._joined:
            with suppress(DeadlineExceeded):  # the announcement has been made all the same
                self._beside(self._store).join(0)
                self._joined = True

    def join(self, timeout: float | None = None) -> None:
        """Return when all workers have joined, so that none asks for another sum; see ``KVStore.join``."""
        if self._store is not None and not self.alone and not self._joined:
            self._beside(self._store).join(timeout)
        self._joined = False

    def _beside(self, store: KVStore) -> KVStore:
        if self._companion is None:
            self._companion = store.companion()
        return self._companion

    def _sum(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        """Replace tensors, one per device, by their sums over devices and workers."""
        if self._store is None:
            return
        companion = self._beside(self._store)
        new = [name for name in tensors if name not in self._known]
        if new:
            companion.init(new, [tensors[name][0] for name in new])
            self._known.update(new)
        companion.pushpull(list(tensors), list(tensors.values()))

    def close(self) -> None:
        if self._companion is not None:
            self._companion.close()
            self._companion, self._known = None, set()


LOOK = 8  # steps from one look at which parameters are frozen to the next: a look costs 50 ns for each


class Likeness:
    """Has a trainer's pushes say what only this worker may have changed, so that such a step is an error on all.

    What pushes say changes at the end of a step: those of the next one may leave during backward already.

    Args:
        frozen: the positions of parameters that are not in the store; others may take positions out of this set.
    """

    def __init__(self, store: KVStore | None, params: Sequence[Parameter], frozen: Collection[int]) -> None:
        self._store = None if Peers(store).alone else store
        self._params, self._frozen = params, frozen
        self._firsts = [param.tensors[0] for param in params]
        self._require: list[bool] = []
        self._rates: Snapshot | None = None
        self._texts: tuple[str, str] = "", ""

    def say(self, step: int = 0, rates: Snapshot | None = None) -> None:
        """Say which parameters are frozen again, and ``rates`` if they are others than at the last call.

        Args:
            step: the number of the step that is over, the same on all workers; 0 outside of steps.
        """
        if self._store is None:
            return
        about_frozen, before = self._texts[0], self._texts
        if step % LOOK == 0 and (require := [tensor.requires_grad for tensor in self._firsts]) != self._require:
            self._require = require
            again = [
                param.key
                for position, param in enumerate(self._params)
                if not require[position] and position not in self._frozen
            ]
            about_frozen = f"{shorten(again)} frozen" if again else ""
        about_rates = "" if rates is None or rates == self._rates else _words(self._rates, rates)
        self._rates, self._texts = rates or self._rates, (about_frozen, about_rates)
        if self._texts != before:
            self._declare()

    def state(self) -> dict[str, Any]:
        """Return what a worker that comes back must know, so that its pushes say what the others' say."""
        return {"rates": self._rates, "texts": list(self._texts)}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on as the worker that has returned ``state``."""
        about_frozen, about_rates = state["texts"]
        self._rates, self._texts = state["rates"], (about_frozen, about_rates)
        self._declare()

    def _declare(self) -> None:
        if self._store is not None:
            self._store.declare(", ".join(filter(None, self._texts)) or None)


def _words(before: Snapshot | None, after: Snapshot) -> str:
    """Return what has changed between two updates in a few words; of the first update everything."""
    olds = before or [{} for _ in after]
    return ", ".join(
        f"{name} {value}{f' of group {number}' if len(after) > 1 else ''}"
        for number, (old, new) in enumerate(zip(olds, after, strict=True))
        for name, value in new.items()
        if name not in old or value != old[name]
    )


class SummedGradients:
    """Knows whether gradients are already sums over all workers, which ``allreduce_grads`` leaves behind."""

    def __init__(self) -> None:
        self._left: list[tuple[torch.Tensor, int]] = []

    def note(self, params: Sequence[Parameter]) -> None:
        self._left = [
            (grad, write_count(grad)) for param in params for t in param.tensors if (grad := t.grad) is not None
        ]

    def clear(self) -> None:
        self._left = []

    def hold(self, params: Sequence[Parameter]) -> bool:
        """Whether the gradients are these sums; an error if they have been changed since."""
        versions = {id(grad): version for grad, version in self._left}
        now = [grad for param in params for tensor in param.tensors if (grad := tensor.grad) is not None]
        kept = [grad for grad in now if id(grad) in versions]
        if not kept:
            self.clear()
            return False
        if len(kept) < len(now) or any(write_count(grad) != versions[id(grad)] for grad in kept):
            raise UsageError(
                "gradients have changed since allreduce_grads(): call clip_grad_norm_() right after it, or before it"
            )
        return True


def clip(
    params: Sequence[Parameter], peers: Peers, summed: SummedGradients, scale: float, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients so that their sum times ``scale`` has at most the norm ``max_norm``. Returns the norm before."""
    for param in params:
        if any(map(is_sparse, param.tensors)):
            raise Unsupported(
                f"clip_grad_norm_() needs dense gradients, and that of {param.key!r} is sparse: make the layer with "
                "sparse=False, or do not clip"
            )
    grads = {
        param.key: [torch.zeros_like(t) if t.grad is None else t.grad.detach() for t in param.tensors]
        for param in params
    }
    held = summed.hold(params)
    firsts = {key: per_device[:1] for key, per_device in grads.items()}
    total = Peers(None).norm(firsts, norm_type) if held else peers.norm(grads, norm_type)
    total = total * abs(scale)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for per_device in grads.values():
        for grad in per_device:
            by_device.setdefault(grad.device, []).append(grad)
    for device, on_device in by_device.items():
        multiply(on_device, factor.to(device))
    if held:
        summed.note(params)
    return total
