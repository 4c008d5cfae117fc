#!/usr/bin/env bash
# torch 2.13.0: ``AveragedModel(use_buffers=True)`` rounds the average of an integer buffer down at each update.
#
# ``swa_utils.AveragedModel`` keeps a running average of a model, with ``use_buffers`` also of its buffers, of which
# BatchNorm's ``num_batches_tracked`` is an integer. Each update writes an average that is less than one above the last
# one into that integer. So it never rises, however long the training is; with ``get_ema_multi_avg_fn`` it lags behind.
# BatchNorm with ``momentum=None`` divides by this number when the averaged model goes on training.
# Seen: after 100 batches and 100 updates the model has counted 100, the averaged model 1; their mean is 50.5.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = torch.nn.BatchNorm1d(3)
mean = AveragedModel(model, use_buffers=True)
moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for _ in range(100):
    model(torch.randn(4, 3))
    mean.update_parameters(model)
    moving.update_parameters(model)

counted = [int(each.num_batches_tracked) for each in (model, mean.module, moving.module)]
print(f"batches: {counted[0]} of the model, {counted[1]} of its mean, {counted[2]} of its moving average")
assert counted[:2] == [100, 1], "this has changed"
assert torch.allclose(mean.module.running_mean, model.running_mean, atol=1.0)  # floating-point buffers are averaged
PYTHON
