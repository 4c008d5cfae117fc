"""The inputs of the cases in ``results.json``, for MXNet and for us: optimizers, options, weights, gradients and rates.

Every case names an optimizer, MXNet's options and ours where they differ, and how the rate goes. Numbers are NumPy's
``RandomState``, which is the same in all versions.
"""

from __future__ import annotations

import numpy as np

STEPS = 6
SHOWN = (2, 5)  # the weights after these steps are kept, counted from 0
SHAPES = ((2, 3), (3,))

CONSTANT = (1.0,) * STEPS
FALLING = (1.0, 1.0, 0.5, 0.5, 0.1, 0.1)
RISING = (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)

EVERY = {"rescale_grad": 0.5, "clip_gradient": 0.4}
# name of the case: optimizer, MXNet's options, what is added or replaced (None: left out) here, factors of the rate
CASES = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.1, **EVERY}, {}, FALLING),
    "sgd momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1, **EVERY}, {}, CONSTANT),
    "sgd momentum falls": (
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1, **EVERY},
        {"momentum_style": "mxnet"},
        FALLING,
    ),
    "sgd momentum rises": (
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1, **EVERY},
        {"momentum_style": "mxnet"},
        RISING,
    ),
    "nag": ("nag", {"learning_rate": 0.1, "momentum": 0.9, **EVERY}, {}, CONSTANT),
    "nag falls": ("nag", {"learning_rate": 0.1, "momentum": 0.9, **EVERY}, {"momentum_style": "mxnet"}, FALLING),
    "nag rises": ("nag", {"learning_rate": 0.1, "momentum": 0.5}, {"momentum_style": "mxnet"}, RISING),
    "adam": ("adam", {"learning_rate": 0.01, **EVERY}, {}, FALLING),
    "adam wd": ("adam", {"learning_rate": 0.01, "wd": 0.1, "beta1": 0.8, "beta2": 0.95}, {}, RISING),
    "adagrad": ("adagrad", {"learning_rate": 0.1, **EVERY}, {"eps": 1e-10}, FALLING),
    "adadelta": ("adadelta", {"rho": 0.9, "epsilon": 1e-5, **EVERY}, {"learning_rate": 1.0}, CONSTANT),
    "adamax": ("adamax", {"learning_rate": 0.02, **EVERY}, {}, FALLING),
    "adamax wd": ("adamax", {"learning_rate": 0.02, "wd": 0.1, "beta1": 0.7}, {}, CONSTANT),
    "nadam": ("nadam", {"learning_rate": 0.02, **EVERY}, {}, FALLING),
    "nadam wd": ("nadam", {"learning_rate": 0.02, "wd": 0.1, "schedule_decay": 0.01}, {}, CONSTANT),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01, "gamma1": 0.9, **EVERY}, {}, FALLING),
    "rmsprop wd": ("rmsprop", {"learning_rate": 0.01, "gamma1": 0.8, "wd": 0.1}, {}, RISING),
    "rmsprop centered": (
        "rmsprop",
        {"learning_rate": 0.01, "gamma1": 0.9, "gamma2": 0.9, "centered": True, **EVERY},
        {"gamma2": None, "momentum": 0.9},
        CONSTANT,
    ),
    "signum": ("signum", {"learning_rate": 0.01, "wd": 0.1, **EVERY}, {}, FALLING),
    "signum wd_lh": ("signum", {"learning_rate": 0.01, "momentum": 0.5, "wd": 0.2, "wd_lh": 0.1}, {}, RISING),
    "signum without momentum": ("signum", {"learning_rate": 0.01, "momentum": 0.0, "wd": 0.1}, {}, CONSTANT),
    "lars": ("lars", {"learning_rate": 1.0, "momentum": 0.9, "wd": 0.1, "eta": 0.1}, {}, CONSTANT),
    "lars falls": (
        "lars",
        {"learning_rate": 1.0, "momentum": 0.9, "wd": 0.1, "eta": 0.1, "eps": 0.01, "rescale_grad": 0.5},
        {},
        FALLING,
    ),
    "lars rises uncorrected": (
        "lars",
        {"learning_rate": 1.0, "momentum": 0.9, "wd": 0.1, "eta": 0.1, "momentum_correction": False},
        {},
        RISING,
    ),
    "lars without momentum": ("lars", {"learning_rate": 1.0, "eta": 0.1, "rescale_grad": 0.5}, {}, FALLING),
    "lamb": ("lamb", {"learning_rate": 0.01, "wd": 0.1, **EVERY}, {}, FALLING),
    "lamb bounds": (
        "lamb",
        {"learning_rate": 0.01, "wd": 0.1, "lower_bound": 1.0, "upper_bound": 1.5, "bias_correction": False},
        {},
        CONSTANT,
    ),
    "ftrl": ("ftrl", {"learning_rate": 0.1, "wd": 0.1, **EVERY}, {}, FALLING),
    "ftrl lamda1": ("ftrl", {"learning_rate": 0.5, "lamda1": 0.5, "beta": 0.5, "wd": 0.2}, {}, CONSTANT),
    "ftml": ("ftml", {"learning_rate": 0.01, **EVERY}, {}, FALLING),
    "ftml wd": ("ftml", {"learning_rate": 0.01, "wd": 0.1, "beta1": 0.7, "beta2": 0.9}, {}, RISING),
    "dcasgd": ("dcasgd", {"learning_rate": 0.1, "wd": 0.1, "lamda": 0.5, **EVERY}, {}, FALLING),
    "groupadagrad": ("groupadagrad", {"learning_rate": 0.1, **EVERY}, {}, FALLING),
    "sgd float16": (
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1, "multi_precision": True, **EVERY},
        {"momentum_style": "mxnet"},
        FALLING,
    ),
    "nag float16": (
        "nag",
        {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True, **EVERY},
        {"momentum_style": "mxnet"},
        FALLING,
    ),
    "lamb float16": ("lamb", {"learning_rate": 0.01, "wd": 0.1, "multi_precision": True}, {}, FALLING),
    "lars float16": (
        "lars",
        {"learning_rate": 1.0, "momentum": 0.9, "wd": 0.1, "eta": 0.1, "multi_precision": True},
        {},
        FALLING,
    ),
    "adam float16": ("adam", {"learning_rate": 0.01, "multi_precision": True, **EVERY}, {}, FALLING),
    "ftml float16": ("ftml", {"learning_rate": 0.01, "multi_precision": True, **EVERY}, {}, FALLING),
}
# The multipliers of array 1. MXNet's LARS sets the second for biases by itself.
LR_MULT, WD_MULT = 0.5, 2.0
# Its schedule of momentum counts the updates of all arrays together; ours counts each one's, as the paper does.
ALONE = ("nadam",)


def dtype(case: str) -> str:
    """Return the dtype of the weights and gradients of a case."""
    return "float16" if case.endswith("float16") else "float32"


def shapes(case: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a case's arrays."""
    optimizer = CASES[case][0]
    if optimizer in ALONE:
        return SHAPES[:1]
    return ((2, 3), (3, 1)) if optimizer == "groupadagrad" else SHAPES


def arrays(case: str, seed: int) -> list[np.ndarray]:
    """Return arrays of a case: weights for seed 0, gradients of a step for its number from 1."""
    random = np.random.RandomState(seed)
    return [random.randn(*shape).astype(dtype(case)) for shape in shapes(case)]
