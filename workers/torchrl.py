"""``KVStoreWeightSyncScheme``: TorchRL's collectors follow what a running job publishes. It needs the package torchrl.

TorchRL's own schemes write into a policy from a thread, while it acts: one frame may mix two updates. Here the policy
itself looks before it acts, so each frame is of one version, and ``("next", "policy_version")`` says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import WeightSyncScheme

import kvstore as kv
from kvstore.spec import Key


class KVStoreWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]
    """Of one policy: ``send`` publishes it, and collectors follow it, in whichever processes and on whichever hosts.

        store = kv.create("dist_sync")
        scheme = KVStoreWeightSyncScheme("readers.json", store=store)
        collector = MultiSyncCollector(..., policy=policy, weight_sync_schemes={"policy": scheme})
        collector.update_policy_weights_()  # the next frame that a process plays is by these weights

    Collectors of other programs, anywhere, come and go: ``collector.register_scheme_receiver({"policy": scheme})``.

    Args:
        address, key: as for ``kv.connect``: where the job is, for collectors.
        store: where ``send`` publishes: a store without an optimizer, on worker 0. None: something else publishes, such
            as a ``Trainer`` with ``publish_every``, and ``send`` does nothing.
        dtype: as for ``publish_state``.
        which: as ``store`` of ``kv.connect``.
        names, strict: as for ``Reader.follow``.
        ask_every: how often collectors ask whether there is a newer version, in seconds. Those of one host know what
            ``send`` publishes without asking.
        timeout: as for ``kv.connect``.
    """

    def __init__(
        self,
        address: str | None = None,
        key: str | None = None,
        *,
        store: kv.KVStore | None = None,
        dtype: torch.dtype | None = None,
        which: int | str = 1,
        names: Mapping[str, Key] | Callable[[str], Key] | None = None,
        strict: bool = True,
        ask_every: float = 1.0,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self._connect: dict[str, Any] = {"address": address, "key": key, "store": which, "timeout": timeout}
        self._store, self._dtype = store, dtype
        self._names, self._strict, self._ask_every = names, strict, ask_every
        # The number of the last version that was sent. Processes that multiprocessing starts share it.
        self._sent = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._clear()

    def _clear(self) -> None:
        self._reader: Any = None
        self._follower: Any = None
        self._module: nn.Module | None = None
        self._asked = 0.0

    def __getstate__(self) -> dict[str, Any]:
        none = dict.fromkeys(("_store", "_reader", "_follower", "_module"))
        return {**super().__getstate__(), **none, "_asked": 0.0}

    def shutdown(self) -> None:
        super().shutdown()
        if self._reader is not None:
            self._reader.close()
        self._clear()

    def create_transport(self, **_kwargs: Any) -> Any:
        raise NotImplementedError("the servers of the job are the transport")

    # ---- the side that has the weights

    def _init_on_sender_impl(self, *, model_id: str, context: Any = None, **_more: Any) -> None:
        self.model_id, self.context = model_id, context

    def _setup_connection_and_weights_on_sender_impl(self, *, worker_idx: Any = None, weights: Any = None) -> None:
        self.send(weights)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Publish ``weights``, or the policy's. It does not wait for collectors; all of them follow.

        Args:
            weights: a module, a ``TensorDict`` or a dict.
            worker_ids: ignored.
        """
        if self._store is None:
            return
        weights = self.prepare_weights(weights, self.model_id, self.strategy, self.context)
        if weights is not None:
            self._sent.fill_(self._store.publish_state(_flat(weights), dtype=self._dtype))

    # ---- the side that acts

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, worker_idx: Any = None, model: Any = None, **_more: Any
    ) -> None:
        self.model_id, self.worker_idx = model_id, worker_idx
        self.context, self.model = context, model

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: Any = None) -> None:
        module = self.model
        if not isinstance(module, nn.Module):
            raise kv.UsageError(f"a {type(module).__name__} has no weights that could follow: pass a torch module")
        self._reader = kv.connect(**self._connect)
        self._update(module)
        # A function, and no method: collectors copy modules, with their hooks, and a copy must not copy this scheme.
        module.register_forward_pre_hook(lambda module, _args: self._before(module))

    def _before(self, module: nn.Module) -> None:
        """Have the newest weights, before ``module`` acts."""
        if self._reader is None:
            return
        if (
            module is not self._module
            or self._follower.version < int(self._sent)
            or time.monotonic() - self._asked >= self._ask_every
        ):
            self._update(module)
        tracker = getattr(self.context, "policy_version_tracker", None)
        if tracker is not None:
            tracker.version = self._follower.version

    def _update(self, module: nn.Module) -> bool:
        if module is not self._module:
            # The first one; or the collector has made a copy, on another device. A policy comes from its parent without
            # memory, or in memory that others have, too.
            without = any(tensor.is_meta for tensor in _flat(module).values())
            module.to_empty(device="cpu") if without else module._apply(torch.clone)  # type: ignore[no-untyped-call]
            self._follower = self._reader.follow(_flat(module), self._names, strict=self._strict or without)
            self._module = module
        before = self._follower.version
        self._follower.update()
        while self._follower.version < max(1, int(self._sent)):
            self._follower.wait_newer()
        self._asked = time.monotonic()
        return bool(self._follower.version != before)

    def receive(self, timeout: float | None = None) -> Any:
        """Have the newest weights now; return them if they are others than before, else None.

        Args:
            timeout: ignored: nothing is waited for.
        """
        return self.weights if self._update(self.model) else None


def _flat(weights: Any) -> dict[str, torch.Tensor]:
    """Return arrays by the names that they have in a state dict; of a module also what that leaves out."""
    tree = TensorDict.from_module(weights) if isinstance(weights, nn.Module) else TensorDict(weights)
    return dict(tree.data.flatten_keys(".").items())
