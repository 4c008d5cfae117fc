"""Optimizers that torch.optim lacks, MXNet's among them: each updates one tensor at a time (``Tensorwise``)."""
