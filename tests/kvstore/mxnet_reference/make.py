"""Make ``results.json``: what MXNet's optimizers make of the cases in ``cases.py``, and the rows of docs/from-mxnet.md.

Needs MXNet, which needs NumPy below 1.24 and Python up to 3.11, so an environment of its own::

    python3.11 -m venv mxnet-env
    mxnet-env/bin/pip install mxnet==1.9.1 "numpy<1.24"
    mxnet-env/bin/python tests/kvstore/mxnet_reference/make.py
"""

from __future__ import annotations

import json
from typing import Any

import mxnet as mx
import numpy as np
from cases import CASES, LR_MULT, SHOWN, STEPS, WD_MULT, arrays, dtype
from rows import RESULTS, Row, rows


def rounded(values: Any) -> list[float]:
    """Return values in as many digits as float32 has."""
    return [float(f"{value:.9g}") for value in np.asarray(values, dtype=np.float64).reshape(-1)]


def made(case: str) -> list[list[list[float]]]:
    """Return the arrays of a case after each of the steps ``SHOWN``."""
    name, options, _, factors = CASES[case]
    # LARS leaves biases alone, which it knows by their names; then it sets their wd_mult to 0.
    named = {"param_idx2name": {0: "fc_weight", 1: "fc_bias"}} if name == "lars" else {}
    optimizer = mx.optimizer.create(name, **options, **named)
    rate = optimizer.lr
    optimizer.set_lr_mult({1: LR_MULT})
    if name not in ("lars", "groupadagrad"):
        optimizer.set_wd_mult({1: WD_MULT})
    updater = mx.optimizer.get_updater(optimizer)
    weights = [mx.nd.array(value, dtype=dtype(case)) for value in arrays(case, 0)]
    shown = []
    for step in range(STEPS):
        optimizer.lr = rate * factors[step]
        grads = [mx.nd.array(value, dtype=dtype(case)) for value in arrays(case, step + 1)]
        updater(list(range(len(weights))), grads, weights)
        if step in SHOWN:
            shown.append([rounded(weight.asnumpy()) for weight in weights])
    return shown


def row_made(row: Row) -> list[float]:
    """Return the weight of a row after each update."""
    optimizer = mx.optimizer.create(row.optimizer, **row.options)
    updater = mx.optimizer.get_updater(optimizer)
    value, after = mx.nd.array([row.weight]), []
    for grad, rate in zip(row.grads, row.rates, strict=True):
        optimizer.lr = rate
        updater(0, mx.nd.array([grad]), value)
        after += rounded(value.asnumpy())
    return after


if __name__ == "__main__":
    cases = ",\n".join(f"  {json.dumps(case)}: {json.dumps(made(case))}" for case in CASES)
    lists = ",\n".join(f"  {json.dumps(row_made(row))}" for row in rows())
    text = f'{{\n "mxnet": "{mx.__version__}",\n "cases": {{\n{cases}\n }},\n "rows": [\n{lists}\n ]\n}}\n'
    RESULTS.write_text(text, encoding="utf-8")
