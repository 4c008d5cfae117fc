"""The scheduler's core: members of a job, keys of its stores and where they are, barriers. Pure.

The cost of a message does not depend on the number of members.
"""

from servers.scheduler.core import Scheduler

__all__ = ["Scheduler"]
