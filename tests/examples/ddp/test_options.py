"""The command line of train_ddp.py."""

from __future__ import annotations

import pytest
from ddp import options


def test_the_options_are_the_seeds_by_default() -> None:
    args = options.parse([])
    assert (args.n_epochs, args.batch_size, args.lr, args.weight_decay) == (1, 128, 0.001, 0.001)
    with pytest.raises(SystemExit):
        options.parse(["--n-epochs", "0"])
