"""How a running job is: what an observer sees of it, and what follows from that.

session     an observer's link to the scheduler
view        the job at one moment: members, their reports, what has happened
"""
