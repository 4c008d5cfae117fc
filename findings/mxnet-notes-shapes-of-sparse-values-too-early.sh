#!/usr/bin/env bash
# MXNet 1.9.1: the shape of the values that a file notes of a sparse array may be 0, while all values are in the file.
#
# ``NDArray::Save`` writes the storage shape before it waits for the array, and everything else after that. An array that
# is still being computed, as after ``tostype``, has 0 values then. MXNet's own ``load`` is right, because it takes the
# number of values from the indices. Whoever reads the format by its fields finds no values, and values where the next
# array should begin.
# Seen: 0 and 4000 values noted for the same array, saved at once and saved after wait_to_read().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mxnet==1.9.1 numpy==1.23.5
"$folder/venv/bin/python" -W ignore - "$folder/arrays.params" <<'PYTHON'
import struct
import sys
from pathlib import Path

import mxnet as mx
import numpy as np


def noted():
    """The length of the values that the file notes: after the list's 24 bytes come magic, storage, and this shape."""
    dimensions, length = struct.unpack_from("<iq", Path(sys.argv[1]).read_bytes(), 32)
    assert dimensions == 1
    return length


found = []
for _ in range(20):
    dense = mx.nd.array(np.arange(4_000_000).reshape(2000, 2000) % 1000 == 0)
    sparse = dense.tostype("csr")
    mx.nd.save(sys.argv[1], {"sparse": sparse})
    found.append(noted())
    assert mx.nd.load(sys.argv[1])["sparse"].data.shape == (4000,)
sparse.wait_to_read()
mx.nd.save(sys.argv[1], {"sparse": sparse})
print(f"saved at once: {sorted(set(found))} values noted; saved after wait_to_read: {noted()}")
assert 0 in found and noted() == 4000, "this has changed"
PYTHON
