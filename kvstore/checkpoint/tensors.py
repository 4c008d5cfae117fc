"""Files in the safetensors format, written in pieces while their sha256 is computed.

The library's ``save_file`` copies every tensor while it holds the interpreter's lock, which would stop a server that
serves meanwhile. Files are read by the library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kvstore.errors import CheckpointError
from kvstore.job.files import replacing, require_plain
from kvstore.sealed_folders import FileRecord, HashedFile
from kvstore.values import spec_of

METADATA = "__metadata__"  # what a header has beside tensors
DTYPES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
FILE_DTYPES = DTYPES | {"bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64"}  # stores do not have these


class TensorHeader(NamedTuple):
    """What a file says of a tensor: its name, dtype and shape."""

    name: str
    dtype: str
    shape: Sequence[int]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorHeader:
        spec = spec_of(tensor)
        return cls(name, spec.dtype, spec.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def write_tensors(
    path: Path,
    headers: Sequence[TensorHeader],
    contents: Iterable[memoryview | bytes],
    metadata: Mapping[str, str],
) -> FileRecord:
    """Write tensors to ``path``, whole or not at all; return what was written.

    Raises:
        CheckpointError: a tensor's name is another's too, or one that the format keeps for itself; nothing is written.
    """
    require_names(f"{path} is not written", [(header.name, "a tensor") for header in headers])
    with replacing(path) as draft, HashedFile(draft) as file:
        for buffer in (_header(headers, metadata), *contents):
            file.write(buffer)
    return file.record(path.name)


def require_names(failed: str, named: Iterable[tuple[str, str]], advice: str = "give one of them another name") -> None:
    """Check the names of the tensors of a file: a name that occurs twice leaves a file that is wrong or unreadable.

    Args:
        failed: the beginning of the error.

    Raises:
        CheckpointError: two tensors have the same name, or one has a name that the format keeps for itself.
    """
    known: dict[str, str] = {}
    for name, what in named:
        if name == METADATA:
            raise CheckpointError(
                f"{failed}: {what} is named {METADATA!r}, which safetensors keeps for itself; give it another name"
            )
        if name in known:
            raise CheckpointError(
                f"{failed}: {known[name]} and {what} would both have the name {name!r} there; {advice}"
            )
        known[name] = what


def _header(headers: Sequence[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {METADATA: dict(metadata)}
    start = 0
    for header in headers:
        stop = start + header.nbytes
        described[header.name] = {
            "dtype": FILE_DTYPES[header.dtype],
            "shape": list(header.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned where the file is mapped
    return len(text).to_bytes(8, "little") + text


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file at ``path``, opened by safetensors for torch.

    Raises:
        CheckpointError: it is missing or damaged; also for such errors inside the block.
    """
    try:
        require_plain(path)
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as exc:
        raise CheckpointError(f"{path}: missing or damaged: {exc}") from None
