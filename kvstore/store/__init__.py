"""The interface of all stores, and the stores that need no job.

factory              ``create``: from a name to a store
registry             the names of stores, built in and registered
base                 ``KVStore``, the interface
optimizer_interface  the part of it that is about updates
table_interface      the part of it that is about tables of rows
checkpoint_interface the part of it that is about checkpoints
job_interface        the part of it that is about the workers of the job
named                what these have in common
arguments            (key, value) arguments in any of their forms, as keys with lists of values
wanted_rows          which rows of one table a call wants
local                ``local`` and ``device``: sums and updates in this process
local_tables         their tables
statistics           what a store has done so far
"""
