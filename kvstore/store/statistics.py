"""What a store has done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.dynamo import outside_graphs


@outside_graphs
@dataclass(frozen=True)
class Statistics:
    """What a store has done.

    Attributes:
        keys: how many have been initialized.
        pushes: how many keys have been pushed, repeats counted.
        pulls: how many keys have been pulled, repeats counted.
        bytes_pushed: bytes of gradients sent, headers apart; in dist stores. Where an aggregator sums what this host's
            workers push, they are what this worker gives the aggregator: plain, whatever the compression.
        bytes_pulled: bytes of values received, headers apart; in dist stores. Likewise they come plain from an
            aggregator that sums.
        outstanding: pushes that have not taken effect yet.
        staleness: how often values were read that were so many pushes ahead of the slowest worker's, by that number; in
            stores in which every push is an update.
        late: how many segments were pushed after their round was over, in stores with a quorum.
        takeovers: how often a standby has taken over from a server that was lost, in jobs with replicas.
        checkpoints: how many checkpoints this job has made, of all its stores; on worker 0.
        failed_checkpoints: how many were due and were not made, or failed; on worker 0.
        versions: how many versions for followers have been published; on worker 0 they are those of the job.
        bytes_lent: those of ``bytes_pushed`` that the aggregator has read from this worker's device; see
            ``KVSTORE_DEVICE_SUM``.
        not_lent: why the last push was not read from the device, where that is asked for; empty if it was.
        server_bytes: bytes of the parameters that each server holds; empty for local stores.
    """

    keys: int = 0
    pushes: int = 0
    pulls: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    outstanding: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    late: int = 0
    takeovers: int = 0
    checkpoints: int = 0
    failed_checkpoints: int = 0
    versions: int = 0
    bytes_lent: int = 0
    not_lent: str = ""
    server_bytes: tuple[int, ...] = ()
