from __future__ import annotations

from pathlib import Path

import pytest
import torch
from written import write

from kvstore.client.resuming import Resumed
from kvstore.errors import Mismatch
from kvstore.spec import Spec

STATES = {("w", "momentum_buffer"): torch.ones(2, 3)}


def test_a_store_is_found_by_its_place_among_the_stores_of_the_job(tmp_path: Path) -> None:
    resumed = Resumed(write(tmp_path, 3, {"w": torch.ones(2, 3)}, STATES), 0, 2)
    assert (resumed.number, resumed.rounds) == (3, 30)
    assert resumed.has(1, "w")
    assert not resumed.has(1, "v")
    assert not resumed.has(2, "w")
    assert resumed.shapes(1) == {"w": (2, 3)}
    assert resumed.shapes(2) == {}
    assert torch.equal(resumed.value(1, "w", Spec((2, 3), "float32")), torch.ones(2, 3))
    optimizer, states = resumed.states(1, ["w"])
    assert optimizer == "sgd"
    assert torch.equal(states["w", "momentum_buffer"], torch.ones(2, 3))
    with pytest.raises(Mismatch, match="resume with the model"):
        resumed.value(1, "w", Spec((3, 2), "float32"))


def test_with_another_number_of_workers_own_parts_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = Resumed(write(tmp_path, 3, {"w": torch.ones(2)}), 0, 5)
    assert "saved by 2 workers, and there are 5" in caplog.text
    assert resumed.part("sampler", shared=False) is None
    assert resumed.part("rates", shared=True) is None
