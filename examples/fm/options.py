"""The command line of train_fm.py and torch_fm.py: the options of MXNet's example, and where clicks come from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arguments import Parser, default_store, natural, positive

SIGMA = 0.05  # the standard deviation of first factors


def parse(argv: Sequence[str] | None = None, *, alone: bool = False) -> argparse.Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message.

    Args:
        argv: the words.
        alone: leave out the options of stores.
    """
    parser = Parser("Train a factorization machine")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, metavar="FILE", help="a LibSVM file; clicks made on the spot if not given")
    data.add_argument("--test-data", type=Path, metavar="FILE", help="a LibSVM file that is not trained on")
    data.add_argument("--input-size", type=positive, default=1_000_000, help="number of features in the input")
    data.add_argument("--clicks", type=positive, default=500_000, help="clicks in an epoch, without --data")

    training = parser.add_argument_group("training")
    training.add_argument("--num-epoch", type=positive, default=1, help="number of epochs to train")
    training.add_argument(
        "--batch-size", type=positive, default=2000, help="samples in a step, of all workers together"
    )
    training.add_argument("--factor-size", type=positive, default=8, help="number of latent variables")
    training.add_argument("--lr", type=float, default=0.003, help="learning rate")
    training.add_argument("--log-interval", type=positive, default=50, help="batches between two lines")
    training.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")
    if not alone:
        training.add_argument("--wd", type=float, default=0.0, help="weight decay, of the rows of a batch")
        training.add_argument("--optimizer", default="adam", help="adam, adagrad, ftrl, groupadagrad, sgd, ...")
        training.add_argument("--kvstore", default=default_store(), help="local, dist_sync, dist_async, ...")
    args = parser.parse_args(argv)
    if args.data and not args.test_data:
        parser.error("--data needs --test-data, which the AUC is measured on")
    return args
