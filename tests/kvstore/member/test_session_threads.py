"""Several threads on one session."""

from __future__ import annotations

import threading
from typing import Any

import torch
from threaded import ThreadedJob
from waiting import LONG

from kvstore.client import DistStore
from kvstore.member.session import Session


def test_threads_of_one_worker_get_their_own_answers():
    rounds, count = 30, 4
    with ThreadedJob(2, 2, bigarray_bound=50) as cluster:

        def work(session: Session) -> list[Any]:
            store = DistStore(session)
            keys = [f"k{n}" for n in range(count)]
            store.init(keys, [torch.zeros(60 + n) for n in range(count)])
            results: list[Any] = [None] * count

            def use(n: int) -> None:
                out, total = torch.zeros(60 + n), 0.0
                for turn in range(rounds):
                    if turn % 2:
                        store.pushpull(f"k{n}", torch.full((60 + n,), float(turn + n)), out)
                    else:
                        store.push(f"k{n}", torch.full((60 + n,), float(turn + n)))
                        store.pull(f"k{n}", out)
                    assert set(out.tolist()) == {2.0 * (turn + n)}
                    total += out[0].item()
                results[n] = total

            def run(n: int) -> None:
                try:
                    use(n)
                except BaseException as exc:
                    results[n] = exc

            threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            store.close()
            return results

        expected = [float(sum(2 * (turn + n) for turn in range(rounds))) for n in range(count)]
        assert cluster.run_sessions(work) == [expected, expected]


def test_two_threads_push_the_same_key_and_every_push_is_a_round_of_its_own():
    with ThreadedJob(2, 2) as cluster:

        def work(store: DistStore) -> float:
            store.set_optimizer("sgd", learning_rate=1.0)
            store.init("w", torch.zeros(1))
            threads = [
                threading.Thread(target=lambda: [store.push("w", torch.ones(1)) for _ in range(50)]) for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            out = torch.zeros(1)
            store.pull("w", out)
            return out.item()

        assert cluster.run(work) == [-200.0, -200.0]
