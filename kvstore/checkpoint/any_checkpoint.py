"""``read_checkpoint``: the tensors of a file or folder of any of the formats that this package knows, by name."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kvstore.checkpoint.checkpoint_reader import CheckpointReader
from kvstore.checkpoint.exported import Exported
from kvstore.checkpoint.folders import found
from kvstore.checkpoint.mxnet_conversion import file_of, is_imported
from kvstore.checkpoint.mxnet_params import CSR, HEAD, MXNetArray, MXNetFile, read_params
from kvstore.checkpoint.mxnet_states import read_states
from kvstore.checkpoint.tensors import opened
from kvstore.dynamo import outside_graphs
from kvstore.errors import CheckpointError
from kvstore.job.files import foreign_format, require_plain
from kvstore.rows.row_sparse import RowSparse

PICKLES = (b"\x80", b"(dp", b"}q")  # how dicts begin in them, by protocol
Values = dict[str, torch.Tensor | RowSparse]


@outside_graphs
def read_checkpoint(path: str | os.PathLike[str], store: int = 0, states: bool = False) -> Values:
    """Return what a checkpoint or a file of weights has, by name, whoever wrote it. Needs no job.

        weights = kv.read_checkpoint("run7")  # the newest checkpoint in the directory
        model.load_state_dict(weights, strict=False)

    The tensors are the file's own memory, mapped, where that is possible: what is not used is not read. Writing to one
    changes no file. Arrays that several servers held are put together in new memory.

    Args:
        path: a directory that ``launch.py --checkpoint-dir`` was given, for its newest checkpoint; one checkpoint in
            it; a safetensors file, such as those of ``fit``, ``kvstore-checkpoint export`` and ``import_mxnet``; or a
            file of MXNet's arrays (``.params``), whose names lose ``arg:`` and ``aux:``; or of its optimizer states
            (``.states``): of parameter 3 ``3``, or ``3.0`` and ``3.1``, as adam's mean and variance. Nothing in them is
            run, and what else they have, rates and counts of updates, is left out.
        store: of a checkpoint, which of the job's stores, from 0.
        states: of a checkpoint, also the optimizer's states, by ``NAME.STATE``.

    Returns:
        Tensors by name. A table that grows, and a row-sparse array of MXNet, are a ``RowSparse``. A csr array of MXNet
        is a ``torch.sparse_coo`` tensor.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or damaged. Only sizes, names and shapes are
            looked at: ``kvstore-checkpoint verify`` compares all bytes with their sha256.
    """
    path = Path(path)
    if path.is_dir():
        folder = found(path)
        if folder is None:
            raise CheckpointError(f"{path}: no checkpoint there")
        return _of_folder(folder, store, states)
    begins = _begins(path)
    if begins == HEAD:
        return _of_mxnet(read_params(path))
    if begins.startswith(PICKLES) and begins[8:9] != b"{":  # the length of safetensors' header may begin so, too
        try:
            return _of_mxnet(read_states(path))
        except CheckpointError as exc:
            raise CheckpointError(f"{exc}. It is {foreign_format(path)}") from None
    try:
        with opened(path) as tensors:
            if is_imported(tensors):
                return _of_mxnet(file_of(tensors))
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
    except CheckpointError as exc:
        if (other := foreign_format(path)) is not None:
            raise CheckpointError(f"{path} is {other}") from None
        raise CheckpointError(f"{path}: {f'{exc}'.removeprefix(f'{path}: ')}") from None


def _begins(path: Path) -> bytes:
    try:
        require_plain(path)
        with path.open("rb") as file:
            return file.read(len(HEAD))
    except OSError as exc:
        raise CheckpointError(f"{path}: missing or unreadable ({exc.strerror})") from None


def _of_folder(folder: Path, store: int, states: bool) -> Values:
    with CheckpointReader(folder) as reader:
        exported = Exported.of(reader, store, states, f"{folder} cannot be read by name")
        values: Values = {str(key): reader.value(store, key) for key in exported.arrays}
        values |= {f"{key}.{name}": value for (key, name), value in exported.states.items()}
        for table in exported.tables:
            values |= table.values()
        return values


def _of_mxnet(file: MXNetFile) -> Values:
    named = zip(file.plain_names, file.arrays, strict=True)
    return {name: _value(array) for name, array in named if array.shape is not None}


def _value(array: MXNetArray) -> torch.Tensor | RowSparse:
    values, *indices = array.parts
    if not indices:
        return values
    if array.storage == CSR:
        starts, columns = indices
        rows = torch.arange(len(starts) - 1, dtype=torch.int64, device="cpu").repeat_interleave(starts.diff())
        places = torch.stack([rows, columns.long()])
    elif values.dim() > 1:
        return RowSparse(indices[0], values, array.shape)
    else:
        places = indices[0].unsqueeze(0)
    shape = array.shape or ()
    return torch.sparse_coo_tensor(places, values, shape, dtype=values.dtype, device="cpu", check_invariants=True)
