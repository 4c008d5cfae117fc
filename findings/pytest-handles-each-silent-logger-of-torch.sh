#!/usr/bin/env bash
# pytest 9.2.0 with torch 2.13.0: importing torch makes every test of a suite slower, also those that do not use it.
#
# torch makes some 40 loggers that keep their records from the root's (``propagate = False``), when it is imported.
# pytest adds its two handlers to each such logger, and removes them, in each of a test's three phases: 250 handlers for
# a test that does nothing. That took 2.5 ms of 5 to 8 in a suite of 14,000 tests. ``propagate = True`` in a conftest
# avoids it; so does ``-p no:logging``, without ``caplog``.
# Seen: 6 handlers for each empty test without torch, 6 for each silent logger more with it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pytest==9.2.0
cd "$folder"
cat >conftest.py <<'PYTHON'
import logging
import os

if os.environ["WITH"] == "torch":
    import torch

added = 0
add = logging.Logger.addHandler


def counting(self, handler):
    global added
    added += 1
    add(self, handler)


def pytest_sessionstart(session):
    logging.Logger.addHandler = counting


def pytest_terminal_summary(terminalreporter):
    known = logging.root.manager.loggerDict.values()
    silent = sum(isinstance(one, logging.Logger) and not one.propagate for one in known)
    terminalreporter.write_line(f"counted {added} {silent}")
PYTHON
count() {  # prints the handlers that were added, and the loggers that keep records from the root's
  printf 'import pytest\n\n\n@pytest.mark.parametrize("n", range(%d))\ndef test(n):\n    pass\n' "$2" >test_nothing.py
  WITH=$1 "$folder/venv/bin/python" -W ignore -m pytest -q test_nothing.py | sed -n 's/^counted //p'
}
for with in nothing torch; do
  read -r few silent < <(count "$with" 10)
  read -r many _ < <(count "$with" 110)
  each=$(((many - few) / 100))
  echo "with $with: $each handlers are added for an empty test; $silent loggers are silent"
  [[ $each -eq $((6 * (silent + 1))) ]] || { echo "this has changed"; exit 1; }
  [[ $with = nothing || $silent -ge 30 ]] || { echo "this has changed"; exit 1; }
done
