"""What a store is to its user, and the stores that need no job.

factory     ``create``: from a name to a store
registry    which names there are
base        ``KVStore``, the interface
arguments   the shapes that keys and values may come in, made one
local       ``local`` and ``device``: sums and updates inside this process
statistics  what a store says of itself
"""
