#!/usr/bin/env bash
# torch 2.13.0: under compiled autograd, a callback that is queued during backward is never called.
#
# ``queue_callback`` of the autograd engine is how DistributedDataParallel and FSDP learn that a backward pass has ended. A
# hook calls it, and the engine calls the callback behind the last node. Compiled autograd runs the hook as well, takes
# the callback, and drops it at the end of the pass, without an error or a warning.
# Seen: eager backward calls it once; the same backward under compiled autograd calls the hook, and not the callback.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch._dynamo import compiled_autograd

seen = []


@torch._dynamo.disable
def at_the_end(grad):
    seen.append("hook")
    torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("callback"))


def backward():
    seen.clear()
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(at_the_end)
    (2 * weight).sum().backward()
    return list(seen), weight.grad.tolist()


eager = backward()
with compiled_autograd._enable(torch.compile(backend="eager")):
    compiled = backward()
print(f"eager: {eager}\ncompiled autograd: {compiled}")
assert eager == (["hook", "callback"], [2.0] * 3)
assert compiled[0].count("callback") == 0, "this has changed: the callback is called"
assert compiled == (["hook"], [2.0] * 3), "this has changed"
PYTHON
