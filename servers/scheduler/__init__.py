"""The rendezvous: who is in the job, which keys there are and where, who has come to which barrier. Pure logic.

    core         messages and the time in, messages out
    members      who is in the job, their ranks, and who has been silent for too long
    departures   workers that have left in order, and whether the others know
    stores       the stores of a job: their numbers, and what a worker waits for
    store        one store: who waits in it for whom, and fails because somebody will not come
    keys, barriers, joins   of one store: declarations of keys; who has come to a barrier; who is inside ``join``

What a message costs does not depend on how many members there are.
"""

from servers.scheduler.core import Scheduler

__all__ = ["Scheduler"]
