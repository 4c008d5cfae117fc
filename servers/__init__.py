"""The server, aggregator and scheduler processes. ``python -m servers`` starts one; ``DMLC_ROLE`` says which.

processes  how they start, and how often Python's garbage collector runs
server     the server as a process: a member that has a shard, and writes what it captures; faults for drills
scheduler_process  the scheduler likewise, with the file of its log
member     what servers and aggregators have in common: they join, serve and leave
service    the loop around a core; all I/O and time of a process is here
endpoints  the addresses that they listen at
shard      the core of a server: messages in, replies out
saving     what worker 0 asks a server for a checkpoint, and the thread that writes it
store      one store on one server: buckets, rounds, updates, waiting requests
scheduler  the core of the scheduler: members, keys, barriers
reading    readers on a server: what they ask is answered between the messages of workers
aggregator a process for one host's workers: it sums what they push, and servers see it in their place
observer   the process beside a job that shows how it is; no member
replication a server's rank as a pair, of which one may die: records, the gate, taking over
tracing    the file of a job's trace
requests   what all cores do with requests: repeats, replies, links
activity   what a core has done so far, and the workers that wait in it, for its reports
names      how messages to people name members
"""

import kvstore

if not hasattr(kvstore, "create"):  # a module of the user's has the name
    raise ImportError(f"servers needs the package kvstore, but `import kvstore` gives {kvstore}; rename that file")
