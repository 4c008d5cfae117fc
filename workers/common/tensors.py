"""Tensors of every kind, as users hand them in: their bytes, their parts, and how they are overwritten. Pure.

Buffers are not only dense floats: masks are expanded or bool, scales are float8, graphs are sparse. What such a tensor
holds travels and is saved as its bytes, or as *parts*: dense tensors of dtypes that every format has, and a *form* of
plain values that says how they belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

from kvstore import UsageError
from kvstore.values import made_of_others, readable

PLAIN = frozenset(
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ]
)  # dtypes that files and messages have
AVERAGED = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)  # the others, such as float8, are codes, counts and positions, of which no mean makes sense
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout): layout for layout in _COMPRESSED}


def to_tensor(value: Any) -> torch.Tensor:
    """Return ``value`` as a tensor, like ``torch.as_tensor``; also arrays of foreign byte order or negative strides."""
    if isinstance(value, torch.Tensor):
        return value  # as_tensor would move it to the program's default device
    return torch.as_tensor(readable(value) if isinstance(value, np.ndarray) else value, device="cpu")


def require_own_memory(tensors: Mapping[Any, torch.Tensor]) -> None:
    """Raise ``UsageError`` for a parameter that has no memory yet, or shares another's."""
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise UsageError(
                f"parameter {name!r} has no shape yet, as in nn.LazyLinear: call the model once with a batch before"
            )
        if other := made_of_others(tensor):
            raise UsageError(f"parameter {name!r} must have memory of its own, and is {other}")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an array of elements that lie in memory, one by one."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta or made_of_others(tensor))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of a dense ``tensor`` lie in the same place, as ``expand`` makes them."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_parts(tensor: torch.Tensor) -> bool:
    """Whether ``take_apart`` takes ``tensor``: it is dense, sparse or quantized."""
    if tensor.is_meta or made_of_others(tensor):
        return False
    return tensor.layout in (torch.strided, torch.sparse_coo, *_COMPRESSED)


def is_averaged(tensor: torch.Tensor) -> bool:
    """Whether a mean of such tensors makes sense: it is dense, and its elements are real or complex numbers."""
    return is_dense(tensor) and tensor.dtype in AVERAGED and not (tensor.is_conj() or tensor.is_neg())


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex ``tensor`` as real numbers, over the same memory; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def headroom(workers: int) -> float:
    """Return the power of two by which so many workers multiply values, so that their sum cannot overflow.

    A sum of the scaled values, divided by ``workers`` first and by this then, is never beyond the largest of them:
    each step rounds to at most what its type can hold. The scaling itself rounds nothing but subnormal numbers.
    """
    return 2.0 ** -(workers - 1).bit_length()


def memory_order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from that with the largest stride on: the order in which the elements lie in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense ``tensor``, flat, as they lie in memory; maybe a view with gaps."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.permute(memory_order(tensor.stride())).reshape(-1)


def as_bits(flat: torch.Tensor) -> torch.Tensor:
    """Return flat elements as integers, over the same memory: each is equal to itself, as NaN is not."""
    if flat.itemsize > 8:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_BITS[flat.itemsize])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense ``tensor``, flat, on the CPU; over its own memory if possible."""
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved.cpu().contiguous().reshape(-1).view(torch.uint8)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return 63 bits that stand for the content of ``tensor``: equal for equal bits, and hardly ever for others."""
    form, parts = take_apart(tensor)
    content = hashlib.sha256(repr(form).encode())
    for name, part in parts.items():
        content.update(f"{name} {part.dtype} {list(part.shape)}".encode())
        content.update(flat_bytes(part).numpy().data)
    return int.from_bytes(content.digest()[:8], "big") >> 1


@torch.no_grad()
def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value``, of the same shape and kind, into ``tensor``, whatever its dtype, device and strides are."""
    # ``detach`` copies what a sparse or a quantized tensor is beside its elements: only dense ones are detached.
    if tensor.layout in _COMPRESSED:
        # ``copy_`` needs as many elements, and ``resize_as_sparse_`` leaves a torn tensor where memory is shared.
        if tensor.values().shape != value.values().shape:
            swap_tensors(tensor, value.clone())  # type: ignore[no-untyped-call]
            return
    elif tensor.layout == torch.sparse_coo:
        tensor.resize_as_sparse_(value)  # ``copy_`` alone keeps the old positions
    elif not tensor.is_quantized:
        tensor = tensor.detach()
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:  # expanded: ``copy_`` refuses to write an element more than once
                tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def take_apart(tensor: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the form and the parts of ``tensor``. A dense tensor of a plain dtype is its own part, and has no form."""
    tensor = tensor.detach()
    if not has_parts(tensor):
        kind = "one without memory (meta)" if tensor.is_meta else f"one of layout {tensor.layout}"
        kind = made_of_others(tensor) or kind
        raise UsageError(f"only dense, sparse and quantized tensors can be sent and saved, not {kind}")
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        form: dict[str, Any] = {"kind": "quantized", "dtype": dtype, "shape": shape}
        raw = {"bytes": _storage_bytes(tensor.contiguous().cpu())}
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {**form, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}, raw
        channels = {"scales": tensor.q_per_channel_scales(), "zero_points": tensor.q_per_channel_zero_points()}
        return {**form, "axis": tensor.q_per_channel_axis()}, raw | channels
    if tensor.layout == torch.sparse_coo:
        parts = {"indices": tensor._indices()}
        form = {"kind": "sparse_coo", "shape": shape, "coalesced": tensor.is_coalesced()}
        return _with_values(form, parts, tensor._values())
    if tensor.layout in _COMPRESSED:
        outer, inner = _COMPRESSED[tensor.layout]
        parts = {"outer": getattr(tensor, outer)(), "inner": getattr(tensor, inner)()}
        return _with_values({"kind": str(tensor.layout), "shape": shape}, parts, tensor.values())
    if tensor.dtype in PLAIN:
        return {}, {"": tensor}
    return {"kind": "bytes", "dtype": dtype, "shape": shape}, {"bytes": flat_bytes(tensor)}


def pack(
    tensors: Mapping[str, torch.Tensor], held: Collection[torch.dtype]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return ``tensors`` as tensors that a file can hold, and the forms of tensors that it cannot, by name."""
    packed: dict[str, torch.Tensor] = {}
    forms: dict[str, Any] = {}
    for name, tensor in tensors.items():
        form, parts = ({}, {"": tensor}) if is_dense(tensor) and tensor.dtype in held else take_apart(tensor)
        if form:
            forms[name] = form
        packed |= {f"{name}/{part}" if form else name: value for part, value in parts.items()}
    return packed, forms


def unpack(packed: Mapping[str, torch.Tensor], forms: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that ``pack`` was given. Damaged ones raise ``ValueError``."""
    tensors = dict(packed)
    for name, form in forms.items():
        parts = {part: tensors.pop(part) for part in packed if part.startswith(f"{name}/")}
        tensors[name] = put_together(form, {part.removeprefix(f"{name}/"): value for part, value in parts.items()})
    return tensors


def put_together(form: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor, on the CPU, that ``take_apart`` was given. Parts that do not belong together raise ``ValueError``."""
    try:
        return _put_together(form, parts)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise ValueError(f"the parts of a tensor are damaged: {type(exc).__name__}: {exc}") from None


def _put_together(form: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if not form:
        return parts[""]
    shape = tuple(map(int, form["shape"]))
    if form["kind"] == "bytes":
        return parts["bytes"].clone().view(_dtype(form["dtype"])).view(shape)
    if form["kind"] == "quantized":
        zeros, dtype = torch.zeros(shape, dtype=torch.float32, device="cpu"), _dtype(form["dtype"])
        if "axis" in form:
            made = torch.quantize_per_channel(zeros, parts["scales"], parts["zero_points"], int(form["axis"]), dtype)
        else:
            made = torch.quantize_per_tensor(zeros, float(form["scale"]), int(form["zero_point"]), dtype)
        _storage_bytes(made).copy_(parts["bytes"])
        return made
    values = put_together(form["values"], {name[7:]: part for name, part in parts.items() if name[:7] == "values/"})
    if form["kind"] == "sparse_coo":
        coalesced = bool(form["coalesced"])
        return torch.sparse_coo_tensor(
            parts["indices"],
            values,
            shape,
            is_coalesced=coalesced,
            check_invariants=True,
            dtype=values.dtype,
            device="cpu",
        )
    return torch.sparse_compressed_tensor(
        parts["outer"],
        parts["inner"],
        values,
        shape,
        layout=_LAYOUTS[form["kind"]],
        check_invariants=True,
        dtype=values.dtype,
        device="cpu",
    )


def _with_values(
    form: dict[str, Any], parts: dict[str, torch.Tensor], values: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    value_form, value_parts = take_apart(values)
    named = {f"values/{name}": part for name, part in value_parts.items()}
    return {**form, "values": value_form}, parts | named


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a quantized ``tensor``, which cannot be viewed as another dtype, over its own memory."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype
