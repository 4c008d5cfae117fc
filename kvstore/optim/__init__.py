"""Optimizers, described by a name and numbers, so that a server can have one.

algorithms       MXNet's optimizers that torch.optim lacks, and MXNet's momentum
eager            torch's optimizers without their compiler
rows             how optimizers change rows of tables: the rules
optimizer_class  what a server must know of an optimizer's class
counts           optimizers that count updates for all keys: each key has its own count
allowed          the door for other optimizers: classes that the operator of the process allows
registry         which optimizers there are
optimizer        the description: what ``set_optimizer`` takes
hyperparameters  its values, as users give them and as the wire carries them
param_groups     what the description means to torch.optim, key by key
fused            arrays that are updated alike, as one parameter
states           what an optimizer keeps of each key: momentum, counts, float32 copies
updater          the step: gradients change weights
row_updater      the step for tables: gradients change gathered rows
states_file      the states in a file
state_messages   the states of segments in a message
"""
