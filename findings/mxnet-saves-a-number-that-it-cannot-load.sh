#!/usr/bin/env bash
# MXNet 1.9.1: a file with an array without dimensions, such as ``mx.nd.array(3.5)``, is saved and cannot be loaded.
#
# Outside of ``np_shape``, a shape without dimensions stands for "no array" in a file, and nothing follows it. ``save``
# decides by whether there is an array, so device, dtype and value follow all the same. ``load`` takes these for the next
# array. All other arrays of the file are lost with it.
# Seen: save returns; load raises MXNetError "Unknown type enum".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mxnet==1.9.1 numpy==1.23.5
"$folder/venv/bin/python" -W ignore - "$folder/arrays.params" <<'PYTHON'
import sys

import mxnet as mx

number = mx.nd.array(3.5)
assert number.shape == (), "this has changed"
mx.nd.save(sys.argv[1], {"number": number, "weight": mx.nd.ones(2)})
try:
    loaded = mx.nd.load(sys.argv[1])
except mx.base.MXNetError as exc:
    print(f"saved without an error; load: {str(exc).splitlines()[-1]}")
    assert "Unknown type enum" in str(exc), "this has changed"
else:
    raise AssertionError(f"this has changed: {loaded}")
PYTHON
