"""What workers must have alike; what each class asks for is in the tests of that class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from workers.averaging.stepper import require_alike
from workers.common.gather import Gather

ALIKE: dict[str, Any] = {"kind": "This", "settings": {"every": 3, "how": "keep"}, "values": {"w": torch.zeros(2)}}


def ask(pair: ThreadedJob, **of_worker_1: Any) -> None:
    def work(store: DistStore) -> None:
        require_alike(Gather(store, "/alike"), **{**ALIKE, **(of_worker_1 if store.rank else {})})

    pair.run(work)


def test_workers_that_are_alike(pair: ThreadedJob) -> None:
    ask(pair)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"kind": "That"}, "has made something else than a"),
        ({"settings": {"every": 4, "how": "keep"}}, "disagree on every: 3 on this one, 4 on worker 1|every: 4"),
        ({"settings": {"every": 3, "how": "drop"}}, "disagree on how: keep on this one, another on worker 1|how: drop"),
        ({"values": {"w": torch.zeros(3)}}, "has another model, optimizer or setting of buffers"),
        ({"values": {"v": torch.zeros(2)}}, "has another model, optimizer or setting of buffers"),
    ],
)
def test_workers_that_differ(pair: ThreadedJob, other: dict[str, Any], text: str) -> None:
    with pytest.raises(kv.Mismatch, match=text):
        ask(pair, **other)
