#!/usr/bin/env bash
# torch 2.13.0: a DataLoader with worker processes asks its sampler for an iterator twice in an epoch, and uses the second.
#
# ``DataLoader.__iter__`` calls ``iter(batch_sampler)`` in the base class of its iterators, and with num_workers > 0 once
# more when the processes are reset. A sampler whose ``__iter__`` changes something (a position, a random state, a file)
# does so twice. In the process itself (num_workers=0) it is once.
# Seen: 1 call with num_workers=0, 2 calls with num_workers=1, each for one epoch.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from torch.utils.data import DataLoader, Sampler


class Counted(Sampler):
    calls = 0

    def __iter__(self):
        self.calls += 1
        return iter(range(4))

    def __len__(self):
        return 4


for processes, expected in ((0, 1), (1, 2)):
    sampler = Counted()
    loader = DataLoader(range(4), batch_size=None, sampler=sampler, num_workers=processes)
    assert [int(item) for item in loader] == [0, 1, 2, 3]
    print(f"num_workers={processes}: iter(sampler) was called {sampler.calls} times in one epoch")
    assert sampler.calls == expected, "this has changed"
PYTHON
