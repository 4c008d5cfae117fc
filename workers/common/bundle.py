"""Bundles: nested plain values with tensors among them, as checked msgpack and a list of tensors; no code. Pure.

A value is ``None``, a bool, an integer of 64 bits, a float, a text, bytes, a tensor, or a list, tuple or dict of
values. What msgpack has no word for goes as a list that begins with one; an ordinary list begins with ``list``.
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
    """What a tensor of a bundle is apart from its numbers; ``cpu`` says whether it lies on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cpu: bool


def pack(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return ``value`` as msgpack, and its tensors, which are not copied.

    Args:
        value: see the module.

    Raises:
        UsageError: there is something else in it; the message says where and what.
    """
    tensors: list[torch.Tensor] = []

    def tree(it: Any, where: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UsageError(f"{where or 'the value'} is nested more than {MAX_DEPTH} deep")
        if isinstance(it, np.generic):
            it = it.item()
        if it is None or isinstance(it, bool | str | bytes):
            return it
        if isinstance(it, int) and -(2**63) <= it < 2**63:
            return int(it)
        if isinstance(it, float):
            return float(it)
        if isinstance(it, torch.Tensor) and it.layout == torch.strided and it.dtype in DTYPES.values():
            tensors.append(it)
            return ["tensor", str(it.dtype).removeprefix("torch."), list(it.shape), it.is_cpu]
        if isinstance(it, list | tuple):
            word = "list" if isinstance(it, list) else "tuple"
            return [word, *(tree(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(it))]
        if isinstance(it, dict):
            pairs = [
                [tree(key, where, depth + 1), tree(item, f"{where}[{key!r}]", depth + 1)] for key, item in it.items()
            ]
            return ["dict", *pairs]
        raise UsageError(
            f"{where or 'the value'} is {_describe(it)}, which cannot be sent: only plain values and dense tensors can"
        )

    packed: bytes = msgpack.packb(tree(value, "", 0))
    return packed, tensors


def forms(packed: bytes) -> list[Form]:
    """Return the form of each tensor of a bundle, in their order.

    Raises:
        WireError: ``packed`` is no bundle.
    """
    found: list[Form] = []

    def note(form: Form) -> None:
        found.append(form)

    _value(_read(packed), note, 0)
    return found


def unpack(packed: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value; ``tensors`` are those that ``forms`` has asked for.

    Raises:
        WireError: ``packed`` is no bundle, or the tensors are others.
    """
    left = list(tensors)

    def take(form: Form) -> torch.Tensor:
        if not left or (left[0].dtype, tuple(left[0].shape)) != (form.dtype, form.shape):
            raise WireError("the tensors are not those of this bundle")
        return left.pop(0)

    value = _value(_read(packed), take, 0)
    if left:
        raise WireError("there are more tensors than this bundle has")
    return value


def _read(packed: bytes) -> Any:
    try:
        return msgpack.unpackb(packed, use_list=True, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise WireError(f"this is no bundle: {exc}") from None


def _value(tree: Any, take: Callable[[Form], Any], depth: int) -> Any:
    """The value that ``tree`` stands for, with what ``take`` gives for each tensor."""
    if tree is None or isinstance(tree, bool | int | float | str | bytes):
        return tree
    if not isinstance(tree, list) or not tree or depth > MAX_DEPTH:
        raise WireError("this is no bundle: a list in it does not say what it is, or it is too deep")
    word, items = tree[0], tree[1:]
    if word == "tensor":
        return take(_form(items))
    if word == "list":
        return [_value(item, take, depth + 1) for item in items]
    if word == "tuple":
        return tuple(_value(item, take, depth + 1) for item in items)
    if word != "dict" or not all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        raise WireError(f"this is no bundle: a list in it begins with {word!r:.40}")
    pairs = [(_value(key, take, depth + 1), _value(item, take, depth + 1)) for key, item in items]
    if not all(isinstance(key, str | bytes | int | float | None) for key, _ in pairs):
        raise WireError("this is no bundle: a key in it is no plain value")
    return dict(pairs)


def _form(items: list[Any]) -> Form:
    match items:
        case [str(dtype), list(shape), bool(cpu)] if dtype in DTYPES and all(type(n) is int and n >= 0 for n in shape):
            size = DTYPES[dtype].itemsize
            for n in shape:
                size *= n
            if size <= MAX_BYTES:
                return Form(DTYPES[dtype], tuple(shape), cpu)
    raise WireError("this is no bundle: a tensor in it has no valid dtype and shape")


def _describe(it: Any) -> str:
    if isinstance(it, torch.Tensor):
        return f"a tensor of dtype {it.dtype} and layout {it.layout}"
    return f"an integer of more than 64 bits, {it}" if isinstance(it, int) else f"of type {type(it).__name__}"
