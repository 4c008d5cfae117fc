"""``KVStoreStrategy``: PyTorch Lightning's DDP over the job of its processes. It needs the package lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

import workers
from workers import group
from workers.integrations import torch_distributed


class KVStoreStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP with one process for each worker of the job, whatever ``devices`` and ``num_nodes`` say.

        trainer = Trainer(max_epochs=3, strategy=KVStoreStrategy())

    Samplers, accumulation, clipping, precision, checkpoints and logging are Lightning's own. Outside of a job the
    process trains alone.

    Args:
        options: as for ``DDPStrategy``, such as ``find_unused_parameters=True``.

    Raises:
        UsageError: as ``torch_distributed.init()``.
    """

    strategy_name = "kvstore"

    def __init__(self, **options: Any) -> None:
        _, self._device = torch_distributed.init()
        super().__init__(
            parallel_devices=[self._device],
            cluster_environment=JobEnvironment(),
            process_group_backend=torch_distributed.BACKEND,
            **options,
        )

    @property
    def root_device(self) -> torch.device:
        return self._device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        # The base class would count devices, of which each process has one.
        self.cluster_environment.set_global_rank(group.rank())
        self.cluster_environment.set_world_size(group.size())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the plain value of rank ``src``. The base class would pickle it."""
        return workers.broadcast_object(obj, src)


class JobEnvironment(LightningEnvironment):  # type: ignore[misc]
    """Who is who in the job, for Lightning."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return group.local_rank()

    def node_rank(self) -> int:
        # The first rank of the host stands for its number, which nobody has counted.
        return group.rank() - group.local_rank()
