from __future__ import annotations

import gc

import kvstore as kv
from workers.common.row_steps import row_steps


class Trainer:
    def has_gradients(self) -> bool:
        return True


def test_trainer_and_tables_of_one_store_find_each_other() -> None:
    store = kv.create("local")
    steps = row_steps(store)
    assert row_steps(store) is steps
    assert row_steps(kv.create("local")) is not steps
    with steps.pushes.paused():
        steps.pushes.step_over()  # nothing is there yet


def test_a_trainer_is_known_as_long_as_it_lives() -> None:
    steps, trainer = row_steps(kv.create("local")), Trainer()
    assert steps.trainer_has_gradients is None
    steps.begin(trainer.has_gradients)
    assert steps.trainer_has_gradients is not None
    assert steps.trainer_has_gradients()
    del trainer
    gc.collect()
    assert steps.trainer_has_gradients is None
