"""The command line of train_ddp.py. Needle's script has these values in its text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arguments import Parser, natural, positive
from cifar.options import DATA_DIR


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``argv``, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Train Needle's ResNet9 on CIFAR-10, or on handwritten digits where that cannot be had")
    parser.add_argument("--n-epochs", type=positive, default=1, help="epochs to train")
    parser.add_argument("--batch-size", type=positive, default=128, help="images in a step of all workers together")
    parser.add_argument("--lr", type=float, default=0.001, help="Adam's learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.001, help="Adam's weight decay")
    parser.add_argument("--dataset", choices=["auto", "cifar10", "digits"], default="auto", help="what to train on")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR, help="where CIFAR-10 is, or is downloaded to")
    parser.add_argument("--num-examples", type=positive, help="number of training images; all if not given")
    parser.add_argument("--disp-batches", type=positive, default=100, help="number of batches between reports")
    parser.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")
    return parser.parse_args(argv)
