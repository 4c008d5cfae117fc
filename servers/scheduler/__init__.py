"""The rendezvous: who is in the job, which keys there are and where, who has come to which barrier. Pure logic."""

from servers.scheduler.core import Scheduler

__all__ = ["Scheduler"]
