"""Every optimizer that MXNet 1.9.1 has gives its numbers; see ``mxnet_reference/make.py``, which has asked it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mxnet_reference import cases
from mxnet_reference.rows import results

from kvstore.optim.optimizer import describe, names
from kvstore.optim.updater import Updater

REFERENCE = results()


def described(case: str) -> Any:
    name, options, ours, _ = cases.CASES[case]
    given = {key: value for key, value in (options | ours).items() if value is not None}
    lr_mult = {} if name == "adadelta" else {"lr_mult": {1: cases.LR_MULT}}  # MXNet's ignores all rates
    wd_mult = {} if name == "groupadagrad" else {"wd_mult": {1: 0.0 if name == "lars" else cases.WD_MULT}}
    return describe(name, given | lr_mult | wd_mult)


@pytest.mark.parametrize("case", cases.CASES)
def test_the_weights_are_mxnets(case: str) -> None:
    updater = Updater(described(case))
    rate, factors = updater.lr, cases.CASES[case][-1]
    weights = [torch.from_numpy(value) for value in cases.arrays(case, 0)]
    after: list[list[torch.Tensor]] = []
    for step in range(cases.STEPS):
        updater.lr = rate * factors[step]
        grads = map(torch.from_numpy, cases.arrays(case, step + 1))
        updater.update([(key, weight, grad) for key, (weight, grad) in enumerate(zip(weights, grads, strict=True))])
        if step in cases.SHOWN:
            after.append([weight.clone() for weight in weights])
    tolerance = 2e-3 if cases.dtype(case) == "float16" else 2e-6  # MXNet rounds half-precision gradients once more
    for ours, theirs in zip(after, REFERENCE["cases"][case], strict=True):
        for weight, values in zip(ours, theirs, strict=True):
            expected = torch.tensor(values).view(weight.shape)
            torch.testing.assert_close(weight.float(), expected, rtol=tolerance, atol=tolerance)


def test_every_case_is_of_this_mxnet() -> None:
    assert REFERENCE["mxnet"] == "1.9.1"
    assert list(REFERENCE["cases"]) == list(cases.CASES)
    # Noise has no reference; adamw, lans and adabelief came with MXNet 2, which was never released; the row-wise ones
    # are FBGEMM's.
    beyond = {"sgld", "adamw", "lans", "adabelief", "rowwiseadagrad", "rowwiseadam"}
    torchs = {"adafactor", "asgd", "muon", "radam", "rprop"}
    assert {case[0] for case in cases.CASES.values()} == set(names()) - beyond - torchs
