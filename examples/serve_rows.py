#!/usr/bin/env python3
"""Evaluate a factorization machine while train_fm.py trains it: a reader pulls rows, and takes no part in training.

    launch.py -n 2 -s 2 --readers readers.json --env-server KVSTORE_READER_SHARE:0.05 "python train_fm.py" &
    python serve_rows.py readers.json

Give it the options of train_fm.py that say what the samples are. It ends with the job. Without the variable the servers
of a busy host give it less of their time, and it evaluates less often.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from clicks.auc import Quality
from fm import data, options
from fm.data import Samples
from torch_fm import quality_of, test_batches
from train_fm import KEYS, predicted

import kvstore as kv


def main() -> None:
    """Evaluate until the job has ended. Errors that the user can fix are printed in one line."""
    parser = argparse.ArgumentParser(description="Evaluate what train_fm.py trains", add_help=False, allow_abbrev=False)
    parser.add_argument("readers", type=Path, help="the file of launch.py --readers")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two evaluations")
    parser.add_argument("--max-staleness", type=int, default=10, help="how many rounds old the rows may be")
    own, others = parser.parse_known_args()
    args = options.parse(others, alone=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        tested = list(test_batches(args))
        while not own.readers.exists():  # the job has not begun
            time.sleep(0.1)
        with kv.connect(own.readers, max_staleness=own.max_staleness) as reader:
            serve(own, reader, tested)
    except kv.NodeLost as exc:
        logging.info("%s", exc)
    except (data.DataError, kv.KVStoreError) as exc:
        sys.exit(f"serve_rows.py: error: {exc}")


def serve(own: Namespace, reader: kv.Reader, tested: list[Samples]) -> None:
    """Evaluate again and again, until the job ends, which raises NodeLost."""
    reader.wait_for(KEYS)
    while True:
        began = time.monotonic()
        reached = evaluate(reader, tested)
        logging.info("after round %d: %s", reader.rounds("bias")[0], reached)
        time.sleep(max(0.0, own.every - (time.monotonic() - began)))


@torch.no_grad()
def evaluate(reader: kv.Reader, tested: list[Samples]) -> Quality:
    """Return how good the predictions of the model as it is now are."""
    ids = torch.cat([batch.ids.reshape(-1) for batch in tested]).unique()
    w, v = reader.row_sparse_pull(KEYS[:2], row_ids=[ids, ids])
    bias = reader.pull("bias")
    chances: list[np.ndarray] = []
    for batch in tested:
        logits = predicted(batch, torch.searchsorted(ids, batch.ids), w, v, bias)
        chances.append(logits.double().sigmoid().numpy())
    return quality_of(chances, tested)


if __name__ == "__main__":
    main()
