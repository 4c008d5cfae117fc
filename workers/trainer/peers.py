"""What a Trainer must know of all workers before a step: flags, and the norm of the gradient they have together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from kvstore import DeadlineExceeded, KVStore
from workers.trainer.parameters import Parameter, stale


class Peers:
    """Sums over all workers, beside the training; collective, but where every push is an update of its own.

    Args:
        store: the training's; None for a process alone.
    """

    def __init__(self, store: KVStore | None) -> None:
        self._store = store
        self._companion: KVStore | None = None
        self._known: set[str] = set()
        self._joined = False  # whether all have, since ``join`` was last over

    @property
    def alone(self) -> bool:
        """Whether no other worker takes part in this one's updates."""
        store = self._store
        return store is None or store.num_workers == 1 or any(word in store.type for word in ("async", "ssp"))

    def count(self, name: str, flags: Sequence[bool]) -> list[int]:
        """Return on how many workers each flag is set."""
        numbers = torch.tensor([float(flag) for flag in flags])
        if not self.alone:
            self._sum({name: [numbers]})
        return [int(number) for number in numbers.tolist()]

    def left_out(self, params: Sequence[Parameter]) -> list[int]:
        """Return the positions of parameters that no worker has a gradient of; where another has one, make zeros."""
        without = set(stale(params))
        there = self.count("gradients", [position not in without for position in range(len(params))])
        for param, count in zip(params, there, strict=True):
            for tensor in param.tensors if count else ():
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
        return [position for position, count in enumerate(there) if not count]

    def norm(self, grads: Sequence[Sequence[torch.Tensor]], norm_type: float) -> torch.Tensor:
        """Return the norm of the sum of gradients over all devices and workers, on the first one's device.

        Args:
            grads: for each parameter its gradients, one per device; left as they are.
            norm_type: see ``torch.nn.utils.clip_grad_norm_``.
        """
        if self.alone and all(len(its) == 1 for its in grads):
            sums = [its[0] for its in grads]
        elif self.alone:
            sums = [torch.stack([grad.to(its[0].device) for grad in its]).sum(0) for its in grads]
        else:
            copies = {f"grad/{number}": [grad.clone() for grad in its] for number, its in enumerate(grads)}
            self._sum(copies)
            sums = [its[0] for its in copies.values()]
        norms: list[torch.Tensor] = [torch.linalg.vector_norm(total, norm_type).to(sums[0].device) for total in sums]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

    def most(self, number: int) -> int:
        """Return the largest of all workers' numbers."""
        if self._store is None or self.alone:
            return number
        numbers = torch.zeros(self._store.num_workers, dtype=torch.int64)
        numbers[self._store.rank] = number
        self._sum({"most": [numbers]})
        return int(numbers.max())

    def announce_join(self) -> None:
        """Take part in no more sums, for now: as ``join``, but return at once, so that the training's can be joined."""
        if self._store is not None and not self.alone and not self._joined:
            with suppress(DeadlineExceeded):  # it has been said all the same
                self._beside(self._store).join(0)
                self._joined = True

    def join(self, timeout: float | None = None) -> None:
        """Return when no other worker will ask for a sum of those who go on; see ``KVStore.join``."""
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
        """End the use of what was made for it."""
        if self._companion is not None:
            self._companion.close()
            self._companion, self._known = None, set()
