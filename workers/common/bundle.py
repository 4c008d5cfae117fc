"""Bundles: nested plain values and tensors, as checked msgpack and a list of tensors. No code is loaded. Pure.

A value is ``None``, a bool, an integer of 64 bits, a float, a text, bytes, a tensor, or a list, tuple or dict of
values. Containers and tensors are encoded as lists that begin with their type: ``list``, ``tuple``, ``dict``,
``tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from kvstore import UsageError, WireError

MAX_DEPTH = 32
MAX_BYTES = 1 << 40  # of one tensor
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


class Form(NamedTuple):
    """The dtype and shape of a tensor in a bundle, and whether it is on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cpu: bool


def pack(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return ``value`` as msgpack, and its tensors, which are not copied. An error says what cannot be sent."""
    tensors: list[torch.Tensor] = []

    def tree(node: Any, where: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UsageError(f"{where or 'the value'} is nested more than {MAX_DEPTH} deep; send a flatter one")
        if isinstance(node, np.generic):
            node = node.item()
        if node is None or isinstance(node, bool | str | bytes):
            return node
        if isinstance(node, int) and -(2**63) <= node < 2**63:
            return int(node)
        if isinstance(node, float):
            return float(node)
        if isinstance(node, torch.Tensor) and node.layout == torch.strided and node.dtype in DTYPES.values():
            tensors.append(node)
            return ["tensor", str(node.dtype).removeprefix("torch."), list(node.shape), node.is_cpu]
        if isinstance(node, list | tuple):
            word = "list" if isinstance(node, list) else "tuple"
            return [word, *(tree(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(node))]
        if isinstance(node, dict):
            pairs = [
                [tree(key, where, depth + 1), tree(item, f"{where}[{key!r}]", depth + 1)] for key, item in node.items()
            ]
            return ["dict", *pairs]
        raise UsageError(
            f"{where or 'the value'} is {_describe(node)}: only plain values and dense tensors can be sent"
        )

    packed: bytes = msgpack.packb(tree(value, "", 0))
    return packed, tensors


def is_plain(value: Any) -> bool:
    try:
        pack(value)
    except UsageError:
        return False
    return True


def forms(packed: bytes) -> list[Form]:
    """Return the form of each tensor in a bundle, in order."""
    collected: list[Form] = []

    def note(form: Form) -> None:
        collected.append(form)

    _value(_read(packed), note, 0)
    return collected


def unpack(packed: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value of a bundle. ``tensors`` have the forms that ``forms`` returns."""
    left = list(tensors)

    def take(form: Form) -> torch.Tensor:
        if not left or (left[0].dtype, tuple(left[0].shape)) != (form.dtype, form.shape):
            raise WireError("the tensors do not have the dtypes and shapes of this bundle")
        return left.pop(0)

    value = _value(_read(packed), take, 0)
    if left:
        raise WireError("there are more tensors than in this bundle")
    return value


def _read(packed: bytes) -> Any:
    try:
        return msgpack.unpackb(packed, use_list=True, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise WireError(f"not a bundle: {exc}") from None


def _value(tree: Any, take: Callable[[Form], Any], depth: int) -> Any:
    """Return the value that ``tree`` encodes; ``take`` returns the tensor for each form."""
    if tree is None or isinstance(tree, bool | int | float | str | bytes):
        return tree
    if not isinstance(tree, list) or not tree or depth > MAX_DEPTH:
        raise WireError("not a bundle: a list in it does not begin with its type, or it is too deep")
    word, items = tree[0], tree[1:]
    if word == "tensor":
        return take(_form(items))
    if word == "list":
        return [_value(item, take, depth + 1) for item in items]
    if word == "tuple":
        return tuple(_value(item, take, depth + 1) for item in items)
    if word != "dict" or not all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        raise WireError(f"not a bundle: a list in it begins with {word!r:.40}, not list, tuple, dict or tensor")
    pairs = [(_value(key, take, depth + 1), _value(item, take, depth + 1)) for key, item in items]
    if not all(isinstance(key, str | bytes | int | float | None) for key, _ in pairs):
        raise WireError("not a bundle: a key in it is not a plain value")
    return dict(pairs)


def _form(items: list[Any]) -> Form:
    match items:
        case [str(dtype), list(shape), bool(cpu)] if dtype in DTYPES and all(type(n) is int and n >= 0 for n in shape):
            size = DTYPES[dtype].itemsize
            for n in shape:
                size *= n
            if size <= MAX_BYTES:
                return Form(DTYPES[dtype], tuple(shape), cpu)
    raise WireError("not a bundle: a tensor in it has an invalid dtype or shape")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of dtype {value.dtype} and layout {value.layout}"
    return f"an integer of more than 64 bits, {value}" if isinstance(value, int) else f"of type {type(value).__name__}"
