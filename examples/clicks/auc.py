"""How good predicted chances are: the area under the ROC curve, and the logarithmic loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Quality(NamedTuple):
    """How good chances are that were predicted for samples which were not trained on.

    Attributes:
        auc: see `auc`.
        best: the AUC of the true chances, which is the highest that can be expected; NaN where nobody knows them.
        log_loss: see `log_loss`.
        samples: how many samples there were.
    """

    auc: float
    best: float
    log_loss: float
    samples: int

    def __str__(self) -> str:
        best = "" if math.isnan(self.best) else f", where {self.best:.4f} is the best possible"
        return f"AUC {self.auc:.4f} of {self.samples} samples not trained on{best}; log loss {self.log_loss:.4f}"


def quality(predicted: np.ndarray, true: np.ndarray, labels: np.ndarray) -> Quality:
    """Return how good predicted chances are, given the true ones, if anybody knows them, and what happened."""
    best = auc(true, labels) if len(true) else math.nan
    return Quality(auc(predicted, labels), best, log_loss(predicted, labels), len(labels))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the chance that a click has a higher score than one that did not happen; equal scores count half.

    Args:
        scores: higher for what is likelier.
        labels: 1 or 0.

    Returns:
        From 0 to 1; 0.5 for scores that say nothing, NaN if all labels are the same.
    """
    order = np.argsort(scores, kind="stable")
    _, first, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.empty(len(scores))
    ranks[order] = np.repeat(first + (counts + 1) / 2, counts)
    clicks = float(labels.sum())
    others = len(labels) - clicks
    if not clicks or not others:
        return float("nan")
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def log_loss(chances: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean negative logarithm of the chance that was given to what happened."""
    given = np.clip(np.where(labels > 0, chances, 1 - chances), 1e-12, 1)
    return float(-np.log(given).mean())
