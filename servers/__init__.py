"""What a server process is, and the scheduler: start one with ``python -m servers``, its role in ``DMLC_ROLE``.

server     the processes: how they begin and end
service    the loop around a core: all I/O and time is here
endpoints  where they listen
shard      a server's core: messages in, replies out
store      one store on one server
scheduler  the scheduler's core
requests   what both do with requests: repeats, replies, links
names      members in messages to people
"""
