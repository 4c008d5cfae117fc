"""The command line of both scripts: SINGA's options, and a few more."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from arguments import Parser, natural, positive

DATA_DIR = Path(__file__).resolve().parents[1] / "data"
DIST_OPTIONS = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of both scripts."""
    made = Parser(description)
    training = made.add_argument_group("training")
    training.add_argument("-m", "--max-epoch", type=natural, default=10, help="epochs to train")
    training.add_argument("-b", "--batch-size", type=positive, default=64, help="images in a batch of each worker")
    training.add_argument(
        "--split-batch",
        action="store_true",
        help="divide a batch of --batch-size over the workers, so that many make the same steps as one",
    )
    training.add_argument("-l", "--learning-rate", type=rate, default=0.005, help="of SGD with momentum 0.9")
    training.add_argument(
        "--lr-schedule",
        choices=["constant", "cosine"],
        default="constant",
        help="cosine: the learning rate falls to 0 over the run, so that noise in the last steps does not matter",
    )
    training.add_argument("--seed", type=natural, default=0, help="the same seed gives the same run")

    sending = made.add_argument_group("how gradients are sent")
    sending.add_argument("-d", "--dist-option", choices=DIST_OPTIONS, default="plain", help="SINGA's strategies")
    sending.add_argument(
        "-s",
        "--sparsification",
        dest="spars",
        type=rate,
        default=0.05,
        help="what is sent: with sparseTopK this part of the elements, with sparseThreshold those of this magnitude",
    )
    sending.add_argument(
        "--threshold",
        type=natural,
        default=2097152,
        help="elements of the tensors in a message; with partialUpdate, in a partition",
    )

    data = made.add_argument_group("data")
    data.add_argument(
        "--dataset",
        choices=["auto", "mnist", "digits"],
        default="auto",
        help="auto: MNIST if every worker has its files, otherwise handwritten digits",
    )
    data.add_argument(
        "--no-mirror", action="store_true", help="only shift images at random; SINGA also mirrors half of them"
    )
    data.add_argument("--data-dir", type=Path, default=DATA_DIR, help="folder of MNIST's four idx files, or their .gz")
    return made


def rate(text: str) -> float:
    """Parse a positive number."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
