#!/usr/bin/env python3
"""Train vectors of the identifiers in the standard library's source, in tables that grow on the servers.

    python train_word2vec.py
    launch.py -n 2 -s 2 --launcher local "python train_word2vec.py"

No vocabulary is counted: an identifier is known by a hash of 64 bits, and its row is made by the second step that it is
in (--min-count). torch_word2vec.py is the same in one process without a store.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator

import torch
from closing import cost, size
from torch_word2vec import read
from words import options
from words.corpus import Corpus, CorpusError, Pairs
from words.skipgram import Ranking, loss, nearest, ranking, scores

import kvstore as kv
import workers

SHOWN = ("self", "path", "socket", "float", "append")  # whose neighbours are printed
COMMON = 2000  # identifiers that neighbours are looked for among


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        corpus = read(args)
        with kv.create(args.kv_store) as store:
            train(args, corpus, store)
    except (CorpusError, OSError, kv.KVStoreError) as exc:
        sys.exit(f"train_word2vec.py: error: {exc}")


def train(args: Namespace, corpus: Corpus, store: kv.KVStore) -> Ranking:
    """Run one worker, together with the others; return how good the vectors are."""
    say = logging.info if store.rank == 0 else logging.debug
    say("%s", corpus)
    store.set_optimizer(args.optimizer, learning_rate=args.lr)
    admit = kv.MinCount(args.min_count) if args.min_count else None
    table = {"store": store, "seed": args.seed, "admit": admit, "codec": args.codec}
    inner = workers.Embedding(None, args.dim, key="inner", init="uniform", scale=0.5 / args.dim, **table)
    outer = workers.Embedding(None, args.dim, key="outer", init="zeros", **table)

    own = corpus.learned(range(args.steps), args.batch_size, args.seed, store.rank, store.num_workers)
    batches = workers.lookahead(
        by_id(corpus, own), {inner: lambda pairs: pairs.centers, outer: lambda pairs: pairs.targets}
    )
    began = time.perf_counter()
    for step, pairs in enumerate(batches, 1):
        lost = loss(scores(inner(pairs.centers), outer(pairs.targets)))
        lost.backward()
        if step % args.disp_steps == 0:
            say("Step[%d] Loss=%.4f", step, lost.item())
    say("%s", cost(time.perf_counter() - began, args.steps, store.statistics()))

    with torch.no_grad():
        pairs = next(by_id(corpus, [corpus.held_out(args.test_pairs, args.seed)]))
        reached = ranking(scores(inner(pairs.centers), outer(pairs.targets)))
        common = inner(corpus.ids[:COMMON])
    for name in SHOWN:
        if name in corpus.names[:COMMON]:
            like = nearest(common, corpus.names.index(name), count=5)
            say("%s: %s", name, ", ".join(corpus.names[number] for number in like))
    for each in (inner, outer):
        counts = store.table_statistics(each.key)
        say("table %r: %d rows in %s; %d gradients were refused", each.key, *_of(counts))
    say("%s", reached)
    return reached


def by_id(corpus: Corpus, batches: Iterable[Pairs]) -> Iterator[Pairs]:
    """Return batches whose identifiers are ids in place of numbers."""
    return (Pairs(*(corpus.ids[numbers] for numbers in pairs)) for pairs in batches)


def _of(counts: dict[str, int]) -> tuple[int, str, int]:
    return counts["rows"], size(counts["bytes"]), counts["refused"]


if __name__ == "__main__":
    main()
