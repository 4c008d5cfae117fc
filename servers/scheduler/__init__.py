"""The scheduler's core: the members of a job, the keys of its stores and where they are, and barriers. Pure.

core        messages and the time in, messages out
member      one member: its states, and how one follows another
members     all of them: who is who, their ranks, and who has been silent for too long
joining     how members join: who asks, who is missing, who is welcomed when
welcomes    what members are told of each other when they have joined
views       who serves each server's rank, and who would take over
failure     whether the job has failed, why, and who is told
losses      how the scheduler learns that a member has ended, and what follows
failover    what becomes of a rank when one of its two processes ends, and who is told
beats       signs of life, and what members are told in return
observing   how the job is, as far as the scheduler knows, and who asks
inquiries   questions where members are in their code
departures  workers that have left in order, and when and what the others are told
stores      the stores of a job and their numbers
store       one store: which workers wait in it for which others
keys        the keys of one store, as workers declare them
placements  where the segments of the keys are
barriers    who has come to which barrier of one store
joins       who is inside ``join`` of one store
reports     what members report of themselves
straggling  which worker holds up all others, while the job runs, and by what
readers     who may read, where the servers are, which keys there are
observers   who may look on, and what they are told
events      what has happened, for observers
logged      the scheduler with a log of its inputs, from which a successor is made
records     what that log consists of
live_records  which of its records are still needed

The cost of a message does not depend on the number of members.
"""

from servers.scheduler.core import Scheduler

__all__ = ["Scheduler"]
