"""The command line of train_dlrm.py and torch_dlrm.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from arguments import Parser, default_store, natural, positive

SCALE = 0.05  # the standard deviation of first embeddings


def parse(argv: Sequence[str] | None = None, *, alone: bool = False) -> argparse.Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message.

    Args:
        argv: the words.
        alone: leave out the options of stores.
    """
    parser = Parser("Train DLRM to predict clicks")
    data = parser.add_argument_group("data")
    data.add_argument("--fields", type=positive, default=26, help="fields of ids")
    data.add_argument("--largest", type=positive, default=100_000, help="values of the largest field")
    data.add_argument("--period", type=natural, default=1000, help="batches until all ids are new; 0: they stay")
    data.add_argument("--test-steps", type=positive, default=20, help="later batches that the AUC is measured on")

    network = parser.add_argument_group("network")
    network.add_argument("--dim", type=positive, default=16, help="numbers in the vector of an id")
    network.add_argument("--hidden", type=positive, default=64, help="width of hidden layers")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=400, help="number of steps")
    training.add_argument("--batch-size", type=positive, default=2048, help="clicks in a step, of all workers together")
    training.add_argument("--lr", type=float, default=0.005, help="learning rate of the network, with Adam")
    training.add_argument("--row-lr", type=float, default=0.02, help="learning rate of the embeddings")
    training.add_argument("--disp-steps", type=positive, default=50, help="steps between two lines")
    training.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")
    if not alone:
        training.add_argument("--row-optimizer", default="adam", help="adam, adagrad, rowwiseadagrad, ftrl, ...")
        tables = parser.add_argument_group("tables")
        tables.add_argument("--kv-store", default=default_store(), help="local, dist_sync, dist_async, ...")
        tables.add_argument("--codec", default="none", help="how rows travel: none, fp16, bf16, int8")
        tables.add_argument("--min-count", type=natural, default=0, help="steps an id must be in to get a row; 0: one")
        tables.add_argument("--unseen", type=natural, default=0, help="steps after which unseen rows go; 0: they stay")
        tables.add_argument("--capacity", type=natural, default=0, help="rows of a table at most; 0: any number")
        tables.add_argument("--no-lookahead", action="store_true", help="pull rows when they are needed, and wait")
    return parser.parse_args(argv)
