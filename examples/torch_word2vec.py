#!/usr/bin/env python3
"""Train vectors of identifiers in one process, with torch alone: what train_word2vec.py is compared with.

    python torch_word2vec.py

The vocabulary is counted beforehand, and each identifier has a number.
"""

from __future__ import annotations

import sys
from argparse import Namespace

import torch
from torch import nn
from words import options
from words.corpus import Corpus, CorpusError, standard_library
from words.skipgram import Ranking, loss, ranking, scores


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse(alone=True)
    try:
        corpus = read(args)
    except (CorpusError, OSError) as exc:
        sys.exit(f"torch_word2vec.py: error: {exc}")
    print(corpus)
    torch.manual_seed(args.seed)
    inner = nn.Embedding(len(corpus.names), args.dim, sparse=True)
    outer = nn.Embedding(len(corpus.names), args.dim, sparse=True)
    nn.init.uniform_(inner.weight, -0.5 / args.dim, 0.5 / args.dim)
    nn.init.zeros_(outer.weight)
    print(train(args, corpus, inner, outer))


def read(args: Namespace) -> Corpus:
    """Return the corpus that the command line asks for."""
    if args.source:
        return Corpus([path.read_text(encoding="utf-8") for path in args.source])
    return Corpus(standard_library())


def train(args: Namespace, corpus: Corpus, inner: nn.Embedding, outer: nn.Embedding) -> Ranking:
    """Train, and return how good the vectors are.

    Args:
        args: the command line.
        corpus: the identifiers.
        inner, outer: the vectors of centers and of their neighbours.
    """
    optimizer = torch.optim.SparseAdam([inner.weight, outer.weight], lr=args.lr)
    for step, pairs in enumerate(corpus.learned(range(args.steps), args.batch_size, args.seed), 1):
        lost = loss(scores(inner(pairs.centers), outer(pairs.targets)))
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()
        if step % args.disp_steps == 0:
            print(f"Step[{step}] Loss={lost.item():.4f}")
    with torch.no_grad():
        pairs = corpus.held_out(args.test_pairs, args.seed)
        return ranking(scores(inner(pairs.centers), outer(pairs.targets)))


if __name__ == "__main__":
    main()
