#!/usr/bin/env bash
# torch 2.13.0: an assignment to ``data`` of a sparse CSR tensor does nothing, and says nothing.
#
# ``tensor.data = other`` replaces the values of dense and of COO tensors. A CSR tensor keeps its own.
# Seen: the tensor of ones has ones after the assignment of twos; no error, no warning.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import warnings

import torch

warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
for name, make in {"dense": torch.Tensor.clone, "COO": torch.Tensor.to_sparse, "CSR": torch.Tensor.to_sparse_csr}.items():
    tensor, other = make(torch.eye(3)), make(2 * torch.eye(3))
    tensor.data = other
    found = tensor.to_dense().diagonal().tolist()
    print(f"{name}: {found}")
    assert found == ([1.0] * 3 if name == "CSR" else [2.0] * 3), "this has changed"
PYTHON
