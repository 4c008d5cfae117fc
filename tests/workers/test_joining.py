from __future__ import annotations

import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from kvstore.member.session import Session
from workers import Trainer


def test_two_stores_of_a_step_are_joined_at_once() -> None:
    def work(session: Session) -> tuple[int, torch.Tensor, torch.Tensor]:
        tables, store = DistStore(session), DistStore(session)
        tables.set_optimizer("sgd", learning_rate=0.1)
        module = workers.Embedding(5, 2, store=tables, key="t", init="zeros")
        head = nn.Linear(2, 1, bias=False)
        nn.init.ones_(head.weight)
        trainer = Trainer(head.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        for _ in range(2):
            for _ in range(1 + 2 * session.rank):
                trainer.zero_grad()
                head(module([session.rank, 4]).detach() + module([session.rank, 4])).sum().backward()
                trainer.step()
            last = workers.join(trainer, tables)
        return last, module.state_dict()["weight"], head.weight.detach()

    with ThreadedJob(workers=2, servers=2) as job:
        one, two = job.run_sessions(work)
    assert one[0] == two[0] == 1
    assert torch.equal(one[1], two[1])
    assert torch.equal(one[2], two[2])
    assert one[1][:, 0].ne(0).tolist() == [True, True, False, False, True]


def test_one_process_joins_at_once() -> None:
    assert workers.join(kv.create("local"), kv.create("device")) == 0
    assert workers.join() == 0
