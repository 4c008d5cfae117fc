"""Sums of what the workers of one host have on GPUs: in shared memory, or on one of the GPUs (KVSTORE_DEVICE_SUM)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import dmlc
from benchmarks.contenders import Samples, Work, program
from benchmarks.dmlc import Layout
from benchmarks.jobs import HERE, Member, Unavailable, run, scratch
from benchmarks.session import Case, Session

COUNTS = (2, 4, 8)
ROUNDS = 20
USUAL = "in shared memory"
LENT = "on one GPU"


@dataclass(frozen=True)
class DeviceRounds:
    """Rounds of workers whose arrays are on devices. One aggregator sums them, for one server on the same host.

    Attributes:
        name: of its row.
        work: the rounds.
        where: the sum is made; see ``KVSTORE_DEVICE_SUM``.
        device: the type of the workers' devices; they share those that there are.
    """

    name: str
    work: Work
    where: str
    device: str = "cuda"

    def run(self) -> Samples:
        """See ``Contender``."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("there is no CUDA device")
        with scratch() as folder:
            path = folder / "report"
            command = [*program("rounds"), *self.work.words, "--device", self.device, "--report", str(path)]
            return {self.name: run(self._members(command), path)["times"]}

    def _members(self, command: Sequence[str]) -> list[Member]:
        layout = Layout([HERE] * self.work.workers, [HERE] * self.work.servers)
        env = {"KVSTORE_NUM_AGGREGATORS": "1", "KVSTORE_DEVICE_SUM": self.where, "KVSTORE_ENCRYPTION": "0"}
        members = dmlc.members(layout, servers=[sys.executable, "-m", "servers"], workers=command, env=env)
        aggregator = replace(
            members[0], name="aggregator 0", env={**members[0].env, "DMLC_ROLE": "aggregator", "DMLC_TASK_ID": "0"}
        )
        others = len(members) - self.work.workers
        workers = [replace(each, env={**each.env, "KVSTORE_AGGREGATOR": "0"}) for each in members[others:]]
        return [*members[:others], aggregator, *workers]


def devices(session: Session) -> None:
    """Measure both ways in turn, with 2, 4 and 8 workers, or as many as the options say."""
    options = session.options
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for workers in options.workers_per_host or COUNTS:
        work = Work(options.net or "resnet50", workers, 1, "none", "dist_device_sync", options.rounds or ROUNDS)
        title = f"A round of {work.net}, {workers} workers of one host on {min(workers, count)} GPUs"
        contenders = [DeviceRounds(USUAL, work, "off"), DeviceRounds(LENT, work, "cuda")]
        session.measure(Case(f"devices-{workers}", title, contenders, (USUAL,)))
