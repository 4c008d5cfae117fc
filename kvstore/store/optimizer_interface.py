"""The part of KVStore, the interface, that is about updates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvstore.errors import UnknownName
from kvstore.store.named import Named


class OptimizerInterface(Named):
    """A store as what updates: its optimizer, the hyper-parameters of that, and its states."""

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """Update with this optimizer from now on, instead of assigning.

        Every worker may call it, with the same arguments, or rank 0 alone; it acts once. Called again with other
        numbers it keeps the optimizer's state; another optimizer drops it, with a warning.

        Args:
            optimizer: the name of one of torch's or MXNet's (``sgd``, ``nag``, ``adam``, ``adamw``, ``lamb``, ...;
                ``docs/from-mxnet.md`` lists them), its class, or an instance that has not been used, whose defaults are
                taken.
            hyperparameters: the optimizer's, by torch's names (``lr``, ``weight_decay``, ...) or MXNet's
                (``learning_rate``, ``wd``, ...), and those below.

        Every optimizer has these, too:

        - ``rescale_grad`` (1): gradients are multiplied by it first.
        - ``clip_gradient`` (None): then each of their elements is clipped to plus and minus this.
        - ``lr_mult`` and ``wd_mult`` (``{}``): by key, a factor of the learning rate, and of the weight decay.
        - ``groups`` (none): a list of dicts, each with ``keys`` and what differs for these:
          ``groups=[{"keys": ["bias"], "wd": 0.0}]``.

        Raises:
            UnknownName: no such optimizer or hyper-parameter.
            ServerError: a server could not make it; carries the server's message.
            Mismatch: this worker's arguments are not rank 0's.
        """
        raise self._unsupported("set_optimizer")

    def set_updater(self, updater: Callable[[int | str, Any, Any], None]) -> None:
        """Update with a function of one's own, instead of an optimizer; local stores only.

        Args:
            updater: is called as ``updater(key, pushed, stored)``, and changes ``stored`` in place. For a table, each
                is a ``RowSparse`` of the rows that are pushed.

        Raises:
            Unsupported: the store is distributed: no code goes to servers.
        """
        raise self._unsupported("set_updater")

    @property
    def learning_rate(self) -> float:
        """The learning rate that this worker has set."""
        raise self._unsupported("learning_rate")

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from this worker's next push on; momentum and other state stay.

        With ``dist_sync`` all workers that set one must set the same for the same round.

        Args:
            lr: the new learning rate, of all keys whose group has none of its own.
        """
        self.set_hyperparameters(learning_rate=lr)

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        """Use these from this worker's next push on; what is not given stays. See ``set_learning_rate``.

        Args:
            learning_rate: the new rate; None leaves it as it is.
            rescale_grad: the new factor of gradients; None leaves it as it is. Without an optimizer it is that of the
                sums of floating point that become the values of arrays: 1 / ``num_workers`` gives means. Half precision
                is rounded after it.
            groups: what changes for each of ``set_optimizer``'s groups, in their order; ``lr`` too.
            others: other hyper-parameters, of all keys whose group has none of its own.

        Raises:
            UnknownName: no such hyper-parameter.
            UsageError: one that only ``set_optimizer`` can change: a bool, a text, a momentum from or to 0.
        """
        raise self._unsupported("set_hyperparameters")

    @property
    def rescale_grad(self) -> float:
        """The factor of gradients that this worker's pushes ask for: what was set last, or the optimizer's own."""
        raise self._unsupported("rescale_grad")

    def rescaled(self, factor: float) -> AbstractContextManager[None]:
        """Let pushes in this block ask for another ``rescale_grad``; afterwards it is what it was before.

        Args:
            factor: the factor of the gradients that are pushed in the block.
        """
        raise self._unsupported("rescaled")

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        """Write the optimizer's state of all keys to ``path``, as safetensors; one worker's call suffices.

        With compression, what this worker's encodings lack so far is in it too; then each worker writes a file of its
        own, if the run is to go on exactly as it would have.

        Args:
            path: the file to write. It is replaced in one step, so that it is never half written.
            note: a text that is kept with it, for the caller's own use.
        """
        raise self._unsupported("save_optimizer_states")

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Take the optimizer's state from ``path``; all workers may call it, rank 0's file is the one that counts.

        With compression, a worker also takes what its own encodings lacked, if the file is one that it wrote itself.

        Args:
            path: a file that ``save_optimizer_states`` has written, with any number of workers and servers.

        Raises:
            UsageError: the file is damaged, or belongs to another optimizer.
        """
        raise self._unsupported("load_optimizer_states")

    def is_capable(self, capability: str) -> bool:
        """Whether the store has an ability.

        Args:
            capability: ``optimizer``, the only one there is to ask for; upper or lower case.

        Raises:
            UnknownName: another one.
        """
        if capability.lower() != "optimizer":
            raise UnknownName(f"there is no capability {capability!r}; choose from optimizer")
        return type(self).set_optimizer is not OptimizerInterface.set_optimizer
