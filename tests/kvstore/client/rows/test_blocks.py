from __future__ import annotations

import torch

from kvstore.client.pack_rows import block_of


def test_the_array_has_all_memory_of_the_parts() -> None:
    whole = torch.arange(24.0).view(6, 4)
    block = block_of([whole[3:5], whole[1:1], whole[0:2].detach()], 4)
    assert block is not None
    assert block.firsts.tolist() == [3, 1, 0]
    assert block.rows.tolist() == whole.tolist()
    block.rows[0] = 7
    assert whole[0].tolist() == [7, 7, 7, 7]


def test_rows_in_memory_of_their_own_are_no_block() -> None:
    whole = torch.zeros(6, 4)
    assert block_of([whole[1:3], torch.zeros(1, 4)], 4) is None
    assert block_of([whole.view(-1)[2:10].view(2, 4), whole[4:]], 4) is None
