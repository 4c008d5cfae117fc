"""One process's training steps of a model of embedding tables: rows on servers, or whole tables and torch's DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.programs.stopwatch import parser, report, timed

FIELDS, ROWS, DIM, DENSE, HIDDEN = 26, 40_000, 16, 13, 64
BATCH = 2048  # of each process
BATCHES = 16
ZIPF = 1.05  # a few ids are in most batches, most ids in few
WARM_UP = 13  # Trainer watches ten steps before it pushes gradients during backward
LR = 0.001


class Clicks(NamedTuple):
    """A batch: ids of shape (batch, fields), numbers of shape (batch, dense), labels of shape (batch,)."""

    ids: Tensor
    dense: Tensor
    labels: Tensor


class Network(nn.Module):
    """DLRM above its embeddings: products of all pairs of vectors, and two perceptrons (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM), nn.ReLU())
        pairs = FIELDS * (FIELDS + 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        first, second = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, dense: Tensor, vectors: list[Tensor]) -> Tensor:
        """Return a logit for each row of ``dense`` and of the fields' ``vectors``."""
        numbers = self.bottom(dense)
        all_vectors = torch.stack([numbers, *vectors], 1)
        products = torch.bmm(all_vectors, all_vectors.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([numbers, products], 1)).squeeze(1)


class Whole(nn.Module):
    """All tables and the network, as one process has them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(FIELDS))
        self.network = Network()

    def forward(self, batch: Clicks) -> Tensor:
        """Return the logits of a batch."""
        vectors = [bag(batch.ids[:, field : field + 1]) for field, bag in enumerate(self.bags)]
        return self.network(batch.dense, vectors)


def clicks(rank: int) -> list[Clicks]:
    """Return the batches of a process."""
    draws = np.random.default_rng(rank)
    made = []
    for _ in range(BATCHES):
        ids = torch.from_numpy(draws.zipf(ZIPF, (BATCH, FIELDS)) % ROWS)
        labels = torch.from_numpy(draws.integers(0, 2, BATCH).astype(np.float32))
        made.append(Clicks(ids, torch.from_numpy(draws.normal(size=(BATCH, DENSE)).astype(np.float32)), labels))
    return made


def again(batches: list[Clicks]) -> Iterator[Clicks]:
    """Yield the batches over and over."""
    while True:
        yield from batches


def ddp(meet: str) -> tuple[Callable[[], None], int]:
    """Return the step with whole tables, whose sparse gradients gloo sums, and the rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Whole()
    called = nn.parallel.DistributedDataParallel(model)
    optimizers = [
        torch.optim.SparseAdam(list(model.bags.parameters()), lr=LR),
        torch.optim.Adam(model.network.parameters(), lr=LR, fused=True),
    ]
    batches = again(clicks(rank))

    def step() -> None:
        batch = next(batches)
        for optimizer in optimizers:
            optimizer.zero_grad()
        binary_cross_entropy_with_logits(called(batch), batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step, rank


def ours(ahead: bool) -> tuple[Callable[[], None], int]:
    """Return the step with tables on servers, and the rank; with ``ahead``, rows are asked for early."""
    import kvstore as kv
    import workers

    tables, store = kv.create("dist_sync"), kv.create("dist_sync")
    tables.set_optimizer("adam", learning_rate=LR)
    bags = [
        workers.EmbeddingBag(ROWS, DIM, store=tables, key=f"field {field}", mode="sum", init="normal")
        for field in range(FIELDS)
    ]
    torch.manual_seed(0)
    network = Network()
    trainer = workers.Trainer(network.named_parameters(), "adam", {"learning_rate": LR}, kvstore=store)
    batches = again(clicks(store.rank))
    if ahead:
        batches = iter(workers.lookahead(batches, {bag: _ids_of(field) for field, bag in enumerate(bags)}))

    def step() -> None:
        batch = next(batches)
        vectors = [bag(_ids_of(field)(batch)) for field, bag in enumerate(bags)]
        trainer.zero_grad()
        binary_cross_entropy_with_logits(network(batch.dense, vectors), batch.labels).backward()
        trainer.step()

    return step, store.rank


def _ids_of(field: int) -> Callable[[Clicks], Tensor]:
    return lambda batch: batch.ids[:, field : field + 1]


def main() -> None:
    """Measure; rank 0 reports."""
    options = parser()
    options.add_argument("--who", choices=["ours", "ahead", "ddp"], required=True)
    options.add_argument("--meet", default="", help="the file through which the processes of ddp find each other")
    args = options.parse_args()
    step, rank = ddp(args.meet) if args.who == "ddp" else ours(args.who == "ahead")
    times = timed(step, args.rounds, warm_up=WARM_UP)
    if rank == 0:
        report(args.report, times=times)
    if args.who == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
