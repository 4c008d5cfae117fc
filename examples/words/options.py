"""The command line of train_word2vec.py and torch_word2vec.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arguments import Parser, default_store, natural, positive


def parse(argv: Sequence[str] | None = None, *, alone: bool = False) -> argparse.Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message.

    Args:
        argv: the words.
        alone: leave out the options of stores.
    """
    parser = Parser("Train vectors of identifiers")
    parser.add_argument(
        "--source",
        type=Path,
        action="append",
        metavar="FILE",
        help="a file to learn; the standard library if not given",
    )
    parser.add_argument("--dim", type=positive, default=32, help="numbers in a vector")
    parser.add_argument("--steps", type=positive, default=600, help="number of steps")
    parser.add_argument("--batch-size", type=positive, default=4096, help="pairs in a step, of all workers together")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate")
    parser.add_argument("--disp-steps", type=positive, default=100, help="steps between two lines")
    parser.add_argument("--test-pairs", type=positive, default=5000, help="pairs that the vectors are judged by")
    parser.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")
    if not alone:
        parser.add_argument("--optimizer", default="adam", help="adam, adagrad, rowwiseadagrad, sgd, ...")
        parser.add_argument("--min-count", type=natural, default=2, help="steps an id must be in to get a row; 0: one")
        parser.add_argument("--codec", default="none", help="how rows travel: none, fp16, bf16, int8")
        parser.add_argument("--kv-store", default=default_store(), help="local, dist_sync, dist_async, ...")
    return parser.parse_args(argv)
