"""``GlobalWeights``: DiLoCo's outer optimization. The store has the global weights and the outer optimizer.

Workers push outer gradients: their copy of the global weights, less their own weights. The store takes the mean over
workers for the gradient of a step of the outer optimizer, and returns the new global weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvstore import AlreadyInitialized, KVStore, UsageError
from kvstore.ticket import Ticket


def require_synchronous(store: KVStore) -> None:
    """Raise ``UsageError`` if ``store`` updates for every push.

    Outer gradients that come one by one, and late, make the outer momentum unstable (Liu et al., "Asynchronous
    Local-SGD Training for Language Modeling", arXiv:2401.09135).
    """
    if "async" in store.type or "ssp" in store.type:
        raise UsageError(
            f"DiLoCo needs a synchronous store, 'dist_sync' or 'local', not {store.type!r}: with outer gradients that "
            "come late, the outer momentum makes training unstable"
        )


class GlobalWeights:
    """A worker's side of the global weights. On construction every worker gets rank 0's weights.

    The copy is in the host's memory, so a model on a GPU needs no more memory there. Half-precision weights have a
    float32 copy.

    Args:
        store: a synchronous store, for this alone.
        params: this worker's own weights by name. They are read and written in place.
        optimizer: the outer optimizer; see ``KVStore.set_optimizer``.
        hyperparameters: those of the outer optimizer.
        frozen: names of weights that are not trained before they require a gradient. Until then nothing of them is
            sent, and what the program writes into them stays.

    Raises:
        UsageError: the store is already in use.
        UnknownName: no such optimizer or hyper-parameter.
    """

    def __init__(
        self,
        store: KVStore,
        params: Mapping[str, torch.Tensor],
        optimizer: Any,
        hyperparameters: Mapping[str, Any],
        frozen: Iterable[str] = (),
    ) -> None:
        if "rescale_grad" in hyperparameters:
            raise UsageError("outer_params must not have rescale_grad: outer gradients are means over workers")
        self._store, self._params = store, dict(params)
        self._frozen = set(frozen)
        self._copies = {name: _wide(param).clone() for name, param in params.items()}
        store.set_optimizer(optimizer, rescale_grad=1 / store.num_workers, **hyperparameters)
        try:
            store.broadcast(list(self._copies), list(self._copies.values()), list(self._copies.values()))
        except AlreadyInitialized:
            raise UsageError(
                "this store already has another model's weights; make a second one with kvstore.create"
            ) from None
        self._write(list(params))

    def thaw(self) -> None:
        """Train those parameters from now on that require a gradient now. Every worker calls this after each step."""
        if self._frozen:
            self._frozen = {name for name in self._frozen if not self._params[name].requires_grad}

    @torch.no_grad()
    def push(self, names: Sequence[str]) -> Ticket:
        """Send the outer gradients of these weights; the ticket is done when the copies have the new global weights."""
        gradients = []
        for name in names:
            param, copy = self._params[name], self._copies[name]
            gradient = self._store.empty(copy.shape, copy.dtype)
            # What this worker began with had the precision of its own weights.
            torch.sub(copy.to(param.dtype), _wide(param), out=gradient)
            gradients.append(gradient)
        return self._store.pushpull(list(names), gradients, [self._copies[name] for name in names], wait=False)

    def take(self, names: Sequence[str], mixing: float = 0.0) -> None:
        """Replace a worker's own weights by ``mixing`` times these, plus 1 - ``mixing`` times the copies."""
        self._write(self.trained(names), mixing)

    @torch.no_grad()
    def _write(self, names: Sequence[str], mixing: float = 0.0) -> None:
        for name in names:
            param, copy = self._params[name], self._copies[name]
            if mixing:
                param.lerp_(copy.to(param.device, param.dtype), 1 - mixing)
            else:
                param.copy_(copy)

    def pull(self) -> None:
        """Take the global weights as they are now."""
        self._store.pull(list(self._copies), list(self._copies.values()))
        self.take(list(self._copies))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Have the copies in place of the worker's own weights, within the block."""
        own = {name: self._params[name].detach().clone() for name in self.trained(self._params)}
        self.take(list(own))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    self._params[name].copy_(value)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the worker's own weights and the copies, of what is trained."""
        names = self.trained(self._params)
        return {f"local/{name}": self._params[name].detach() for name in names} | {
            f"global/{name}": self._copies[name] for name in names
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what ``state`` returned.

        Raises:
            UsageError: it belongs to another model.
        """
        self._frozen = {name for name in self._frozen if f"local/{name}" not in tensors}
        mine = self.state()
        for name, value in mine.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise UsageError(f"this state of DiLoCo belongs to another model: it has no {name!r} of this shape")
        for name, value in mine.items():
            value.copy_(tensors[name])

    def trained(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are trained so far."""
        return [name for name in names if name not in self._frozen]


def _wide(param: torch.Tensor) -> torch.Tensor:
    """Return ``param`` on the CPU, in float32 if it has half precision."""
    dtype = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    return param.detach().to("cpu", dtype)
