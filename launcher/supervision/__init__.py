"""The loop around a job: signals, and when and how the job ends.

supervisor   the loop
crew         the interface of what runs tasks, and of who hears from it
ending       when a job ends, and how. No I/O
actions      what it has the supervisor do. No I/O
restarts     which processes may die, and when they are started again. No I/O
drill        the faults that launch.py injects by the time. No I/O
postmortem   what a failed job says at its end. No I/O
signals      signals as something to wait for
report       tells the scheduler which process has failed, or died
"""
