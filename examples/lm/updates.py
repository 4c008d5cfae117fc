"""How workers learn together: a gradient of all of them at each step, or each alone for many steps, by DiLoCo."""

from __future__ import annotations

import math
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

import kvstore as kv
from workers import DiLoCo, Trainer

BETAS = (0.9, 0.95)


class Updates(Protocol):
    """What makes a step of the model's gradients."""

    def step(self, rate: float) -> None:
        """Update with the gradients that the model has, at this learning rate."""

    def common_weights(self) -> AbstractContextManager[None]:
        """Have the weights in the model that all workers have in common."""

    def finish(self) -> None:
        """Give all workers the same weights."""


class EveryStep:
    """The servers have AdamW, and update at each step with the mean gradient of all workers."""

    def __init__(self, model: nn.Module, args: Namespace, store: kv.KVStore) -> None:
        decay = {name: float(parameter.dim() > 1) for name, parameter in model.named_parameters()}
        hyper = {"learning_rate": args.lr, "wd": args.wd, "wd_mult": decay, "beta2": BETAS[1]}
        named = model.named_parameters()
        self._trainer = Trainer(named, "adamw", hyper, store, overlap=False, compression_params=args.compression)

    def step(self, rate: float) -> None:
        self._trainer.set_learning_rate(rate)
        self._trainer.step()

    def common_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """Do nothing: workers have the same weights after each step."""


class ByDiLoCo:
    """Each worker has AdamW and trains alone; the servers have the outer optimizer."""

    def __init__(self, model: nn.Module, args: Namespace, store: kv.KVStore) -> None:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": args.wd},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=args.lr, betas=BETAS)
        self._diloco = DiLoCo(
            model,
            self._adamw,
            store,
            inner_steps=args.inner_steps,
            outer_optimizer="nag" if args.outer_momentum else "sgd",  # nag takes no momentum of 0
            outer_params={"learning_rate": args.outer_lr, "momentum": args.outer_momentum},
            fragments=args.fragments,
            overlap=args.overlap,
            compression_params=args.compression,
        )

    def step(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._diloco.step()

    def common_weights(self) -> AbstractContextManager[None]:
        return self._diloco.global_weights()

    def finish(self) -> None:
        self._diloco.finish()


def learning_rate(step: int, steps: int, warmup: int, highest: float, lowest: float) -> float:
    """Return the rate of a step, from 0: `highest` at the end of the warm-up, near `lowest` in the last step.

    It goes up from nothing, then down along a cosine (Loshchilov and Hutter, arXiv:1608.03983).
    """
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def updates(model: nn.Module, args: Namespace, store: kv.KVStore) -> Updates:
    """Return what the command line asks for."""
    return (ByDiLoCo if args.inner_steps else EveryStep)(model, args, store)
