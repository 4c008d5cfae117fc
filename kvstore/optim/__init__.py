"""Optimizers: torch's, described by a name and numbers, so that a server can have one.

optimizer        the description: what ``set_optimizer`` takes
hyperparameters  its values, as users give them and as the wire carries them
updater          updates with ``torch.optim``
fused            arrays that are updated alike, as one parameter
states           the states in a file
"""
