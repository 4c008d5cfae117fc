"""MXNet's files of arrays as safetensors, and back. What safetensors has no word for is in the file's metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.checkpoint.mxnet_params import (
    DENSE,
    DTYPES,
    INDICES,
    MAGICS,
    ROW_SPARSE,
    V2,
    V3,
    MXNetArray,
    MXNetFile,
    checked_shape,
    read_params,
    require_indices,
    written,
)
from kvstore.checkpoint.tensors import TensorHeader, opened, require_names, write_tensors
from kvstore.dynamo import outside_graphs
from kvstore.errors import CheckpointError, UsageError
from kvstore.job.files import replacing
from kvstore.plain import integer
from kvstore.sealed_folders import HashedFile
from kvstore.spec import MAX_DIMS, MAX_ELEMENTS
from kvstore.values import to_buffer

ABOUT = "mxnet"  # the name of the metadata


@outside_graphs
def import_mxnet(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write the arrays of MXNet's file ``path`` (``.params``) to ``out`` as safetensors, to the bit. Needs no MXNet.

        kv.import_mxnet("resnet-0012.params", "resnet-0012.safetensors")
        weights = kv.read_checkpoint("resnet-0012.safetensors")

    Names lose ``arg:`` and ``aux:``, unless two would then be the same; arrays that were saved as a list have their
    numbers. Of a row-sparse array there are its rows, by its name, and ``NAME.ids``; of a csr array its values,
    ``NAME.indptr`` and ``NAME.indices``. ``export_mxnet`` makes the same bytes of it again.

    Args:
        path: a file of ``mx.nd.save``, ``save_checkpoint``, ``save_parameters`` or ``export``, of MXNet 1 or older.
        out: the file, which is replaced or made whole.

    Returns:
        The number of arrays.

    Raises:
        CheckpointError: ``path`` is missing, is no such file, or is damaged; or two tensors would have the same name.
        OSError: ``out`` cannot be written.
    """
    file = read_params(Path(path))
    described: list[dict[str, Any]] = []
    headers: list[TensorHeader] = []
    tensors: list[torch.Tensor] = []
    for name, array in zip(file.plain_names, file.arrays, strict=True):
        described.append(
            {
                "tensor": name,
                "magic": array.magic,
                "storage": array.storage,
                "shape": array.shape,
                "device": array.device,
                "noted": array.noted,
            }
        )
        tensors += array.parts
        headers += [
            TensorHeader(part_name, str(part.dtype).removeprefix("torch."), part.shape)
            for part_name, part in zip(_part_names(name, array.storage), array.parts, strict=False)
        ]
    require_names(f"{out} is not written", [(header.name, f"array {header.name!r}") for header in headers])
    metadata = {"format": "pt", ABOUT: json.dumps({"names": file.names, "arrays": described})}
    write_tensors(Path(out), headers, map(to_buffer, tensors), metadata)
    return len(file.arrays)


@outside_graphs
def export_mxnet(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write the tensors of a safetensors file as MXNet's file ``out`` (``.params``), which ``mx.nd.load`` reads.

    A file that ``import_mxnet`` wrote becomes the bytes that it was made of. Any other becomes dense arrays by the
    names of the tensors: gluon's ``load_parameters`` wants them as ``0.weight``, Module's ``load_checkpoint`` as
    ``arg:fc1_weight``.

    Args:
        path: the safetensors file.
        out: the file, which is replaced or made whole.

    Returns:
        The number of arrays.

    Raises:
        CheckpointError: ``path`` is missing or damaged, or has what MXNet has not: a dtype, or a tensor without
            dimensions.
        OSError: ``out`` cannot be written.
    """
    with opened(Path(path)) as tensors:
        try:
            file = file_of(tensors) if is_imported(tensors) else _dense(tensors)
        except CheckpointError as exc:
            raise CheckpointError(f"{path}: {exc}") from None
    with replacing(Path(out)) as draft, HashedFile(draft) as target:
        for piece in written(file):
            target.write(piece)
    return len(file.arrays)


def is_imported(tensors: Any) -> bool:
    """Return whether an opened safetensors file is one that ``import_mxnet`` wrote."""
    return ABOUT in (tensors.metadata() or {})


def _dense(tensors: Any) -> MXNetFile:
    names = list(tensors.keys())
    arrays = []
    for name in names:
        value = tensors.get_tensor(name)
        if not value.dim():
            raise CheckpointError(
                f"tensor {name!r} has no dimensions, and MXNet 1 cannot load such a number: leave it out, or give it "
                "the shape (1,)"
            )
        arrays.append(MXNetArray(V2, DENSE, tuple(value.shape), parts=(_known(name, value),)))
    return MXNetFile(arrays, names)


def _known(name: str, value: torch.Tensor) -> torch.Tensor:
    if (dtype := str(value.dtype).removeprefix("torch.")) not in DTYPES:
        raise CheckpointError(f"tensor {name!r} is of {dtype}, which MXNet has not")
    return value


def file_of(tensors: Any) -> MXNetFile:
    """Return what an opened safetensors file that ``import_mxnet`` wrote was made of; the tensors may be others now.

    Raises:
        CheckpointError: the metadata is damaged, or does not fit the tensors.
    """
    try:
        about = json.loads(tensors.metadata()[ABOUT])
        names = [str(name) for name in about["names"]]
        "".join(names).encode()  # JSON may have what UTF-8 has not
        arrays = [_array(tensors, entry) for entry in about["arrays"]]
        known = {part for each in about["arrays"] for part in _part_names(each["tensor"], each["storage"])}
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, UsageError) as exc:
        raise CheckpointError(f"what it says of MXNet's arrays is damaged: {exc}") from None
    if names and len(names) != len(arrays):
        raise CheckpointError(f"it has {len(arrays)} of MXNet's arrays, but {len(names)} names")
    if others := [name for name in tensors.keys() if name not in known]:  # noqa: SIM118 - not a dict
        raise CheckpointError(
            f"tensor {others[0]!r} is not among what MXNet's file had: leave it out, or save without the metadata "
            f"{ABOUT!r}"
        )
    return MXNetFile(arrays, names)


def _array(tensors: Any, entry: Any) -> MXNetArray:
    name, magic, storage, shape = str(entry["tensor"]), entry["magic"], entry["storage"], entry["shape"]
    if magic not in MAGICS or storage not in INDICES or (storage != DENSE and magic != V2):
        raise CheckpointError(f"MXNet writes no array as {name!r}")
    kind, number = (integer("device", each, 0, 2**31 - 1) for each in entry["device"])
    noted = _checked(entry["noted"])
    if shape is None:
        return MXNetArray(magic, storage, None, (kind, number), noted=noted)
    shape = _checked(shape)
    parts = [_known(part, tensors.get_tensor(part)) for part in _part_names(name, storage)]
    values, *indices = parts
    if storage == DENSE:  # it may have another shape by now
        if not values.dim() and shape and magic != V3:
            raise CheckpointError(f"tensor {name!r} has no dimensions, and MXNet 1 cannot load such a number")
        return MXNetArray(magic, storage, tuple(values.shape), (kind, number), (values,))
    if any(index.dtype not in (torch.int32, torch.int64) or index.dim() != 1 for index in indices):
        raise CheckpointError(f"the indices of {name!r} are no lists of integers of 32 or 64 bits")
    held = (len(indices[-1]), *(shape[1:] if storage == ROW_SPARSE else ()))
    if values.shape != held or (storage != ROW_SPARSE and len(shape) != 2):
        raise CheckpointError(f"{name!r} is {storage} of {list(shape)}, but its values are {list(values.shape)}")
    require_indices(repr(name), shape, indices)
    return MXNetArray(magic, storage, shape, (kind, number), tuple(parts), noted)


def _checked(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{shape!r:.60} is no shape")
    return checked_shape(tuple(integer("dimension", each, 0, MAX_ELEMENTS) for each in shape))


def _part_names(name: str, storage: str) -> Sequence[str]:
    return [name, *(f"{name}.{part}" for part in INDICES[storage])]
