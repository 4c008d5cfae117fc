"""A process as a member of a job: it joins, sends requests and takes replies, sends heartbeats, and leaves.

shared_session  the session that all stores of a worker process share; it leaves when the process ends
session         joining, and leaving in order
client          sends requests and waits for replies, for any thread; says what a late answer waits for
activity        what a worker's process has done so far, as it reports with its heartbeats
links           the links to the scheduler and the servers, and how they are reconnected
outstanding     the requests without an answer
window          the send window: which request goes next, while the bytes in flight are bounded
link_access     one thread at a time uses the links, and leaves them whole
mutual_waits    how long callers have waited, and whether workers wait for each other
heartbeat       the thread that tells the scheduler that this process is alive
stacks          where the threads of this process are in their code
pulse           the process beside it that does the same while the interpreter is busy in C
"""
