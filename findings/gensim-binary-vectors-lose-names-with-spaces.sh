#!/usr/bin/env bash
# gensim 4.4.0: vectors whose names have spaces are saved in word2vec's binary format, and come back as others.
#
# In that format a name ends at the first space, and the vector follows. ``save_word2vec_format(binary=True)`` writes a
# name with a space all the same, so its vector begins within the name. ``load_word2vec_format`` takes the bytes that are
# left over for the beginning of the next name. The same vectors as text are saved, too, and refused when they are loaded.
# Seen: no error; of "new york" and "boston" there come "new", with another vector, and a garbled name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check gensim==4.4.0
"$folder/venv/bin/python" -W ignore - "$folder/vectors" <<'PYTHON'
import sys

import numpy as np
from gensim.models import KeyedVectors

names, rows = ["new york", "boston"], np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
vectors = KeyedVectors(2)
vectors.add_vectors(names, rows)
vectors.save_word2vec_format(f"{sys.argv[1]}.bin", binary=True)
binary = KeyedVectors.load_word2vec_format(f"{sys.argv[1]}.bin", binary=True, unicode_errors="replace")
print(f"{binary.index_to_key}, {binary.vectors.tolist()}")
assert "new" in binary.key_to_index and not np.array_equal(binary["new"], rows[0]), "this has changed"
assert "boston" not in binary.key_to_index, "this has changed"
PYTHON
