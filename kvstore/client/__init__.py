"""Stores that servers hold: a worker's side.

store        DistStore: the calls
calls        their arguments, checked
store_calls  what all calls need: who this worker is, and what has gone wrong
table_calls  the calls that are about tables alone
update_calls  those about the optimizer that servers update with, and its states
job_calls    those about the job: barriers, join, what a worker reports
checkpoint_calls those about the job's checkpoints
rows         tables: their rows out and in, by their ids
first_values the arguments of init, checked
plans        what a list of keys means: checks of its arrays, and the messages it takes
pushes       contributions out, values in, and who waits for which
pending      the requests that push and pull arrays, until they are answered
checkpointing  this worker's part in the job's checkpoints: when they are due, and what they have
trained      a store as the checkpoints see it: what they save of it, and what it gets from one
worker_part  what this worker adds to the checkpoints
meetings     the meetings of the workers, where all hear what worker 0 has decided
captures     the servers' captures for one checkpoint, asked for and awaited
saving       one checkpoint at worker 0, from the servers' files to the manifest
resuming     the checkpoint that the job continues from
restored_tables its tables, given to the servers
clocks       how often each key has been pushed
counts       the counters behind statistics()
requests     the messages themselves, to servers and scheduler
outgoing     arrays into messages
incoming     replies into arrays
compression  values in fewer bytes, both ways
delegation   compression that the aggregator does, after the sum
optimizer    what this worker has set, and what its pushes ask for
momentum     what to tell who sets a high momentum where gradients come late
barriers     the barriers that this worker has passed, and the one that it waits at
join         this worker has run out of batches
states       the optimizer's states, of arrays and of segments
options      what create() takes
"""

from kvstore.client.store import DistStore

__all__ = ["DistStore"]
