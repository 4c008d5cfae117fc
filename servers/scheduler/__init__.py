"""The scheduler's core: the members of a job, the keys of its stores and where they are, and barriers. Pure.

core        messages and the time in, messages out; how members join
members     who is who, their states and ranks, what they are told of each other, who has been silent for too long
failure     whether the job has failed, why, who is told; how the scheduler learns that a member has ended
failover    who serves each server's rank, what becomes of it when one of its two processes ends, and who is told
beats       signs of life, and what members are told in return
departures  workers that have left in order, and when and what the others are told
stores      the stores of a job and their numbers; who waits for whom in each, at barriers and in ``join``
keys        the keys of one store, as workers declare them, and where their segments are
deadlocks   workers that wait for each other, so that none of their calls ever ends
observing   how the job is, as far as the scheduler knows, and who asks
inquiries   questions where members are in their code
straggling  what members report, and which worker holds up all others, and by what
traces      what members have noted for the job's trace, on its way to the observer
guests      readers, where the servers are, which keys there are; what observers have in common with readers
logged      the scheduler with a log of its inputs, from which a successor is made

The cost of a message does not depend on the number of members.
"""

from servers.scheduler.core import Scheduler

__all__ = ["Scheduler"]
