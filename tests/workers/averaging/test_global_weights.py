"""A worker's side of the global weights, with a store in this process: outer gradients out, new weights in."""

from __future__ import annotations

import pytest
import torch

import kvstore as kv
from workers.averaging.diloco import GlobalWeights, require_synchronous


def made(*values: float, dtype: torch.dtype = torch.float32) -> tuple[GlobalWeights, dict[str, torch.Tensor]]:
    params = {f"w{number}": torch.full((2,), value, dtype=dtype) for number, value in enumerate(values)}
    return GlobalWeights(kv.create("local"), params, "sgd", {"learning_rate": 0.5}), params


def test_an_outer_step_goes_part_of_the_way() -> None:
    weights, params = made(1.0, 5.0)
    params["w0"].fill_(3.0)
    weights.push(["w0"]).wait()
    assert params["w0"].tolist() == [3, 3], "until it is taken"
    weights.take(["w0"])
    assert (params["w0"].tolist(), params["w1"].tolist()) == ([2, 2], [5, 5])


def test_mixing() -> None:
    weights, params = made(1.0)
    params["w0"].fill_(3.0)
    weights.push(["w0"]).wait()
    params["w0"].fill_(10.0)
    weights.take(["w0"], mixing=0.25)
    assert params["w0"].tolist() == [4, 4]
    weights.pull()
    assert params["w0"].tolist() == [2, 2]


def test_what_one_began_with_is_no_gradient_in_half_precision() -> None:
    weights, params = made(1.0, dtype=torch.bfloat16)
    params["w0"].fill_(1.0 + 2**-7)
    weights.push(["w0"]).wait()
    weights.take(["w0"])
    assert params["w0"].tolist() == [1, 1], "rounded"
    weights.push(["w0"]).wait()
    assert weights.state()["global/w0"].tolist() == [1 + 2**-8] * 2


def test_the_global_weights_for_a_while() -> None:
    weights, params = made(1.0)
    params["w0"].fill_(3.0)
    with weights.swapped_in():
        assert params["w0"].tolist() == [1, 1]
    assert params["w0"].tolist() == [3, 3]


def test_state() -> None:
    weights, params = made(1.0)
    params["w0"].fill_(3.0)
    saved = {name: value.clone() for name, value in weights.state().items()}
    again, others = made(7.0)
    again.load_state(saved)
    assert others["w0"].tolist() == [3, 3]
    again.take(["w0"])
    assert others["w0"].tolist() == [1, 1]
    with pytest.raises(kv.UsageError, match="another model: it has no 'local/w1'"):
        made(1.0, 2.0)[0].load_state(saved)


def test_stores_that_update_for_every_push() -> None:
    require_synchronous(kv.create("local"))

    class MyAsyncStore(kv.KVStore):
        pass

    with pytest.raises(kv.UsageError, match=r"not 'myasyncstore': .* momentum makes training unstable"):
        require_synchronous(MyAsyncStore())
