#!/usr/bin/env bash
# safetensors 0.8.0 with torch 2.13.0: the conjugate of a tensor is saved as the tensor itself, without an error.
#
# In torch ``conj()`` computes nothing: it returns a view of the same memory with a bit that says that the values are
# conjugates. ``save_file`` takes the memory as it is. ``resolve_conj()`` before it avoids that. ``torch.save`` and
# torch.distributed.checkpoint keep what the tensor says.
# Seen: of 1+2j, -3+4j the conjugates are saved, and load_file returns 1+2j, -3+4j.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 packaging
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import io
import tempfile

import torch
from safetensors.torch import load_file, save_file

values = torch.tensor([1 + 2j, -3 + 4j])
conjugates = values.conj()
assert conjugates.tolist() == [1 - 2j, -3 - 4j]
assert conjugates.is_contiguous()

with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
    save_file({"a": conjugates}, file.name)
    loaded = load_file(file.name)["a"]
    print(f"saved {conjugates.tolist()}, loaded {loaded.tolist()}")
    assert torch.equal(loaded, values), "this has changed"
    save_file({"a": conjugates.resolve_conj()}, file.name)
    assert torch.equal(load_file(file.name)["a"], conjugates), "this has changed"

file = io.BytesIO()
torch.save(conjugates, file)
file.seek(0)
assert torch.equal(torch.load(file), conjugates), "this has changed"
PYTHON
