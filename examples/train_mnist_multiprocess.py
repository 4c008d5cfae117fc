#!/usr/bin/env python3
"""Train SINGA's convolutional network on MNIST with several processes of this machine, started from Python.

    python train_mnist_multiprocess.py 2

This is SINGA's second way to launch. The training and its options are those of `train_mnist.py`.
"""

from __future__ import annotations

import sys

from mnist import options
from mnist.idx import DataError
from train_mnist import train_mnist_cnn

import kvstore as kv
import launcher


def main() -> None:
    """Start the workers of the command line. Errors that the user can fix are printed in one line."""
    parser = options.parser("Train a network on MNIST with several processes")
    parser.add_argument("num_workers", type=options.positive, help="how many workers")
    parser.add_argument(
        "--num-servers", type=options.positive, help="how many servers; as many as workers if not given"
    )
    args = parser.parse_args()
    try:
        launcher.run(train_mnist_cnn, args=(args,), num_workers=args.num_workers, num_servers=args.num_servers)
    except (DataError, kv.KVStoreError, launcher.LaunchError, launcher.WorkerFailed) as exc:
        sys.exit(f"train_mnist_multiprocess.py: error: {exc}")


if __name__ == "__main__":
    main()
