#!/usr/bin/env bash
# safetensors 0.8.0: a tensor may be named ``__metadata__`` when it is saved, and the file cannot be read.
#
# The format keeps texts under that name in its header. ``save_file`` does not look, so the header has the name with a
# tensor's description, and ``load_file`` refuses the whole file, with all other tensors in it.
# Seen: save_file returns; load_file raises SafetensorError "invalid JSON in header: invalid type: sequence".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 packaging
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import tempfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
    save_file({"weight": torch.ones(2), "__metadata__": torch.zeros(2)}, file.name)
    try:
        load_file(file.name)
    except SafetensorError as exc:
        print(f"saved without an error; load_file: {exc}")
        assert "invalid type: sequence" in str(exc), "this has changed"
    else:
        raise AssertionError("this has changed: the file can be read")
PYTHON
