"""How a running job is: what an observer sees of it, and what follows from that.

status_command    ``kvstore-status``: what it prints, and what it executes to serve a page or to write a trace
choice            which job is meant
observer_session  an observer's link to the scheduler
view              the job at one moment: members, their reports, what has happened
figures           what follows from several reports: waits, and the rounds of the job
advice            what holds the job up, by rules that show their numbers
straggler         which worker holds up all others, and by what; what looks at it say of its time
text              a job, and the stacks of its members, in lines
columns           tables of members: of many, the usual values and the members that differ
as_json           a job as JSON
quantities        the numbers that members report: one table of names, values and metrics; how numbers are written
"""
