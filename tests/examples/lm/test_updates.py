"""Two ways to update, which are the same for one worker that exchanges at each step with plain outer SGD."""

from __future__ import annotations

import pytest
import torch
from lm import options
from lm.transformer import Transformer
from lm.updates import updates

import kvstore as kv

DILOCO = "--inner-steps 1 --outer-lr 1 --outer-momentum 0"


def trained(words: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The model's parameters after a few steps, before and after the end."""
    torch.manual_seed(0)
    model = Transformer(5, 8, 1, 2, 8)
    update = updates(model, options.parse(words.split()), kv.create("local"))
    for step in range(5):
        numbers = torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model.loss(numbers[:, :-1], numbers[:, 1:]).backward()
        update.step(0.01)
    with update.common_weights():
        common = [parameter.detach().clone() for parameter in model.parameters()]
    update.finish()
    return common, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("words", ["", DILOCO])
def test_in_the_end_all_have_the_common_weights(words: str) -> None:
    for common, own in zip(*trained(words), strict=True):
        assert torch.equal(common, own)


def test_both_have_the_same_adamw() -> None:
    for one, other in zip(trained("")[1], trained(DILOCO)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_between_exchanges_the_common_weights_stay() -> None:
    common, own = trained("--inner-steps 4 --outer-lr 1 --outer-momentum 0")
    assert any(not torch.equal(one, other) for one, other in zip(common, own, strict=True))
