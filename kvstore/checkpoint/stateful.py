"""``state_dict`` objects as tensors and JSON, and back. No pickle.

A state is built of dicts, lists, tuples, tensors, numbers, texts, bools and None, as torch's ``state_dict`` are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.errors import CheckpointError, UsageError
from kvstore.plain import scalar
from kvstore.spec import ITEMSIZE

# JSON has no tensors, no tuples and no keys but texts: these stand for them, each a dict with one such key.
_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def packed(state: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of ``state``, by names that begin with ``prefix``, and the rest as JSON.

    Tensors are copied.

    Raises:
        UsageError: there is something in it that is neither a tensor nor plain.
    """
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            kept = value.detach().to("cpu", copy=True).contiguous()
            name = f"{prefix}{len(tensors)}"
            if dtype not in ITEMSIZE:
                if dtype != "bool":
                    raise UsageError(f"a checkpoint cannot hold tensors of {dtype}")
                kept = kept.to(torch.uint8)
            tensors[name] = kept
            return {_TENSOR: name, "bool": dtype == "bool"}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value) and not value.keys() & {_TENSOR, _TUPLE, _PAIRS}:
                return {key: plain(each) for key, each in value.items()}
            return {_PAIRS: [[plain(key), plain(each)] for key, each in value.items()]}
        if isinstance(value, tuple):
            return {_TUPLE: [plain(each) for each in value]}
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:  # numpy's scalars are numbers, too
            value = scalar(value)
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise UsageError(f"a checkpoint holds tensors, numbers and texts, but this state has a {type(value).__name__}")

    return tensors, json.dumps(plain(state))


def joined(texts: Mapping[str, str]) -> str:
    """Return the JSON of a dict, of the JSON of its values; prefixes keep the names of their tensors apart."""
    pairs = ", ".join(f"[{json.dumps(name)}, {text}]" for name, text in texts.items())
    return f'{{"{_PAIRS}": [{pairs}]}}'


def unpacked(tensors: Mapping[str, torch.Tensor], text: str) -> Any:
    """Return the state that ``packed`` took apart. Raises ``CheckpointError`` if they do not belong together."""

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(each) for each in value]
        if not isinstance(value, dict):
            return value
        if _TENSOR in value:
            tensor = tensors[value[_TENSOR]]
            return tensor.to(torch.bool) if value["bool"] else tensor
        if _TUPLE in value:
            return tuple(whole(each) for each in value[_TUPLE])
        if _PAIRS in value:
            return {whole(key): whole(each) for key, each in value[_PAIRS]}
        return {key: whole(each) for key, each in value.items()}

    try:
        return whole(json.loads(text))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise CheckpointError(f"a state is damaged: {type(exc).__name__}: {exc}") from None
