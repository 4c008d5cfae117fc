#!/usr/bin/env bash
# torch 2.13.0, Linux: in a forked process, the first operations of several threads fail with an internal assertion.
#
# A child after fork makes torch's pool of threads anew, for the parent's threads are not there. Whichever thread comes
# first does so, without a lock: it takes the old pool away, and then makes the new one. A thread that comes in between
# finds none. It happens to operations that may run in parallel, as sort, exp or sum of many elements, if the parent has
# used torch. ``torch.set_num_threads(torch.get_num_threads())`` in the child, before it starts threads, avoids it.
# Seen: "pool INTERNAL ASSERT FAILED ... Invalid thread pool!" in 44 to 88 of 100 children with eight threads; in none
# whose first thread has made the pool.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os
import threading

import torch

THREADS, CHILDREN = 8, 100
values = torch.arange(100_000.0)
torch.set_num_threads(2)
values.exp()  # the parent has a pool


def error_in_child(prepared: bool) -> str:
    """Fork a child whose threads sort at the same moment; return what one of them raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if prepared:
            torch.set_num_threads(torch.get_num_threads())
        together, errors = threading.Barrier(THREADS), []

        def sort() -> None:
            together.wait()
            try:
                values.sort()
            except RuntimeError as exc:
                errors.append(str(exc))

        threads = [threading.Thread(target=sort) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.write(write, "".join(errors[:1]).encode()[:200])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        error = pipe.read()
    os.waitpid(child, 0)
    return error


failed = [error for error in (error_in_child(False) for _ in range(CHILDREN)) if error]
print(f"{len(failed)} of {CHILDREN} children: {failed[0].split(', please')[0] if failed else 'no error'}")
assert failed, "this has changed"
assert all("Invalid thread pool" in error for error in failed), "this has changed"
assert not any(error_in_child(True) for _ in range(CHILDREN)), "this has changed"
PYTHON
