"""The server, aggregator and scheduler processes. ``python -m servers`` starts one; ``DMLC_ROLE`` says which.

server     the server as a process: how it starts and ends
scheduler_process  the scheduler likewise
input_log  the file with the scheduler's inputs, for its successor
shard_member  a member that has a shard, and writes what it captures
member     what servers and aggregators have in common: they join, serve and leave
round_faults  faults that a server injects into itself, for drills
service    the loop around a core; all I/O and time of a process is here
endpoints  the addresses that they listen at
farewell   what they say when they end because another process has failed
shard      the core of a server: messages in, replies out
checkpoint_requests  what worker 0 asks a server for a checkpoint
saving     writes a server's part of a checkpoint, in a thread
store      one store on one server: buckets, rounds, updates, waiting requests
scheduler  the core of the scheduler: members, keys, barriers
reading    readers on a server: what they ask is answered between the messages of workers
aggregator a process for one host's workers: it sums what they push, and servers see it in their place
observer   the process beside a job that shows how it is; no member
replication a server's rank as a pair, of which one may die: records, the gate, taking over
requests   what all cores do with requests: repeats, replies, links
activity   what a core has done so far, and who waits in it, for its reports
names      how messages to people name members
garbage_collector  how often Python's garbage collector runs
"""

import kvstore

if not hasattr(kvstore, "create"):  # a module of the user's has the name
    raise ImportError(f"servers needs the package kvstore, but `import kvstore` gives {kvstore}; rename that file")
