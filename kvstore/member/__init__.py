"""A process as a member of a job.

session      joins, and leaves in order
client       requests out, replies in: the links to scheduler and servers
links        the links as they are now, and how they are made anew
outstanding  the requests that have not been answered
window       which request goes next, where a bounded number may be on their way
io_lock      one thread at a time is at the links
heartbeat    signs of life
pulse        signs of life from beside a process that is busy in C
"""
