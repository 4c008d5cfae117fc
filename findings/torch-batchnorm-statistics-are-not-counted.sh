#!/usr/bin/env bash
# torch 2.13.0, CPU: a forward pass of BatchNorm changes running_mean without raising its version.
#
# torch counts writes in place (``Tensor._version``), and tools compare the count to learn whether a tensor has changed.
# The kernels of batch normalization write the running statistics without counting; ``num_batches_tracked`` is counted.
# Seen: running_mean and running_var have other values and the same version after a forward pass.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

layer = torch.nn.BatchNorm1d(3)
before = {name: (buffer.clone(), buffer._version) for name, buffer in layer.named_buffers()}
layer(torch.randn(8, 3) + 5)
for name, buffer in layer.named_buffers():
    value, version = before[name]
    changed, counted = not torch.equal(value, buffer), buffer._version != version
    print(f"{name}: changed {changed}, counted {counted}")
    assert changed and counted == (name == "num_batches_tracked"), "this has changed"
PYTHON
